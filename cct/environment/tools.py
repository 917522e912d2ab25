"""Python functions as tools that the policy calls."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from cct.registry import RAISED, did_you_mean, error_text, named_in_code

from .base import Action, Environment, Episode, Start, Step, environments
from .tool_calls import Call, calls_in, detect_format

if TYPE_CHECKING:
    from cct.rollout import Message, Prompt

ToolName = Annotated[str, Field(pattern=r"^(.+\.py|[A-Za-z_]\w*(\.\w+)*):[A-Za-z_]\w*$", max_length=1000)]


@environments.register("tools")
class Tools(Environment):
    """Python functions that the policy may call; a turn without a call is the answer.

    Needs a chat template that lists tools. The reward is 0 throughout; evidence judges the answer. What a function keeps
    between calls is shared by all episodes of a process: where that matters, write an environment.
    """

    tools: tuple[ToolName, ...] = Field(min_length=1, max_length=128)
    """Functions with type hints and a docstring that describes each argument under `Args:`: `./my_tools.py:search`, with the
    file relative to the recipe, or `package.module:function`."""
    format: Literal["auto", "hermes", "llama3", "mistral", "qwen3_coder"] = "auto"
    """How the policy writes a call; auto uses the format of its chat template."""
    max_characters: int = Field(8000, ge=16, le=10_000_000)
    """Maximum number of characters of a result; a longer one is cut and ends with a note."""

    @cached_property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions by their own names. Raises ValueError where one is missing, is none, or two have one name."""
        found: dict[str, Callable[..., Any]] = {}
        for name in self.tools:
            function = named_in_code(name)
            if not inspect.isroutine(function):
                raise ValueError(f"{name} is a value of type {type(function).__name__}; expected a function")
            if inspect.iscoroutinefunction(function):
                raise ValueError(f"{name} is async; expected a plain function")
            if function.__name__ in found:
                raise ValueError(f"two tools are called '{function.__name__}'; rename one of them")
            found[function.__name__] = function
        return found

    @cached_property
    def tool_schemas(self) -> Sequence[dict[str, Any]]:
        from transformers.utils import get_json_schema

        schemas = []
        for name, function in self.functions.items():
            try:
                schemas.append(get_json_schema(function))
            except Exception as error:  # of hints and docstrings of any kind
                raise ValueError(
                    f"tool '{name}' cannot be described to the policy: {error}; it needs type hints, and a docstring with a "
                    "line for each argument under `Args:`"
                ) from error
        return schemas

    def ready(self) -> None:
        _ = self.tool_schemas

    def fitted(self, chat_template: str | None) -> Tools:
        if self.format != "auto":
            return self
        if chat_template is None:
            raise ValueError("tools need a policy with a chat template, which lists the tools in the prompt")
        return self.model_copy(update={"format": detect_format(chat_template)})

    def open(self, prompt: Prompt, seed: int) -> Episode:
        return _Conversation(self)

    def answer(self, call: Call) -> str:
        """The result of a call, or what is wrong with it, as the policy reads it."""
        if call.problem:
            return f"Error: this call cannot be read: {call.problem}"
        if call.name not in self.functions:
            return f"Error: {did_you_mean('tool', call.name, self.functions)}"
        function = self.functions[call.name]
        try:
            inspect.signature(function).bind(**call.arguments)
        except TypeError as error:
            return f"Error: {call.name}: {error}"
        except ValueError:  # of a function written in C
            pass
        try:
            found = function(**call.arguments)
            text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
        except RAISED as error:
            return f"Error: {call.name} raised {error_text(error).rpartition(' (')[0] or type(error).__name__}"
        return text if len(text) <= self.max_characters else f"{text[: self.max_characters]}\n[cut at {self.max_characters}]"


class _Conversation(Episode):
    def __init__(self, tools: Tools):
        self.tools, self.calls = tools, 0

    def reset(self) -> Start:
        return Start()

    def step(self, action: Action) -> Step:
        calls = calls_in(action.raw or action.text, self.tools.format)
        if not calls:
            return Step(done=action.finished, truncated=not action.finished)
        messages: list[Message] = []
        for call in calls:
            self.calls += 1
            content = self.tools.answer(call)
            messages.append({"role": "tool", "name": call.name, "content": content, "tool_call_id": f"{self.calls:09d}"})
        return Step(messages)
