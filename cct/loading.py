"""From YAML to a recipe and back: bases, `--set`, plug-ins, errors with file and line, dump and JSON schema.

    base: base/chain_arithmetic.yaml      # optional; this file's keys are laid over it
    transport: {use: comp_gae, lam: 0.95}

Laying over: mappings merge key by key; a component whose `use` differs replaces the other one whole
(another generation engine keeps what all engines share); everything else replaces. `--set a.b=c` is one more layer.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from cct.recipe import Plugin, Recipe, RecipeError
from cct.registry import (
    REGISTRIES,
    Component,
    Exited,
    Knobs,
    PluginError,
    Registry,
    did_you_mean,
    load_entry_points,
    load_plugin,
    no_exit,
)
from cct.system import plain_yaml
from cct.system.plain_yaml import MOST_LEVELS, NEVER_WRITTEN, Key, Unreadable, index_or_name, read_file
from cct.system.terminal import shortened
from cct.transport import Transport

SHIPPED = Path(__file__).parent / "recipes"
OWN = " (the run's own)"  # behind the name of a recipe's transport

K = TypeVar("K", bound=Knobs)


class Source:
    """Plain data as it was written, and for each key path the place where it was."""

    def __init__(self, data: Any = None, marks: dict[Key, str] | None = None):
        self.data = data if data is not None else {}
        self.marks = marks or {}

    def lay_over(self, base: Source) -> Source:
        replaced: set[Key] = set()

        def merge(low: Any, high: Any, path: Key) -> Any:
            if isinstance(high, Mapping) and isinstance(low, str) and "use" not in high:
                low = {"use": low}  # `--set transport.lam=1` over `transport: gae`
            if (
                isinstance(high, Mapping)
                and high
                and isinstance(low, list)
                and all(isinstance(index_or_name(key), int) for key in high)
            ):
                changed = {int(key): value for key, value in high.items()}
                for index in changed:
                    if index >= len(low):
                        raise RecipeError(f"{self.mark(path)}{dotted(path)} has {len(low)} entries; there is no number {index}")
                return [merge(item, changed[i], (*path, i)) if i in changed else item for i, item in enumerate(low)]
            registry = REGISTRIES.get(str(path[-1])) if path else None
            if registry and registry.keeps_shared and isinstance(low, Mapping):
                high = {"use": high} if isinstance(high, str) else high
                if isinstance(high, Mapping) and high.get("use", low.get("use")) != low.get("use"):
                    low = {"use": high["use"]} | {key: low[key] for key in registry.base.model_fields if key in low}
            same = isinstance(high, Mapping) and isinstance(low, Mapping) and high.get("use", low.get("use")) == low.get("use")
            if same:
                return {
                    key: merge(low[key], high[key], (*path, key)) if key in low and key in high else high.get(key, low.get(key))
                    for key in [*low, *(k for k in high if k not in low)]
                }
            replaced.add(path)
            return high

        merged = merge(base.data, self.data, ())
        below = {key: mark for key, mark in base.marks.items() if not any(key[:n] in replaced for n in range(len(key) + 1))}
        return Source(merged, below | self.marks)

    def section(self, *path: str | int) -> Source:
        """What stands at a key path, with its marks."""
        data, size = self.data, len(path)
        for key in path:
            data = data[key]
        return Source(data, {key[size:]: mark for key, mark in self.marks.items() if key[:size] == path and len(key) > size})

    def mark(self, path: Sequence[str | int]) -> str:
        """`file, line N: ` of the longest written prefix of a key path."""
        keys = tuple(path)
        while keys and keys not in self.marks:
            keys = keys[:-1]
        return self.marks.get(keys, "") and f"{self.marks[keys]}: "


def dotted(path: Sequence[str | int]) -> str:
    return ".".join(shortened(str(key), 80) for key in path)


def read_yaml(path: Path) -> Source:
    """A YAML file that holds a mapping. Raises RecipeError with the line of what cannot be read."""
    try:
        data, lines = plain_yaml.load(read_file(path).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: cannot be read (not UTF-8: {error})") from None
    except Unreadable as error:
        at = f", line {error.line}" if error.line else ""
        raise RecipeError(f"{path}{at}: {error}{_near(path)}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: expected a mapping of sections; found {'nothing' if data is None else type(data).__name__}")
    return Source(data, {keys: f"{path}, line {line}" for keys, line in lines.items()})


def _near(path: Path) -> str:
    """A guess, where nothing is at a path."""
    if os.path.lexists(path):
        return ""
    names = [found.name for found in itertools.islice(path.parent.glob("*.y*ml"), 1000)]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _mapped(text: str, what: str) -> Any:
    """The value that a text of the command line is in YAML; `what` begins the message of one that is none."""
    try:
        return plain_yaml.load(text)[0]
    except Unreadable as error:
        raise RecipeError(
            f"{what}: the value is {error}; quote it" if "not YAML (" in str(error) else f"{what}: {error}"
        ) from None


def with_bases(source: Source, path: Path, above: tuple[Path, ...] = ()) -> Source:
    """A recipe, or a section of the file `path` that is one, laid over the bases that it names; paths made absolute.

    Raises RecipeError where a base is missing, or they go round in a circle.
    """
    above, data = (*above, Path(os.path.realpath(path))), dict(source.data)
    if isinstance(data.get("plugins"), list):  # relative to the file that names them
        data["plugins"] = [_absolute_plugin(entry, path.parent) for entry in data["plugins"]]
    if isinstance(data.get("evidence"), list):  # so are files with code of evidence
        data["evidence"] = [_absolute_python(entry, path.parent) for entry in data["evidence"]]
    if isinstance(data.get("callbacks"), list):
        data["callbacks"] = [_absolute_callback(entry, path.parent) for entry in data["callbacks"]]
    if isinstance(data.get("logging"), dict) and isinstance(logger := data["logging"].get("logger"), list | dict):
        every = [_absolute_callback(one, path.parent) for one in (logger if isinstance(logger, list) else [logger])]
        data["logging"] = data["logging"] | {"logger": every}
    if isinstance(data.get("environment"), dict):
        data["environment"] = _absolute_environment(data["environment"], path.parent)
    base, own = data.pop("base", None), Source(data, source.marks)
    if base is None:
        return own
    if not isinstance(base, str):
        raise RecipeError(f"{own.mark(('base',))}base must name one YAML file; found {shortened(repr(base), 80)}")
    target = path.parent / base
    if Path(os.path.realpath(target)) in above:
        circle = " -> ".join(shortened(each.name, 80) for each in (*above, target))
        raise RecipeError(f"{own.mark(('base',))}bases form a circle: {circle}")
    if len(above) > MOST_LEVELS:
        raise RecipeError(f"{own.mark(('base',))}a chain of more than {MOST_LEVELS} bases")
    try:
        below = read_yaml(target)
    except RecipeError as error:
        if os.path.isfile(target):  # what is wrong stands there
            raise
        raise RecipeError(f"{own.mark(('base',))}base: {error}") from None
    return own.lay_over(with_bases(below, target, above))


def _absolute_plugin(entry: Any, folder: Path) -> Any:
    plugin = {"path": entry} if isinstance(entry, str) else entry
    if isinstance(plugin, dict) and isinstance(plugin.get("path"), str) and plugin["path"].endswith(".py"):
        plugin = {**plugin, "path": os.path.realpath(folder / plugin["path"])}
    return plugin


def _absolute_python(entry: Any, folder: Path) -> Any:
    if isinstance(entry, dict) and entry.get("use") == "python" and isinstance(entry.get("path"), str):
        entry = {**entry, "path": os.path.realpath(folder / entry["path"])}
    return entry


def _absolute_callback(entry: Any, folder: Path) -> Any:
    return {**entry, "use": _absolute_name(entry["use"], folder)} if isinstance(entry, dict) and "use" in entry else entry


def _absolute_environment(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Tools, and an environment's class, that stand in files."""
    if entry.get("use") == "tools" and isinstance(entry.get("tools"), list):
        entry = {**entry, "tools": [_absolute_name(tool, folder) for tool in entry["tools"]]}
    if entry.get("use") == "gym_text" and "env" in entry:
        entry = {**entry, "env": _absolute_name(entry["env"], folder)}
    return entry


