"""Prompts from files: JSON lines and Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cct.registry import optional
from cct.rollout import Prompt

from .base import tasks
from .table import Table


class Files(Table):
    """A file of training problems and one of evaluation problems."""

    path: Path
    """Training problems."""
    held_out_path: Path
    """Evaluation problems."""

    @property
    def sources(self) -> tuple[str, str]:
        return str(self.path), str(self.held_out_path)

    def rows(self, path: Path) -> Iterator[tuple[str, Any]]:
        """(place, row) of a file that is there."""
        raise NotImplementedError

    def read(self) -> tuple[list[Prompt], list[Prompt]]:
        for path in (self.path, self.held_out_path):
            if not path.is_file():
                raise ValueError(f"{path} does not exist" if not path.exists() else f"{path} is no file")
        train, held_out = (self.make_prompts(self.rows(path), str(path)) for path in (self.path, self.held_out_path))
        return train, held_out


@tasks.register("jsonl")
class JsonLines(Files):
    """One JSON object per line, with a prompt field and an answer field."""

    def rows(self, path: Path) -> Iterator[tuple[str, Any]]:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error})") from None
        for number, line in enumerate(text.split("\n"), 1):  # splitlines would cut inside strings, at U+2028
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error.msg})") from None
            yield f"{path}:{number}", row


@tasks.register("parquet")
class Parquet(Files):
    """One row per problem, with a prompt column and an answer column; needs the extra `.[data]`."""

    def rows(self, path: Path) -> Iterator[tuple[str, Any]]:
        parquet = optional("pyarrow.parquet", "data")
        try:
            table = parquet.read_table(path)
        except optional("pyarrow", "data").ArrowInvalid as error:
            raise ValueError(f"{path}: not Parquet ({str(error).splitlines()[0]})") from None
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(table.to_pylist(), 1))
