"""Knobs: a frozen set of settings that says what is wrong with what it is given."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

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
    """A frozen set of knobs. The docstring under each knob is its help in `cct explain`, the schema and errors.

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
        """An unknown key gets a suggestion and hides no other problem; a knob that is set must be read."""
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
        """Knobs that nothing reads, given the other knobs, and why. If one of them is not at its default, it is refused."""
        return {}

    def default_of(self, knob: str) -> Any:
        """A knob's default."""
        return type(self).model_fields[knob].get_default(call_default_factory=True)


MOST_UNKNOWN = 5  # keys of one mapping that are named, each with a guess; the others are counted


def _error(kind: str, message: str) -> PydanticCustomError:
    return PydanticCustomError(kind, "{message}", {"message": message})  # type: ignore[arg-type]


def did_you_mean(kind: str, name: str, known: Iterable[str]) -> str:
    """A message that the name is unknown, with a suggestion and a list of known names."""
    name = shortened(name, 80)  # difflib's time grows with the square of it
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    return f"no {kind} is called '{name}'{hint}; there are: {', '.join(known) or 'none'}"
