"""What a report reads: the files of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cct.system.plain_yaml import Unreadable, load, read_file

Event = dict[str, Any]


class ReportError(ValueError):
    """There is nothing to report on; the message says what was found, where, and what to do."""


@dataclass(frozen=True)
class Run:
    """A run folder, read."""

    name: str
    """Its path as it was given."""
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
        told = [e for e in self.events if metric in e and (warm_up or e["iteration"] > 0 or metric.startswith("eval/"))]
        return [float(e["iteration"]) for e in told], [_number(e[metric]) for e in told]

    @property
    def parts(self) -> dict[str, str]:
        """The names of the parts that the recipe puts together."""
        named = {axis: self.recipe.get(axis) for axis in ("task", "policy", "transport", "critic", "geometry")}
        return {axis: part["use"] if isinstance(part, dict) else str(part or "none") for axis, part in named.items()}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() and (folder / "recipe.yaml").is_file()


def read_run(folder: Path) -> Run:
    """Raises ReportError where the folder is not a run folder, or holds no numbers yet."""
    if not is_run(folder):
        raise ReportError(f"{folder}: neither a run (recipe.yaml, metrics.jsonl) nor a study (results.json)")
    events = read_lines(folder / "metrics.jsonl")
    if not events:
        raise ReportError(f"{folder}/metrics.jsonl: no event yet; wait for the first evaluation")
    try:
        written = read_file(folder / "recipe.yaml").decode("utf-8")
        recipe = load(written)[0]
    except (Unreadable, UnicodeDecodeError) as error:
        raise ReportError(f"{folder}/recipe.yaml: {error}") from None
    if not isinstance(recipe, dict):
        raise ReportError(f"{folder}/recipe.yaml: cannot be read (a mapping was expected)")
    tokens, fidelity = folder / "tokens.json", folder / "fidelity.json"
    return Run(
        str(folder),
        recipe,
        written,
        events,
        read_lines(folder / "samples.jsonl"),
        _read(tokens, json.loads)["responses"] if tokens.is_file() else [],
        _read(fidelity, json.loads) if fidelity.is_file() else None,
    )


def _read(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """The mapping that a file holds. Raises ReportError where it holds none."""
    try:
        found = parse(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"a mapping was expected, and it holds {type(found).__name__}")
    except ValueError as error:
        raise ReportError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    return found


def read_lines(path: Path) -> list[Event]:
    """The objects of a .jsonl file; none where it is missing. A last line not yet written whole is left out."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    events = []
    for number, line in enumerate(lines, 1):
        try:
            events.append({**json.loads(line)})
        except (ValueError, TypeError):
            if number < len(lines):
                raise ReportError(f"{path}, line {number}: not JSON; take the line out") from None
    return events
