"""What a report reads: the files of a run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cct.metrics import is_count
from cct.run_folder import BrokenLine, RunFolder
from cct.system.plain_yaml import Unreadable, load, read_file

Event = dict[str, Any]


class ReportError(ValueError):
    """There is nothing to report on; the message gives what was found, where, and what to do."""


@dataclass(frozen=True)
class Run:
    """A run folder, read."""

    name: str
    """Its path as given."""
    recipe: dict[str, Any]
    written: str
    """recipe.yaml as it stands."""
    events: list[Event]
    samples: list[Event]
    tokens: list[Event]
    """Responses of tokens.json; empty where there is none."""
    fidelity: dict[str, Any] | None

    def series(self, metric: str, *, warm_up: bool = True) -> tuple[list[float], list[float]]:
        """Iterations and values of a metric, where it was written. warm_up: those of the critic's warm-up as well."""
        there = [e for e in self.events if metric in e or (is_count(metric) and "train/reward" in e)]
        told = [e for e in there if warm_up or e["iteration"] > 0 or metric.startswith("eval/")]
        return [float(e["iteration"]) for e in told], [_number(e.get(metric, 0)) for e in told]

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that were written, in the order in which they first were."""
        return list(dict.fromkeys(name for event in self.events for name in event))

    @property
    def parts(self) -> dict[str, str]:
        """The names of the parts that the recipe puts together."""
        named = {axis: self.recipe.get(axis) for axis in ("task", "policy", "transport", "critic", "geometry")}
        return {axis: part["use"] if isinstance(part, dict) else str(part or "none") for axis, part in named.items()}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def is_run(folder: Path) -> bool:
    run = RunFolder(folder)
    return run.metrics_file.is_file() and run.recipe_file.is_file()


def read_run(folder: Path) -> Run:
    """Raises ReportError where the folder is not a run folder, or holds no numbers yet."""
    if not is_run(folder):
        raise ReportError(f"{folder}: neither a run (recipe.yaml, metrics.jsonl) nor a study (results.json)")
    run = RunFolder(folder)
    try:
        events, samples = run.metrics, run.samples
    except BrokenLine as error:
        raise ReportError(f"{error.place}: not JSON; remove the line") from None
    if not events:
        raise ReportError(f"{folder}/metrics.jsonl: no events yet; wait for the first evaluation")
    try:
        written = read_file(run.recipe_file).decode("utf-8")
        recipe = load(written)[0]
    except (Unreadable, UnicodeDecodeError) as error:
        raise ReportError(f"{folder}/recipe.yaml: {error}") from None
    if not isinstance(recipe, dict):
        raise ReportError(f"{folder}/recipe.yaml: cannot be read (expected a mapping)")
    tokens = read_mapping(run.tokens_file)["responses"] if run.tokens_file.is_file() else []
    fidelity = read_mapping(run.fidelity_file) if run.fidelity_file.is_file() else None
    return Run(str(folder), recipe, written, events, samples, tokens, fidelity)


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping that a file holds. Raises ReportError where it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"expected a mapping, found {type(found).__name__}")
    except ValueError as error:
        raise ReportError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    return found
