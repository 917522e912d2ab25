"""Fields of a row: found by name, nested ones too, and read as a text or as messages."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from cct.rollout import Message

MISSING = object()


def lookup(row: Mapping[str, Any], name: str) -> Any:
    """A field by its name, `reward_model.ground_truth` inside of others (an object written as JSON too); MISSING if none."""
    if name in row:
        return _python(row[name])
    value: Any = row
    for key in name.split("."):
        value = _opened(value)
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return MISSING
        value = _python(value)
    return value


def _python(value: Any) -> Any:
    """numpy's arrays and numbers, as pandas gives them, as lists and numbers; columns {role, content} of messages as those."""
    value = value.tolist() if hasattr(value, "tolist") else value
    roles, contents = (value.get(key) if isinstance(value, Mapping) else None for key in ("role", "content"))
    if isinstance(roles, list) and isinstance(contents, list) and len(roles) == len(contents):
        return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    return value


def _opened(value: Any) -> Any:
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def names(row: Mapping[str, Any]) -> str:
    """The fields of a row, those inside of objects by their dotted names."""
    found: list[str] = []
    for key, value in row.items():
        inside = _opened(value)
        found += [f"{key}.{inner}" for inner in inside] if isinstance(inside, Mapping) and inside else [str(key)]
    return ", ".join(found)


def text_of(value: Any) -> str:
    """A text or a number as text, `6` for 6.0; a list of one as that one. Raises ValueError with what it is otherwise."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list) and value and all(isinstance(x, str | int | float) for x in value):
        raise ValueError(f"holds {len(value)} values ({_short(value)}); expected one")
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        hint = "; write it as the text that a response should give" if isinstance(value, bool) else ""
        raise ValueError(f"must be a text or a number; found {_short(value)}{hint}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"holds half of a surrogate pair, which is not a character: {_short(value)}") from None
        return value
    if not math.isfinite(value):
        raise ValueError(f"must be a text or a number; found {value}")
    if value == int(value):
        return str(int(value))
    return format(Decimal(str(value)).normalize(), "f")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_conversation(value: Any) -> bool:
    """Whether a field holds messages rather than a text."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def opened_conversation(value: Any) -> Any:
    """The messages that a text holds as JSON, as some files have them; any other value as it is."""
    found: Any = _opened(value) if isinstance(value, str) else None
    return found if is_conversation(found) and {"role", "content"} <= found[0].keys() else value


def conversation(value: Sequence[Any]) -> tuple[Message, ...]:
    """Messages {role, content}, without other keys. Raises ValueError with the number of one that is none."""
    return tuple(_message(number, one) for number, one in enumerate(value, 1))


def _message(number: int, one: Any) -> Message:
    role, content = (one.get(key) if isinstance(one, Mapping) else None for key in ("role", "content"))
    if not isinstance(role, str) or not role.strip():
        found = ", ".join(map(str, one)) if isinstance(one, Mapping) else _short(one)
        raise ValueError(f"message {number} has no role and content (found: {found})")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)  # as OpenAI's parts
    if not isinstance(content, str):
        raise ValueError(f"message {number}, the {role}'s, holds no text; found {_short(content)}")
    return {"role": role, "content": text_of(content)}


def question(messages: Sequence[Message]) -> str:
    """Messages as one text, for people and for comparisons: without the system's, roles written where there are several."""
    asked = [one for one in messages if one["role"] not in ("system", "developer")]
    return asked[0]["content"] if len(asked) == 1 else "\n\n".join(f"{one['role']}: {one['content']}" for one in asked)