def _absolute_name(name: Any, folder: Path) -> Any:
    """`./file.py:name`, its file made absolute."""
    if not isinstance(name, str) or ".py:" not in name:
        return name
    path, _, name = name.rpartition(":")
    return f"{os.path.realpath(folder / path)}:{name}"


def override(text: str) -> Source:
    """The layer that a `--set a.b=value` is. Raises RecipeError where it is none."""
    key, equals, value = text.partition("=")
    keys = key.strip().split(".")
    where = f"--set {shortened(text, 200)}"
    if not equals or not all(keys):
        raise RecipeError(f"{where}: expected a.b=value, for example --set training.iterations=10")
    if NEVER_WRITTEN.search(key):
        raise RecipeError(f"{where}: the key is not UTF-8")
    if len(keys) > MOST_LEVELS:
        raise RecipeError(f"{where}: nested deeper than {MOST_LEVELS} levels")
    data = _mapped(value, where)
    for name in reversed(keys):
        data = {name: data}
    path = tuple(index_or_name(key) for key in keys)
    return Source(data, {path[: i + 1]: where for i in range(len(path))})


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, lay over bases and `--set`s, import plug-ins, validate. path: a file, or the name of a recipe that comes with cct.

    Raises RecipeError with every problem found. An error inside a plug-in passes through with its own
    traceback, noted with the recipe's line.
    """
    path = recipe_file(path)
    source = with_bases(read_yaml(path), path)
    for text in overrides:
        source = override(text).lay_over(source)
    return recipe_of(source, path)


def recipe_file(path: str | Path) -> Path:
    """The file of a recipe: `path` itself, or that of a recipe that comes with cct where it is just a name, `compo`."""
    given = Path(path)
    if given.suffix or len(given.parts) != 1 or given.is_file():
        return given
    shipped = {file.stem: file for file in sorted(SHIPPED.glob("*.yaml"))}
    if given.name not in shipped and given.exists():
        return given
    if given.name not in shipped:
        what = did_you_mean("recipe that comes with cct", given.name, shipped)
        raise RecipeError(f"{what}; the name of a file of your own ends in .yaml")
    return shipped[given.name]


def recipe_of(source: Source, path: Path) -> Recipe:
    """The recipe that was written, its plug-ins imported; `path` stands in messages about what was not. As `load_recipe`."""
    load_entry_points()
    source.data["plugins"] = _import_plugins(source)
    return validated(Recipe, source, path)


def validated(model: type[K], source: Source, path: Path) -> K:
    """What was written, as a model. Raises RecipeError with every problem, each with its place."""
    try:
        with no_exit():
            return model.model_validate(source.data)
    except Exited as error:
        raise RecipeError(f"{path}: {error}") from error
    except ValidationError as error:
        raise RecipeError(*(_describe(problem, source, path, model) for problem in _joined(error.errors()))) from None


def read_part(axis: str, written: str, overrides: Sequence[str] = ()) -> Component:
    """A component as a recipe would hold it, from YAML: a name or `{use: name, knob: value}`, and `--set`s of its knobs.

    Raises RecipeError.
    """
    source = Source({axis: _mapped(written, f"{axis} {shortened(written, 200)}")})
    for text in overrides:
        source = override(f"{axis}.{text}").lay_over(source)
    registry = REGISTRIES[axis]
    try:
        adapter: TypeAdapter[Component] = TypeAdapter(Annotated[registry.base, registry])  # type: ignore[arg-type]
        return adapter.validate_python(source.data[axis])
    except ValidationError as error:
        problems = [
            f"{dotted((axis, *problem['loc']))}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in _joined(error.errors())
        ]
        raise RecipeError(*problems) from None


def read_transports(recipe: Recipe, written: Sequence[str], plugins: Sequence[str]) -> dict[str, Transport]:
    """The recipe's transport, and those written in YAML, by what is written; the files of `plugins` are imported before.

    Raises RecipeError.
    """
    for plugin in plugins:
        try:
            load_plugin(plugin, Path.cwd())
        except PluginError as error:
            raise RecipeError(str(error)) from None
    found = {recipe.transport.use + OWN: recipe.transport}
    for text in written:
        part = read_part("transport", text)
        assert isinstance(part, Transport)
        found[text.strip()] = part
    return found


def _import_plugins(source: Source) -> list[dict[str, Any]]:
    entries = source.data.get("plugins")
    entries = [] if entries is None else entries
    if not isinstance(entries, list):
        found = shortened(repr(entries), 80)
        raise RecipeError(f"{source.mark(('plugins',))}plugins must be a list of files or modules; found {found}")
    loaded = []
    for index, entry in enumerate(entries):
        where = source.mark(("plugins", index))
        try:
            plugin = Plugin.model_validate({"path": entry} if isinstance(entry, str) else entry)
        except ValidationError as error:
            raise RecipeError(
                f"{where}a plug-in is a path or module name; found {shortened(repr(entry), 80)} ({error.errors()[0]['msg']})"
            ) from None
        try:
            digest = load_plugin(plugin.path, Path.cwd(), plugin.sha256)
        except PluginError as error:
            raise RecipeError(f"{where}{error}") from None
        except Exception as error:
            error.add_note(f"{where}plug-in {plugin.path} failed to import")
            raise
        loaded.append({"path": plugin.path, "sha256": digest})
    return loaded


def _joined(problems: Sequence[Any]) -> list[Any]:
    """Pydantic reports each branch of a union by itself, with the branch in the key path; here they are one problem."""
    found: list[Any] = []
    branches: dict[tuple[str | int, ...], Any] = {}
    for problem in problems:
        keys = tuple(key for key in problem["loc"] if not (isinstance(key, str) and "[" in key))
        if keys != problem["loc"] and keys in branches:
            branches[keys]["msg"] += ", or " + problem["msg"].removeprefix("Input should be ")
        else:
            found.append(problem | {"loc": keys})
            branches[keys] = found[-1]
    return found


def _describe(problem: Any, source: Source, path: Path, model: type[Knobs]) -> str:
    keys = problem["loc"]
    purpose = _purpose(keys, source.data, model)
    where = source.mark(keys) or f"{path}: "
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{where}{dotted(keys)} is missing and has no default. {purpose}".rstrip()
    if problem["type"] in ("component", "pairing", "unknown_key"):
        return f"{where}{dotted(keys)}{': ' if keys else ''}{message}"
    found = problem["input"]
    if problem["type"] == "list_type" and isinstance(found, str | dict):
        message += f", for example [{shortened(found, 80) if isinstance(found, str) else '{use: ...}'}]"
    shown = f" (found {shortened(repr(found), 80)})" if not isinstance(found, dict) else ""
    return f"{where}{dotted(keys)}: {message[:1].lower()}{message[1:]}{shown}. {purpose}".rstrip()


def _purpose(keys: Sequence[str | int], data: Any, model: type[Knobs]) -> str:
    """The docstring of the knob at a key path of a model, where there is one."""
    knobs: Any = model
    description, registry = "", None
    for key in keys:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            data = None
        if isinstance(key, str) and get_origin(knobs) is not dict:  # an index, or a name, stays within its axis
            field = knobs.model_fields.get(key) if isinstance(knobs, type) and issubclass(knobs, Knobs) else None
            if field is None:
                return ""
            description, knobs = field.description or "", field.annotation
            annotations = [*field.metadata, *(note for item in get_args(field.annotation) for note in get_args(item))]
            registry = next((note for note in annotations if isinstance(note, Registry)), None)
        name = data.get("use") if isinstance(data, dict) else data
        if registry is not None and name in registry.names():
            knobs = registry[name]
    return description


def changes(old: Any, new: Any, path: str = "") -> list[str]:
    """`a.b: 1 -> 2` for every value in which two dumps of a recipe differ."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return [f"{path}: {old} -> {new}"] if old != new else []
    keys = {**old, **new}
    return [line for key in keys for line in changes(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))]


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every knob with its value."""
    return plain_yaml.dump(recipe.model_dump(mode="json"))


def json_schema() -> dict[str, Any]:
    """JSON Schema of recipe files, for editors; plug-ins imported so far included."""
    schema = Recipe.model_json_schema(mode="validation")
    schema["$defs"] |= {axis: registry.json_schema() for axis, registry in REGISTRIES.items()}
    schema["properties"]["base"] = {"type": "string", "description": "Recipe file that this one is laid over."}
    schema["properties"]["plugins"]["items"] = {"anyOf": [{"type": "string"}, schema["properties"]["plugins"]["items"]]}
    schema.pop("required")  # any key may stand in a base

    def refer(node: Any) -> Any:
        if isinstance(node, dict):
            if isinstance(node.get("axis"), str):
                return {
                    "$ref": f"#/$defs/{node['axis']}",
                    **({"description": node["description"]} if "description" in node else {}),
                }
            return {key: refer(value) for key, value in node.items()}
        return [refer(item) for item in node] if isinstance(node, list) else node

    return refer(schema)
