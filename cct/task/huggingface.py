"""Prompts from Hugging Face data sets, on the hub or on disk.

A preset is the data of a well-known set: its name on the hub, its splits and its fields.

    gsm8k     openai/gsm8k (config main)           train, test
    math      DigitalLearningGmbH/MATH-lighteval   train, test
    deepmath  zwhe99/DeepMath-103K                 train, whose first 400 rows are held out
    math500   HuggingFaceH4/MATH-500               evaluation only
    aime24    HuggingFaceH4/aime_2024              evaluation only
    aime25    math-ai/aime25                       evaluation only
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from cct.registry import optional
from cct.rollout import Prompt

from .base import tasks
from .table import LAYOUTS, Layout, Table

_BOXED = "Reason step by step, and put the final answer within \\boxed{{}}."
# The content of \boxed{...}, with braces in it up to three deep.
_IN_BOX = r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}"
_EVALUATION_ONLY = {"split": None, "template": "{problem}\n" + _BOXED, "answer_field": "answer", "held_out_limit": 1000}
PRESETS: dict[str, dict[str, Any]] = {
    "gsm8k": {
        "path": "openai/gsm8k",
        "name": "main",
        "template": "{question}\n" + _BOXED,
        "answer_field": "answer",
        "answer_pattern": r"####\s*(\S+)",
    },
    "math": {
        "path": "DigitalLearningGmbH/MATH-lighteval",
        "template": "{problem}\n" + _BOXED,
        "answer_field": "solution",
        "answer_pattern": _IN_BOX,
        "on_overlap": "drop",
    },
    "deepmath": {
        "path": "zwhe99/DeepMath-103K",
        "split": "train[400:]",
        "held_out_split": "train[:400]",
        "template": "{question}\n" + _BOXED,
        "answer_field": "final_answer",
        "on_overlap": "drop",
    },
    "math500": {"path": "HuggingFaceH4/MATH-500", "held_out_split": "test", **_EVALUATION_ONLY},
    "aime24": {"path": "HuggingFaceH4/aime_2024", "held_out_split": "train", **_EVALUATION_ONLY},
    "aime25": {"path": "math-ai/aime25", "held_out_split": "test", **_EVALUATION_ONLY},
}


@tasks.register("datasets")
class Datasets(Table):
    """Any Hugging Face data set, by name on the hub, folder or file; needs the extra `.[data]`."""

    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS | LAYOUTS
    preset: Layout | Literal["gsm8k", "math", "deepmath", "math500", "aime24", "aime25"] | None = None
    """Well-known data set, which sets path, splits, fields and prompt, or another framework's layout. Keys that are set
    explicitly take precedence."""
    path: str = Field(min_length=1)
    """Name on the hub, folder that `save_to_disk` wrote, folder of data files, or one .jsonl, .json, .csv or .parquet file."""
    name: str | None = None
    """Configuration of the data set, if it has several."""
    split: str | None = "train"
    """Training problems; a slice is written `train[400:]`. Null for evaluation-only sets."""
    held_out_split: str = "test"
    """Evaluation problems."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of training problems; the first ones are used."""

    @property
    def sources(self) -> tuple[str, str]:
        name = f"{self.path} ({self.name})" if self.name else self.path
        return f"{name}, split {self.split}", f"{name}, split {self.held_out_split}"

    def _rows(self, split: str, source: str) -> Iterator[tuple[str, Any]]:
        for number, row in enumerate(self._load(split), 1):
            yield f"{source}, row {number}", row

    def _load(self, split: str) -> Any:
        datasets, path = optional("datasets", "data"), Path(self.path)
        try:
            if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
                return self._saved(datasets, path, split)
            if path.is_file():
                kind = {".jsonl": "json"}.get(path.suffix, path.suffix.removeprefix("."))
                return datasets.load_dataset(kind, data_files={split.split("[")[0]: str(path)}, split=split)
            return datasets.load_dataset(self.path, self.name, split=split)
        except Exception as error:  # the library raises a dozen kinds, some of them no OSError
            reason = next(iter(str(error).splitlines()), "")
            raise ValueError(f"{self.path}, split {split}: cannot be loaded ({type(error).__name__}: {reason})") from error

    @staticmethod
    def _saved(datasets: Any, path: Path, split: str) -> Any:
        """A split, or a slice of it, of a folder that `save_to_disk` wrote."""
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.Dataset):
            saved = {"train": saved}
        name = split.split("[")[0]
        if name not in saved:
            raise ValueError(f"it has no split '{name}'; there are: {', '.join(saved)}")
        (part,) = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(saved[name])})
        return saved[name].select(range(part.from_, part.to))

    def read(self) -> tuple[list[Prompt], list[Prompt]]:
        one, other = self.sources
        train = self.make_prompts(islice(self._rows(self.split, one), self.limit), one) if self.split else []
        return train, self.make_prompts(self._rows(self.held_out_split, other), other)
