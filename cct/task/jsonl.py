"""Prompts from JSON-lines files."""

from __future__ import annotations

import json
import random
from functools import cached_property
from pathlib import Path

from pydantic import Field

from cct.rollout import Prompt

from .base import Task, tasks


@tasks.register("jsonl")
class JsonLines(Task):
    """One JSON object per line, with a prompt field and an answer field."""

    path: Path
    """Training problems."""
    held_out_path: Path
    """Evaluation problems; a prompt that is also in `path` is an error."""
    prompt_field: str = "prompt"
    """Key of the prompt text."""
    answer_field: str = "answer"
    """Key of the gold answer."""
    held_out_limit: int = Field(400, ge=1)
    """At most so many evaluation problems, the first ones of the file."""

    def _read(self, path: Path) -> list[Prompt]:
        if not path.is_file():
            raise ValueError(f"{path} does not exist" if not path.exists() else f"{path} is no file")
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error})") from None
        rows = []
        for number, line in enumerate(text.split("\n"), 1):  # splitlines would cut inside strings, at U+2028
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error.msg})") from None
            missing = [key for key in (self.prompt_field, self.answer_field) if not isinstance(row, dict) or key not in row]
            if missing:
                found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise ValueError(
                    f"{path}:{number}: no field '{missing[0]}' (found: {found}); set task.prompt_field / task.answer_field"
                )
            for key in (self.prompt_field, self.answer_field):
                if not isinstance(row[key], str | int | float):
                    raise ValueError(f"{path}:{number}: field '{key}' must be a text or a number; found {row[key]!r}")
            rows.append(Prompt(str(row[self.prompt_field]), str(row[self.answer_field]), row))
        if not rows:
            raise ValueError(f"{path} holds no problem")
        return rows

    @cached_property
    def _splits(self) -> tuple[list[Prompt], list[Prompt]]:
        train, held_out = self._read(self.path), self._read(self.held_out_path)[: self.held_out_limit]
        shared = {prompt.text for prompt in train} & {prompt.text for prompt in held_out}
        if shared:
            raise ValueError(
                f"{len(shared)} prompts stand both in {self.path} and in {self.held_out_path}, e.g. {min(shared)!r}"
            )
        return train, held_out

    def prompts(self, seed: int, start: int, count: int) -> list[Prompt]:
        train = self._splits[0]
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
