"""Tables of problems: what tasks that read rows from files or data sets share."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from string import Formatter
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from cct.rollout import Message, Prompt
from cct.system.patterns import Pattern, last_match

from .base import Task, same
from .fields import MISSING, conversation, is_conversation, lookup, names, opened_conversation, question, text_of

# Where other frameworks' data have prompt and answer.
LAYOUTS: dict[str, dict[str, Any]] = {
    "verl": {"prompt_field": "prompt", "answer_field": "reward_model.ground_truth"},
    "trl": {
        "prompt_field": ("prompt", "messages"),
        "answer_field": ("solution", "answer", "ground_truth", "completion", "messages"),
    },
    "openai": {"prompt_field": "messages", "answer_field": ("reference_answer", "messages")},
}
Layout = Literal["verl", "trl", "openai"]


class Table(Task):
    """Rows with fields, of which a prompt and a gold answer are made."""

    presets: ClassVar[dict[str, dict[str, Any]]] = LAYOUTS
    """Knobs by the name of a preset."""

    prompt_field: str | tuple[str, ...] = "prompt"
    """Field with the prompt: text or a list of messages {role, content}. With several names, the first one that a row has. A
    nested field is `outer.inner`."""
    answer_field: str | tuple[str, ...] = "answer"
    """Field with the gold answer, named in the same way. In a list of messages, the answer is the last one, which must be the
    assistant's."""
    template: str | None = None
    """Text of the prompt, with fields in braces: `{question} Use \\boxed{{}}.`, `{extra.question}` for a nested one. Null uses
    the prompt field as it is."""
    answer_pattern: Pattern | None = None
    """Regular expression; the first group of its last match in the answer field is the gold answer. Null: the whole field."""
    held_out_limit: int = Field(400, ge=1)
    """Maximum number of evaluation problems; the first ones are used."""
    on_overlap: Literal["fail", "drop"] = "fail"
    """If training problems are also evaluation problems: refuse the recipe, or leave them out of training."""

    @model_validator(mode="before")
    @classmethod
    def _take_preset(cls, knobs: Any) -> Any:
        if not isinstance(knobs, dict) or not isinstance(knobs.get("preset"), str):
            return knobs
        preset = cls.presets.get(knobs["preset"], {})
        other = {"prompt_field": "template", "template": "prompt_field"}  # who sets one wants no prompt by the other
        return {**{key: value for key, value in preset.items() if other.get(key) not in knobs}, **knobs}

    @property
    def unread(self) -> dict[str, str]:
        return {} if self.template is None else {"prompt_field": "template makes the prompt"}

    @field_validator("template")
    @classmethod
    def _names_fields(cls, template: str | None) -> str | None:
        try:
            parts = list(Formatter().parse(template or ""))
        except ValueError as error:
            raise ValueError(f"{error}; write a literal brace twice, {{{{ or }}}}") from None
        fields = [(name, format or conversion) for _, name, format, conversion in parts if name is not None]
        odd = [name for name, shaped in fields if shaped or not re.fullmatch(r"\w+(\.\w+)*", name)]
        if odd:
            raise ValueError(f"{{{odd[0]}}} names no field of a row; write a literal brace twice, {{{{}}}}")
        return template

    def read(self) -> tuple[list[Prompt], list[Prompt]]:
        """Training and evaluation problems, each in the order of its source."""
        raise NotImplementedError

    @property
    def sources(self) -> tuple[str, str]:
        """What training and evaluation problems are read from, for messages."""
        raise NotImplementedError

    def make_prompts(self, rows: Iterable[tuple[str, Any]], source: str) -> list[Prompt]:
        """Prompts of (place, row). Raises ValueError with the place of a row that gives none, or where there is no row."""
        made = [self._make(where, row) for where, row in rows]
        if not made:
            raise ValueError(f"{source} holds no problems")
        return made

    def _make(self, where: str, row: Any) -> Prompt:
        asked, messages, text = self._asked(where, row)
        name, value = self._find(where, row, self.answer_field, "answer_field")
        value = opened_conversation(value)
        if is_conversation(value):
            *before, answer = self._messages(where, name, value)
            if (role := answer["role"]) != "assistant":
                raise ValueError(f"{where}: field '{name}' ends with the {role}'s message; the answer is the assistant's")
            gold = answer["content"]
            messages = tuple(before) if name == asked else messages
        else:
            gold = self._text(where, name, value)
        if messages and messages[-1]["role"] == "assistant":
            raise ValueError(f"{where}: field '{asked}' ends with the assistant's message, which is an answer, not a prompt")
        text = question(messages) if messages else text
        if not text.strip():
            raise ValueError(f"{where}: the prompt is empty; remove the row, or set task.prompt_field or task.template")
        return Prompt(text, self._gold(where, name, gold), dict(row), messages, where)

    def _asked(self, where: str, row: Any) -> tuple[str, tuple[Message, ...], str]:
        """(field, messages, text) of a row's prompt: one of the last two is empty."""
        if self.template is not None:
            parts = Formatter().parse(self.template)
            texts = [
                (plain, self._text(where, *self._find(where, row, name, "template")) if name else "")
                for plain, name, *_ in parts
            ]
            return "", (), "".join(plain + field for plain, field in texts)
        name, value = self._find(where, row, self.prompt_field, "prompt_field")
        value = opened_conversation(value)
        if is_conversation(value):
            return name, self._messages(where, name, value), ""
        return name, (), self._text(where, name, value)

    @staticmethod
    def _find(where: str, row: Any, wanted: str | tuple[str, ...], knob: str) -> tuple[str, Any]:
        """(name, value) of the first field of these that the row has, null where all that it has are."""
        if not isinstance(row, Mapping):
            raise ValueError(f"{where}: no field '{wanted}' (found: {type(row).__name__}); a row is an object with fields")
        choice = (wanted,) if isinstance(wanted, str) else wanted
        found = [(name, value) for name in choice if (value := lookup(row, name)) is not MISSING]
        if not found:
            raise ValueError(f"{where}: no field '{' or '.join(choice)}' (found: {names(row)}); set task.{knob}")
        return next((one for one in found if one[1] is not None), found[0])

    @staticmethod
    def _text(where: str, name: str, value: Any) -> str:
        try:
            return text_of(value)
        except ValueError as error:
            raise ValueError(f"{where}: field '{name}' {error}") from None

    @staticmethod
    def _messages(where: str, name: str, value: Any) -> tuple[Message, ...]:
        try:
            return conversation(value)
        except ValueError as error:
            raise ValueError(f"{where}: field '{name}': {error}") from None

    def _gold(self, where: str, name: str, answer: str) -> str:
        if not answer.strip():
            raise ValueError(f"{where}: field '{name}' is empty; remove the row, or set task.answer_field")
        if self.answer_pattern is None:
            return answer
        try:
            found = last_match(self.answer_pattern, answer)
        except ValueError as error:
            raise ValueError(f"{where}: task.answer_pattern: {error}") from None
        if found is None:
            raise ValueError(
                f"{where}: nothing in field '{name}' matches task.answer_pattern {self.answer_pattern!r} "
                f"(it ends in {answer[-80:]!r})"
            )
        if not found:
            raise ValueError(f"{where}: task.answer_pattern finds an empty answer in field '{name}' ({answer[-80:]!r})")
        return found

    @cached_property
    def _splits(self) -> tuple[list[Prompt], list[Prompt]]:
        train, held_out = self.read()
        held_out = held_out[: self.held_out_limit]
        kept_out = {same(prompt.text) for prompt in held_out}
        shared = {prompt.text for prompt in train if same(prompt.text) in kept_out}
        if shared and self.on_overlap == "fail":
            one, other = self.sources
            raise ValueError(
                f"{len(shared)} prompts are both in {one} and in {other}, e.g. {min(shared)!r}; "
                "`on_overlap: drop` leaves them out of training"
            )
        if shared:
            train = [prompt for prompt in train if same(prompt.text) not in kept_out]
            if not train:
                raise ValueError(f"every prompt of {self.sources[0]} is also in {self.sources[1]}; nothing is left to train on")
        return train, held_out

    def training(self) -> list[Prompt]:
        return self._splits[0]

    def prompts(self, seed: int, start: int, count: int) -> list[Prompt]:
        train = self._splits[0]
        if not train:
            raise ValueError(f"{self.sources[1]} is for evaluation and has no training problems; name it in evaluation.frozen")
        drawn: list[Prompt] = []
        for index in range(start, start + count):
            epoch, offset = divmod(index, len(train))
            if not drawn or offset == 0:
                order = random.Random(f"{seed}:{epoch}").sample(range(len(train)), len(train))
            drawn.append(train[order[offset]])
        return drawn

    def held_out(self) -> list[Prompt]:
        return self._splits[1]

    @property
    def alphabet(self) -> str:
        return "".join(sorted({char for split in self._splits for prompt in split for char in prompt.text + prompt.answer}))
