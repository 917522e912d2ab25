"""`cct ls --markdown`: every built-in part, from its docstrings."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic.fields import FieldInfo

import cct.recipe  # noqa: F401  (registers every axis)
from cct.registry import REGISTRIES, Component

HEAD = """# Every part

Generated from the docstrings by `cct ls --markdown > docs/catalogue.md`; a test compares the two. `cct ls AXIS` prints the
same in a terminal, including plug-ins. Knobs that all parts of an axis share are listed once, above its table, and again for
a part whose default differs.
"""


def catalogue(axes: Sequence[str]) -> str:
    """The page of all built-in parts."""
    return "\n".join([HEAD, *(_axis(axis) for axis in axes)])


def _axis(axis: str) -> str:
    registry = REGISTRIES[axis]
    own = [registry[name] for name in registry.names() if registry[name].__module__.startswith("cct.")]
    shared = list(registry.base.model_fields)
    lines = [f"## {axis}", ""]
    if shared:
        lines += ["All of them have:", "", *(f"- {_knob(registry.base, knob)}" for knob in shared), ""]
    lines += ["| name | what it is | knobs |", "|---|---|---|"]
    for cls in own:
        knobs = [_knob(cls, knob) for knob in cls.model_fields if knob not in shared or _differs(cls, registry.base, knob)]
        lines.append(f"| `{cls.use}` | {_cell(cls.summary())} | {'<br>'.join(knobs) or 'none'} |")
    return "\n".join([*lines, ""])


def _differs(cls: type[Component], base: type[Component], knob: str) -> bool:
    return default_of(cls.model_fields[knob]) != default_of(base.model_fields[knob])


def default_of(field: FieldInfo) -> str:
    """A knob's default as written in a recipe, on one line; `required` if it has none."""
    return "required" if field.is_required() else _shown(field.get_default(call_default_factory=True))


def _shown(value: object) -> str:
    """A value as written in a recipe: parts by name, texts quoted if they would be invisible."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, Component):
        return f"{{use: {value.use}}}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    unseen = isinstance(value, str) and (not value or not value.isprintable() or value != value.strip())
    return repr(value) if unseen else str(value)


def _knob(cls: type[Component], knob: str) -> str:
    field = cls.model_fields[knob]
    name = f"`{knob}` (required)" if field.is_required() else f"`{knob} = {default_of(field)}`"
    return _cell(f"{name} {' '.join((field.description or '').split())}")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
