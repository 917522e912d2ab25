"""Tool calls in a policy's turn, by the format that its chat template asks for. Pure functions of text.

Formats, by the models that write them:

    hermes      <tool_call>{"name": ..., "arguments": {...}}</tool_call>                     Qwen2.5, Qwen3, SmolLM3, Hermes
    qwen3_coder <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>     Qwen3-Coder
    llama3      {"name": ..., "parameters": {...}}, after <|python_tag|> or as the whole turn         Llama 3.1 to 3.3
    mistral     [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]NAME[ARGS]{...}       Mistral
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """A call that a turn makes, or why what looks like one cannot be read."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def detect_format(chat_template: str) -> str:
    """The format that a chat template asks the policy for. Raises ValueError where it knows no tools, or in another form."""
    if not re.search(r"\btools\b", chat_template):
        raise ValueError(
            "the chat template does not support tools: it never reads `tools`; use a model that was trained to call them"
        )
    for name, marks in MARKS.items():
        if all(re.search(mark, chat_template) for mark in marks):
            return name
    raise ValueError(
        f"the chat template lists tools, but asks for calls in none of the supported formats ({', '.join(FORMATS)}); "
        "if one of them fits, set environment.format"
    )


def calls_in(turn: str, format: str) -> list[Call]:
    """The calls of a turn, in order; none where the turn is an answer. What was thought before `</think>` does not count.

    format: a key of FORMATS, or `auto` for the first of them that reads all calls it finds.
    """
    said = turn.rpartition("</think>")[2]
    if format != "auto":
        return FORMATS[format](said)
    found = [calls for parse in FORMATS.values() if (calls := parse(said))]
    return next((calls for calls in found if not any(call.problem for call in calls)), found[0] if found else [])


def hermes(text: str) -> list[Call]:
    """Each `<tool_call>` with an object of name and arguments; the last one may lack its end."""
    return [_from_json(body, "arguments") for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL)]


def qwen3_coder(text: str) -> list[Call]:
    """Each `<function=NAME>` with its parameters. A value that reads as JSON is that, any other is text."""
    calls: list[Call] = []
    for name, body in re.findall(r"<function=([^>\n]*)>(.*?)(?:</function>|$)", text, re.DOTALL):
        pairs = re.findall(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", body, re.DOTALL)
        calls.append(Call(name.strip(), {key.strip(): _value(value) for key, value in pairs}))
    if not calls and "<tool_call>" in text:
        calls.append(Call(problem="a <tool_call> without <function=NAME>"))
    return calls


def llama3(text: str) -> list[Call]:
    """Objects of name and parameters, behind `<|python_tag|>` or as the whole turn, several separated by `;`."""
    tagged, body = "<|python_tag|>" in text, text.rpartition("<|python_tag|>")[2].strip()
    if not tagged and not (body.startswith("{") and '"name"' in body):
        return []
    calls, decoder = list[Call](), json.JSONDecoder()
    while body:
        try:
            found, end = decoder.raw_decode(body)
        except (ValueError, RecursionError) as error:
            return [*calls, Call(problem=_unreadable(error, body))]
        calls.append(_from_object(found, "parameters"))
        body = body[end:].lstrip("; \n\t")
    return calls


def mistral(text: str) -> list[Call]:
    """What follows `[TOOL_CALLS]`: a list of objects, or each time a name, `[ARGS]` and its arguments."""
    calls: list[Call] = []
    for body in text.split("[TOOL_CALLS]")[1:]:
        name, marker, arguments = body.partition("[ARGS]")
        if marker:
            name = name.partition("[CALL_ID]")[0].strip()
            found = _loaded(arguments)
            calls.append(found if isinstance(found, Call) else _from_object({"name": name, "arguments": found}, "arguments"))
            continue
        found = _loaded(body)
        several = found if isinstance(found, list) else [found]
        calls += [each if isinstance(each, Call) else _from_object(each, "arguments") for each in several]
    return calls


FORMATS: dict[str, Callable[[str], list[Call]]] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "mistral": mistral,
    "llama3": llama3,
}
# Patterns that a template of each format holds, the more particular ones first.
MARKS = {
    "qwen3_coder": ("<tool_call>", "<function=", "<parameter="),
    "hermes": (r"<tool_call>(\\n|\s)*\{\\?[\"']\w",),
    "mistral": (r"\[TOOL_CALLS\]",),
    "llama3": (r'"name": .*"parameters": ', "ipython"),
}


def _from_json(text: str, key: str) -> Call:
    found = _loaded(text)
    return found if isinstance(found, Call) else _from_object(found, key)


def _loaded(text: str) -> Any:
    """The JSON, or a Call that says why it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Call(problem=_unreadable(error, text))


def _unreadable(error: Exception, text: str) -> str:
    why = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
    return f"not valid JSON ({why}): {text.strip()[:80]}"


def _from_object(found: Any, key: str) -> Call:
    """A call from an object of name and arguments, which may be written as text of JSON, or under the other usual key."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return Call(problem=f'expected an object with "name" and "{key}"; found {json.dumps(found)[:80]}')
    arguments = found.get(key, found.get("arguments", found.get("parameters", {})))
    if isinstance(arguments, str):
        arguments = _loaded(arguments)
    if not isinstance(arguments, dict):
        return Call(problem=f'"{key}" of {found["name"]} must be an object')
    return Call(found["name"], arguments)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
