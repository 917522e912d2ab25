"""Components and registries: how a name in a recipe becomes an operator.

A `Component` is a frozen set of knobs that is itself the operator. A `Registry` maps the names of
one axis to component classes and, used as an annotation, teaches pydantic to read
`{use: name, knob: value}` or a bare `name`:

    class Recipe(BaseModel):
        transport: Annotated[Transport, transports]

Absent on purpose: no overriding of a registered name, no lazy string paths, no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, model_serializer
from pydantic_core import PydanticCustomError, core_schema

from .knobs import Knobs, did_you_mean


class Component(Knobs):
    """A frozen set of knobs that is itself the operator."""

    axis: ClassVar[str] = ""
    """The registry of its base class."""
    use: ClassVar[str] = ""
    """The name under which it is registered."""

    @property
    def needs(self) -> frozenset[str]:
        """What other parts of the recipe must provide, for example `values`; by default what its children need."""
        return frozenset().union(*(part.needs for _, part in children(self)))

    @property
    def provides(self) -> frozenset[str]:
        """What it provides to other parts."""
        return frozenset()

    @property
    def claims(self) -> frozenset[str]:
        """Optional properties of the conformance suite that it has, for example `causal`."""
        return frozenset()

    @property
    def waives(self) -> dict[str, str]:
        """Properties of the conformance suite that it gives up, and why; by default those of its children. The suite says which
        can be."""
        return {name: f"{part.axis} '{part.use}': {why}" for _, part in children(self) for name, why in part.waives.items()}

    def ready(self) -> None:
        """Raises ValueError if a library or a file that it needs is missing; called by `cct check` and `cct run`."""

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
        for base in (Path(__file__).parents[2], Path.cwd()):
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


def descendants(knobs: Knobs, place: str = "") -> Iterator[tuple[str, Component]]:
    """Components among knobs with their places, `transport.gate`, each followed by its own."""
    for where, part in children(knobs, place):
        yield where, part
        yield from descendants(part, where)


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
            raise ValueError(f'the name of a {self.axis} must be a string, @register("my_name"); got {name!r}')

        def add(cls: type[C]) -> type[C]:
            if not (isinstance(cls, type) and issubclass(cls, self.base)):
                raise ValueError(f"{cls.__qualname__} is not a {self.base.__name__}, as the {self.axis} registry requires")
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
