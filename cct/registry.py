"""Components and registries: how a name in a recipe becomes an operator.

A `Component` is a frozen bag of knobs that is itself the operator. A `Registry` maps the names of
one axis to component classes and, used as an annotation, teaches pydantic to read
`{use: name, knob: value}` or a bare `name`:

    class Recipe(BaseModel):
        transport: Annotated[Transport, transports]

Absent on purpose: no overriding of a registered name, no lazy string paths, no torch.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from asyncio import CancelledError
from collections.abc import Iterable, Iterator
from contextlib import chdir, contextmanager
from hashlib import sha256
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from cct.system.plain_yaml import Unreadable, read_file
from cct.system.terminal import shortened

_SCALARS = ("int", "float", "bool", "str")


def _exact(schema: Any) -> Any:
    """A core schema whose scalars take their own kind only, wherever they stand; lists may still become tuples."""
    if isinstance(schema, list):
        return [_exact(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: value if key == "metadata" else _exact(value) for key, value in schema.items()}
    if schema.get("type") == "literal":
        return core_schema.no_info_before_validator_function(_same_kind(schema["expected"]), schema)  # type: ignore[arg-type]
    if schema.get("type") in _SCALARS:
        schema.setdefault("strict", True)
    return schema


def _same_kind(expected: list[Any]) -> Any:
    def check(value: Any) -> Any:
        if any(value == one and type(value) is not type(one) for one in expected if isinstance(value, bool | int | float)):
            raise _error("literal_error", f"input should be {' or '.join(map(repr, expected))}")
        return value

    return check


class Knobs(BaseModel):
    """A frozen set of knobs. The docstring under each is its help, in `cct explain`, the schema and errors.

    No key is accepted and never read: an unknown one is refused, and so is one that another knob switches off (`unread`).
    No value is turned into one of another kind: `true` and "3" are no numbers, 3.0 is no whole number, 1 is no boolean.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return _exact(handler(source))

    @model_validator(mode="wrap")
    @classmethod
    def _know_every_key(cls, data: Any, handler: ModelWrapValidatorHandler) -> Any:
        """An unknown key gets a guess, and hides no other problem; what is set is read."""
        if not isinstance(data, dict):
            return handler(data)
        bad = {str(key): key for key in data if key not in cls.model_fields}
        problems: list[Any] = []
        for key in list(bad)[:MOST_UNKNOWN]:
            message = did_you_mean("key", key, cls.model_fields)
            problems.append({"type": _error("unknown_key", message), "loc": (key,), "input": data[bad[key]]})
        if len(bad) > MOST_UNKNOWN:
            message = f"{len(bad) - MOST_UNKNOWN:,} further keys are unknown"
            problems.append({"type": _error("unknown_key", message), "loc": (), "input": None})
        read: Any = None
        try:
            read = handler({key: value for key, value in data.items() if str(key) not in bad})
        except ValidationError as error:
            problems += [
                {"type": _error(e["type"], e["msg"]), "loc": e["loc"], "input": e["input"]}
                for e in error.errors()
                if not (e["type"] == "missing" and e["loc"][0] in bad)
            ]
        unread = {} if read is None else read.unread
        for knob, why in unread.items():
            if (found := getattr(read, knob)) != (default := read.default_of(knob)):
                message = f"nothing would read it: {why}; leave it out, or at its default ({default!r})"
                problems.append({"type": _error("unread", message), "loc": (knob,), "input": found})
        if problems:
            raise ValidationError.from_exception_data(cls.__name__, problems)
        return read

    @property
    def unread(self) -> dict[str, str]:
        """Knobs that nothing reads with the others as they are, and why. One of them that is not at its default is refused."""
        return {}

    def default_of(self, knob: str) -> Any:
        """What a knob is where nobody sets it."""
        return type(self).model_fields[knob].get_default(call_default_factory=True)


MOST_UNKNOWN = 5  # keys of one mapping that are named, each with a guess; the others are counted


def _error(kind: str, message: str) -> PydanticCustomError:
    return PydanticCustomError(kind, "{message}", {"message": message})  # type: ignore[arg-type]


