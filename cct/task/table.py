"""Tables of problems: what tasks that read rows from files or data sets share."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from string import Formatter
from typing import Any, Literal

from pydantic import Field, field_validator

from cct.patterns import Pattern, last_match
from cct.rollout import Prompt

from .base import Task


class Table(Task):
    """Rows with fields, of which a prompt and a gold answer are made."""

    prompt_field: str = "prompt"
    """Field that holds the text of the prompt."""
    answer_field: str = "answer"
    """Field that holds the gold answer."""
    template: str | None = None
    """Text of the prompt, with fields in braces: `{question} Use \\boxed{{}}.`; null takes the prompt field as it is."""
    answer_pattern: Pattern | None = None
    """Regular expression; the first group of its last match in the answer field is the gold answer; null takes the field."""
    held_out_limit: int = Field(400, ge=1)
    """At most so many evaluation problems, the first ones."""
    on_overlap: Literal["fail", "drop"] = "fail"
    """Where training problems are evaluation problems too: refuse, or leave them out of training."""

    @property
    def unread(self) -> dict[str, str]:
        return {} if self.template is None else {"prompt_field": "template makes the prompt"}

    @field_validator("template")
    @classmethod
    def _names_fields(cls, template: str | None) -> str | None:
        try:
            parts = list(Formatter().parse(template or ""))
        except ValueError as error:
            raise ValueError(f"{error}; a brace that is no field is written twice, {{{{ or }}}}") from None
        fields = [(name, format or conversion) for _, name, format, conversion in parts if name is not None]
        odd = [name for name, shaped in fields if shaped or not re.fullmatch(r"\w+", name)]
        if odd:
            raise ValueError(f"{{{odd[0]}}} names no field of a row; a brace that is no field is written twice, {{{{}}}}")
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
            raise ValueError(f"{source} holds no problem")
        return made

    def _make(self, where: str, row: Any) -> Prompt:
        fields = dict.fromkeys([name for _, name, _, _ in Formatter().parse(self.template) if name]) if self.template else {}
        wanted = [*(fields if self.template is not None else [self.prompt_field]), self.answer_field]
        for key in wanted:
            if not isinstance(row, Mapping) or key not in row:
                found = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
                knobs = "task.template" if key in fields else "task.prompt_field / task.answer_field"
                raise ValueError(f"{where}: no field '{key}' (found: {found}); set {knobs}")
            if not isinstance(row[key], str | int | float):
                raise ValueError(f"{where}: field '{key}' must be a text or a number; found {row[key]!r}")
        text = (
            str(row[self.prompt_field]) if self.template is None else self.template.format(**{key: row[key] for key in fields})
        )
        if not text.strip():
            raise ValueError(f"{where}: the prompt is empty; take the row out, or set task.prompt_field or task.template")
        return Prompt(text, self._gold(where, str(row[self.answer_field])), dict(row))

    def _gold(self, where: str, answer: str) -> str:
        if self.answer_pattern is None:
            return answer
        try:
            found = last_match(self.answer_pattern, answer)
        except ValueError as error:
            raise ValueError(f"{where}: task.answer_pattern: {error}") from None
        if found is None:
            raise ValueError(
                f"{where}: nothing in field '{self.answer_field}' matches task.answer_pattern {self.answer_pattern!r} "
                f"(it ends in {answer[-80:]!r})"
            )
        return found

    @cached_property
    def _splits(self) -> tuple[list[Prompt], list[Prompt]]:
        train, held_out = self.read()
        held_out = held_out[: self.held_out_limit]
        kept_out = {prompt.text for prompt in held_out}
        shared = {prompt.text for prompt in train} & kept_out
        if shared and self.on_overlap == "fail":
            one, other = self.sources
            raise ValueError(
                f"{len(shared)} prompts stand both in {one} and in {other}, e.g. {min(shared)!r}; "
                "`on_overlap: drop` would leave them out of training"
            )
        if shared:
            train = [prompt for prompt in train if prompt.text not in kept_out]
            if not train:
                raise ValueError(
                    f"every prompt of {self.sources[0]} stands in {self.sources[1]} too; nothing is left to train on"
                )
        return train, held_out

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
