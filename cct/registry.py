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
import sys
import sysconfig
import traceback
from collections.abc import Iterable
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


class Knobs(BaseModel):
    """A frozen set of knobs. The docstring under each is its help, in `cct explain`, the schema and errors.

    No key is accepted and never read: an unknown one is refused, and so is one that another knob switches off (`unread`).
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="wrap")
    @classmethod
    def _know_every_key(cls, data: Any, handler: ModelWrapValidatorHandler) -> Any:
        """An unknown key gets a guess, and hides no other problem; true and false are no numbers; what is set is read."""
        if not isinstance(data, dict):
            return handler(data)
        problems: list[Any] = []
        for key, value in data.items():
            if key not in cls.model_fields:
                message = did_you_mean("key", str(key), cls.model_fields)
                problems.append({"type": _error("unknown_key", message), "loc": (str(key),), "input": value})
            elif isinstance(value, bool) and cls.model_fields[key].annotation in (int, float, int | None, float | None):
                problems.append({"type": _error("number", "input should be a number"), "loc": (key,), "input": value})
        bad = {problem["loc"][0] for problem in problems}
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
            if (found := getattr(read, knob)) != (usual := read.usual(knob)):
                message = f"nothing would read it: {why}; leave it out, or at its default ({usual!r})"
                problems.append({"type": _error("unread", message), "loc": (knob,), "input": found})
        if problems:
            raise ValidationError.from_exception_data(cls.__name__, problems)
        return read

    @property
    def unread(self) -> dict[str, str]:
        """Knobs that nothing reads with the others as they are, and why. One of them that is not at its default is refused."""
        return {}

    def usual(self, knob: str) -> Any:
        """What a knob is where nobody sets it."""
        return type(self).model_fields[knob].get_default(call_default_factory=True)


def _error(kind: str, message: str) -> PydanticCustomError:
    return PydanticCustomError(kind, "{message}", {"message": message})  # type: ignore[arg-type]


def did_you_mean(kind: str, name: str, known: Iterable[str]) -> str:
    """Says that there is none, guesses, and lists what there is."""
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    return f"no {kind} is called '{name}'{hint}; there are: {', '.join(known) or 'none'}"


class Component(Knobs):
    """A frozen set of knobs that is itself the operator."""

    use: ClassVar[str] = ""
    """The name it is registered under."""

    @property
    def needs(self) -> frozenset[str]:
        """What another part of the recipe must provide, for example `values`."""
        return frozenset()

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
        """Properties of the conformance suite that it gives up, and why; the suite says which can be."""
        return {}

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


C = TypeVar("C", bound=Component)
REGISTRIES: dict[str, Registry[Any]] = {}


class Registry(Generic[C]):
    """The components of one axis, by name.

    axis: singular name as users say it, `transport`; entry points are read from the group `cct.<axis>`.
    keeps_shared: where a recipe laid over another one names a different component, knobs of the base class stay.
    """

    def __init__(self, axis: str, base: type[C], *, keeps_shared: bool = False):
        self.axis = axis
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
        raise ValueError(f"the library {library} is not installed; pip install 'cct[{extra}]' brings it") from None


# --- what a part of one's own did ---------------------------------------------------------------
_CCT = f"{Path(__file__).parent}/"
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib"))


def told(error: BaseException) -> str:
    """`KeyError: 'x' (reward.py:12)`: what was raised, and where: in the user's code, or else in a library's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((_CCT, "<"))]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def described(value: Any) -> str:
    """What a part returned, for a message that says what was expected."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


# --- plug-ins ---------------------------------------------------------------------------------
_PLUGIN = "cct_plugin_"  # begins the names of modules made from files


class PluginError(ValueError):
    """A plug-in that is not there, or not the one that was meant; its own errors pass as they are."""


def load_plugin(name: str, folder: Path, expected: str | None = None) -> str | None:
    """Import `./file.py` (relative to `folder`) or an installed `package.module`; returns the file's SHA-256.

    expected: the SHA-256 it must have, or it is not run. Raises PluginError where it is missing or
    another. An error of the plug-in itself passes through with its own traceback.
    """
    is_file = name.endswith(".py")
    path = (folder / name).resolve() if is_file else _module_file(name)
    if path and not path.is_file():
        raise PluginError(f"plug-in {name} not found at {path}")
    digest = sha256(path.read_bytes()).hexdigest() if path else None
    if expected and (digest or "").lower() != expected.lower():
        raise PluginError(
            f"plug-in {name} has changed (SHA-256 {str(digest)[:12]}..., the recipe says {expected[:12]}...); "
            "restore it, or remove `sha256` to take it as it is"
        )
    if is_file:
        assert path
        run_file(path)
    else:
        importlib.import_module(name)
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
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def origin(cls: type[Component]) -> str:
    """What `load_plugin` takes to define a component's class again in another process: its file, or its module."""
    module = sys.modules[cls.__module__]
    from_file = module.__name__ == "__main__" or module.__name__.startswith(_PLUGIN)
    return str(module.__file__) if from_file else module.__name__


def _module_file(name: str) -> Path | None:
    """Where an installed module would be imported from; None where it has no file."""
    named = name and not name.startswith(".") and "/" not in name
    spec = importlib.util.find_spec(name) if named and importlib.util.find_spec(name.split(".")[0]) else None
    if spec is None:
        raise PluginError(f"plug-in '{name}': no such module is installed; a file is named with its ending, ./my_plugin.py")
    return Path(spec.origin) if spec.origin and Path(spec.origin).is_file() else None


def load_entry_points() -> None:
    """Import the components that installed packages announce under `cct.<axis>`."""
    announced = entry_points()  # one look at every installed package
    for axis in REGISTRIES:
        for entry in announced.select(group=f"cct.{axis}"):
            try:
                entry.load()
            except Exception as error:
                package = entry.dist.name if entry.dist else "?"
                error.add_note(
                    f"entry point {entry.name} = {entry.value} (cct.{axis}) of the installed package {package} failed to import"
                )
                raise