def did_you_mean(kind: str, name: str, known: Iterable[str]) -> str:
    """Says that there is none, guesses, and lists what there is."""
    name = shortened(name, 80)  # difflib's time grows with the square of it
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    return f"no {kind} is called '{name}'{hint}; there are: {', '.join(known) or 'none'}"


class Component(Knobs):
    """A frozen set of knobs that is itself the operator."""

    axis: ClassVar[str] = ""
    """The registry of its base class."""
    use: ClassVar[str] = ""
    """The name it is registered under."""

    @property
    def needs(self) -> frozenset[str]:
        """What another part of the recipe must provide, for example `values`; by default what its children need."""
        return frozenset().union(*(part.needs for _, part in children(self)))

    @property
    def provides(self) -> frozenset[str]:
        """What it provides to other parts."""
        return frozenset()

    @property
    def claims(self) -> frozenset[str]:
        """Properties of the conformance suite that it has though not every operator does, for example `causal`."""
        return frozenset()

    @property
    def waives(self) -> dict[str, str]:
        """Properties of the conformance suite that it gives up, and why; by default those of its children. The suite says which
        can be."""
        return {name: f"{part.axis} '{part.use}': {why}" for _, part in children(self) for name, why in part.waives.items()}

    def ready(self) -> None:
        """Raises ValueError where it cannot work here, for want of a library or a file; `cct check` and `cct run` ask first."""

    @model_serializer(mode="wrap")
    def _with_name(self, handler: Any) -> dict[str, Any]:
        return {"use": self.use, **handler(self)}

    @classmethod
    def summary(cls) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(cls) or "").split("\n")[0]

    @classmethod
    def where(cls) -> tuple[Path, int]:
        """File and line of the definition."""
        try:
            return Path(inspect.getsourcefile(cls) or "?"), inspect.getsourcelines(cls)[1]
        except (OSError, TypeError):  # typed into a console
            return Path("?"), 0

    @classmethod
    def file(cls) -> Path:
        """File of the definition, relative to the folder above `cct` or to the current one; whole elsewhere."""
        path = cls.where()[0]
        for base in (Path(__file__).parents[1], Path.cwd()):
            if path.is_relative_to(base):
                return path.relative_to(base)
        return path


def children(value: Any, place: str = "") -> Iterator[tuple[str, Component]]:
    """Components among knobs, in their lists and mappings too, with their places; a component's own children are not walked."""
    if isinstance(value, Knobs):
        value = {name: item for name, item in vars(value).items() if name in type(value).model_fields}
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            where = f"{place}.{key}" if place else str(key)
            if isinstance(item, Component):
                yield where, item
            else:
                yield from children(item, where)


C = TypeVar("C", bound=Component)
REGISTRIES: dict[str, Registry[Any]] = {}


