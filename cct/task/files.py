"""Prompts from files: JSON lines and Parquet."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cct.registry import optional
from cct.rollout import Prompt

from .base import tasks
from .table import Layout, Table

GZIP = b"\x1f\x8b"  # what gzipped files begin with


class Files(Table):
    """A file of training problems and one of evaluation problems."""

    preset: Layout | None = None
    """Another framework's layout, which sets prompt_field and answer_field. Keys that are set explicitly take precedence."""
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
                raise ValueError(f"{path} does not exist" if not path.exists() else f"{path} is not a file")
        train, held_out = (self.make_prompts(self.rows(path), str(path)) for path in (self.path, self.held_out_path))
        return train, held_out


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key '{next(key for key in keys if keys.count(key) > 1)}' occurs twice")
    return row


@tasks.register("jsonl")
class JsonLines(Files):
    """One JSON object per line, with a prompt field and an answer field; gzipped or not."""

    def rows(self, path: Path) -> Iterator[tuple[str, Any]]:
        try:
            data = path.read_bytes()
            text = (gzip.decompress(data) if data.startswith(GZIP) else data).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error})") from None
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: cannot be read ({error})") from None
        for number, line in enumerate(text.split("\n"), 1):  # splitlines would cut inside strings, at U+2028
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=_once_each)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: not JSON ({getattr(error, 'msg', error)})") from None
            yield f"{path}:{number}", row


@tasks.register("parquet")
class Parquet(Files):
    """One row per problem, with a prompt column and an answer column; needs the extra `.[data]`."""

    def rows(self, path: Path) -> Iterator[tuple[str, Any]]:
        parquet = optional("pyarrow.parquet", "data")
        try:
            table = parquet.ParquetFile(path).read()
            rows = table.to_pylist()
        except (optional("pyarrow", "data").ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not Parquet ({str(error).splitlines()[0]})") from None
        twice = [name for name in table.column_names if table.column_names.count(name) > 1]
        if twice:
            raise ValueError(f"{path}: the column '{twice[0]}' occurs twice")
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