class Registry(Generic[C]):
    """The components of one axis, by name.

    axis: singular name as users say it, `transport`; entry points are read from the group `cct.<axis>`.
    keeps_shared: where a recipe laid over another one names a different component, knobs of the base class stay.
    """

    def __init__(self, axis: str, base: type[C], *, keeps_shared: bool = False):
        self.axis = base.axis = axis
        self.base = base
        self.keeps_shared = keeps_shared
        self._classes: dict[str, type[C]] = {}
        REGISTRIES[axis] = self

    def register(self, name: str):
        """Class decorator. Raises ValueError where the name is taken or the class is of another axis."""

        if not isinstance(name, str) or not name:
            raise ValueError(f'the name of a {self.axis} is a text, @register("my_name"); got {name!r}')

        def add(cls: type[C]) -> type[C]:
            if not (isinstance(cls, type) and issubclass(cls, self.base)):
                raise ValueError(f"{cls.__qualname__} is not a {self.base.__name__}; the {self.axis} registry takes no other")
            if cls.__dict__.get("use"):
                raise ValueError(f"{cls.__qualname__} is already registered as '{cls.use}'")
            if name in self._classes:
                path, line = self._classes[name].where()
                raise ValueError(f"{self.axis} '{name}' is already registered at {path}:{line}; choose another name")
            if not (cls.__dict__.get("__doc__") or "").strip():
                raise ValueError(f"{self.axis} '{name}' has no docstring; its first line is what `cct ls` prints")
            cls.use = name
            self._classes[name] = cls
            return cls

        return add

    def names(self) -> list[str]:
        return sorted(self._classes)

    def __getitem__(self, name: str) -> type[C]:
        if name not in self._classes:
            raise KeyError(did_you_mean(self.axis, name, self.names()))
        return self._classes[name]

    # --- pydantic -----------------------------------------------------------------------------
    def _read(self, value: Any) -> C:
        if isinstance(value, self.base):
            return value
        knobs = {"use": value} if isinstance(value, str) else value
        if not isinstance(knobs, dict) or not isinstance(knobs.get("use"), str):
            raise PydanticCustomError(
                "component",
                "expected a name or a mapping with the key 'use'; there are: {names}",
                {"names": ", ".join(self.names())},
            )
        try:
            cls = self[knobs["use"]]
        except KeyError as error:
            raise PydanticCustomError("component", "{message}", {"message": error.args[0]}) from None
        return cls.model_validate({key: knob for key, knob in knobs.items() if key != "use"})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._read,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda part: part.model_dump(mode="json")),
        )

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"axis": self.axis}  # becomes a reference: gates hold gates, so their schema cannot be written in place

    def json_schema(self) -> dict[str, Any]:
        """Every registered component by name, so that an editor completes names and knobs; other axes as `{"axis": name}`."""
        options: list[dict[str, Any]] = []
        for name, cls in sorted(self._classes.items()):
            part = cls.model_json_schema()
            defined = {key: value for key, value in part.pop("$defs", {}).items()}
            required = part.pop("required", [])
            part |= {"title": name, "description": cls.summary()}  # nothing is required: the rest may stand in a base
            part["properties"] = {"use": {"const": name}, **part.get("properties", {})}
            options.append(_inline(part, defined))
            if not required:
                options.append({"const": name, "description": cls.summary()})
        return {"anyOf": options}


def _inline(schema: Any, defined: dict[str, Any]) -> Any:
    """The schema with its references to `defined` written out."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inline(
                defined[schema["$ref"].rsplit("/", 1)[1]] | {k: v for k, v in schema.items() if k != "$ref"}, defined
            )
        return {key: _inline(value, defined) for key, value in schema.items()}
    return [_inline(item, defined) for item in schema] if isinstance(schema, list) else schema


def optional(module: str, extra: str) -> ModuleType:
    """An optional library, imported. Raises ValueError naming the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.split(".")[0]
        if (error.name or "").split(".")[0] != library:
            raise  # the library is there, and lacks one of its own
        raise ValueError(f"the library {library} is not installed; {install(extra)} brings it") from None


def install(*extras: str) -> str:
    """The command that installs extras, in the checkout that cct runs from where there is one."""
    names = ",".join(extras)
    root = Path(__file__).parents[1]
    if not (root / "pyproject.toml").is_file():
        return f"pip install 'credit-transport[{names}]'"
    here = Path.cwd() == root
    return f"pip install -e '.[{names}]'" + ("" if here else f" (in {root})")


# --- what a part of one's own did ---------------------------------------------------------------
_CCT = f"{Path(__file__).parent}/"
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib"))


# What a user's code may raise, or end the process by; not the user's own Control-C.
RAISED = (Exception, SystemExit, GeneratorExit, CancelledError)


def raised_at(error: BaseException) -> str:
    """`reward.py:12`: in the user's code, or else in a library's; empty where only cct's own is on the way."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((_CCT, "<"))]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def error_text(error: BaseException) -> str:
    """`KeyError: 'x' (reward.py:12)`: what was raised, and where: in the user's code, or else in a library's."""
    place = raised_at(error)
    where = f" ({place})" if place else ""
    try:
        message = " ".join(str(error).split())
    except Exception:  # of a class of the user's own
        message = "(its message cannot be made)"
    return f"{type(error).__name__}: {message}{where}"


class Exited(ValueError):
    """Code of the user's that called `sys.exit`, which would have ended cct without a word."""


@contextmanager
def no_exit() -> Iterator[None]:
    """Raises Exited where the code within, a user's, calls `sys.exit` or the like; says where."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise Exited(f"it tried to end the process with {error_text(error)}") from error


def described(value: Any) -> str:
    """What a part returned, for a message that says what was expected."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


# --- plug-ins ---------------------------------------------------------------------------------
_PLUGIN = "cct_plugin_"  # begins the names of modules made from files


MOST_CODE = 2**22  # bytes of one file


class PluginError(ValueError):
    """A plug-in that is not there, or not the one that was meant; its own errors pass as they are."""


def load_plugin(name: str, folder: Path, expected: str | None = None) -> str | None:
    """Import `./file.py` (relative to `folder`) or an installed `package.module`; returns the file's SHA-256.

    expected: the SHA-256 it must have, or it is not run. Raises PluginError where it is missing or
    another. An error of the plug-in itself passes through with its own traceback.
    """
    is_file = name.endswith(".py")
    path = Path(os.path.realpath(folder / name)) if is_file else _module_file(name)
    try:
        digest = sha256(read_file(path, MOST_CODE)).hexdigest() if path else None
    except Unreadable as error:
        missing = f"not found at {path}" if path and not os.path.lexists(path) else f"{path}: {error}"
        raise PluginError(f"plug-in {name} {missing}") from None
    if expected and (digest or "").lower() != expected.lower():
        raise PluginError(
            f"plug-in {name} has changed (SHA-256 {str(digest)[:12]}..., the recipe says {expected[:12]}...); "
            "restore it, or remove `sha256` to take it as it is"
        )
    try:
        if is_file:
            assert path
            run_file(path)
        else:
            with no_exit():
                importlib.import_module(name)
    except Exited as error:
        raise PluginError(f"plug-in {name} failed to import: {error}") from error
    return digest


def run_file(path: Path) -> ModuleType:
    """The module that a Python file makes, run once: one that a plug-in or an import by hand has made is taken as it is."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    module_name = f"{_PLUGIN}{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with no_exit(), chdir(Path.cwd()):  # the folder is as it was afterwards
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(module_name, None)
        raise
    return module


def named_in_code(name: str) -> Any:
    """What `./file.py:name` or `package.module:name` names. Raises ValueError where there is no such module or name."""
    where, _, attribute = name.rpartition(":")
    if not where.endswith(".py"):
        _module_file(where)  # says so where it is not installed
        with no_exit():
            module = importlib.import_module(where)
    elif not os.path.isfile(where):
        raise ValueError(f"{where} {'is no file' if os.path.lexists(where) else 'does not exist'}")
    else:
        module = run_file(Path(os.path.realpath(where)))
    if not hasattr(module, attribute):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ValueError(f"{where}: {did_you_mean('function or class', attribute, own)}")
    return getattr(module, attribute)


def origin(cls: type[Component]) -> str:
    """What `load_plugin` takes to define a component's class again in another process: its file, or its module."""
    module = sys.modules[cls.__module__]
    from_file = module.__name__ == "__main__" or module.__name__.startswith(_PLUGIN)
    return str(module.__file__) if from_file else module.__name__


def _module_file(name: str) -> Path | None:
    """Where an installed module would be imported from; None where it has no file."""
    words = name.split(".")
    try:  # no parent is imported that is not there
        named = all(word.isidentifier() for word in words) and importlib.util.find_spec(words[0]) is not None
        with no_exit():
            spec = importlib.util.find_spec(name) if named else None
    except (ModuleNotFoundError, ValueError):  # below a module that is no package; one without a spec, such as __main__
        spec = None
    if spec is None:
        raise PluginError(f"plug-in '{name}': no such module is installed; a file is named with its ending, ./my_plugin.py")
    return Path(spec.origin) if spec.origin and Path(spec.origin).is_file() else None


def load_entry_points() -> None:
    """Import the components that installed packages announce under `cct.<axis>`."""
    announced = entry_points()  # one look at every installed package
    for axis in REGISTRIES:
        for entry in announced.select(group=f"cct.{axis}"):
            package = entry.dist.name if entry.dist else "?"
            where = f"entry point {entry.name} = {entry.value} (cct.{axis}) of the installed package {package} failed to import"
            try:
                with no_exit():
                    entry.load()
            except Exited as error:
                raise PluginError(f"{where}: {error}") from error
            except Exception as error:
                error.add_note(where)
                raise
