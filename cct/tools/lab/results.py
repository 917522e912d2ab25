"""What the laboratory's runs came to: `lab.json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cct.system.files import without_nan
from cct.tools.study.runner import Work
from cct.tools.study.statistics import LEVEL, area_under_curve, estimate, holm, paired_difference, share_of
from cct.tools.study.study import Study
from cct.tools.study.summary import CEILING, FLOOR

from .board import Arm

PHASES = ("start", "middle", "end")  # thirds of a run's iterations
AGREEMENT = ("rank_correlation", "right_signs", "bias", "variance")

Events = Sequence[Mapping[str, float]]


def lab_results(study: Study, arms: Sequence[Arm], works: Sequence[Work]) -> dict[str, Any]:
    """For each task its headroom, and for each arm the share of it that it takes, its fidelity and its cost."""
    runs: dict[tuple[str, str], dict[int, Events]] = {}
    for work in works:
        if work.trained:
            runs.setdefault((work.cell.setting, work.cell.arm), {})[work.cell.seed] = work.events
    return without_nan({"level": LEVEL, "seeds": study.seeds, "tasks": [_task(task, arms, runs) for task in study.settings]})


def _task(task: str, arms: Sequence[Arm], runs: Mapping[tuple[str, str], Mapping[int, Events]]) -> dict[str, Any]:
    of_arm = {arm.name: runs.get((task, arm.name), {}) for arm in arms}
    areas = {name: {seed: _area(events) for seed, events in of_seed.items()} for name, of_seed in of_arm.items()}
    gains = {name: _minus(found, areas[FLOOR]) for name, found in areas.items()}
    headroom = paired_difference(areas[CEILING], areas[FLOOR])
    shares = {name: share_of(gain, gains[CEILING]) for name, gain in gains.items() if name not in (FLOOR, CEILING)}
    adjusted = dict(zip(shares, holm([share.p for share in shares.values()]), strict=True))
    rows = []
    for arm in arms:
        events, share = of_arm[arm.name], shares.get(arm.name)
        rows.append(
            {
                "arm": arm.name,
                "transport": arm.transport,
                "critic": arm.critic,
                "seeds": len(events),
                "area": asdict(estimate(list(areas[arm.name].values()))),
                "gain": asdict(estimate(list(gains[arm.name].values()))),
                "share": None if share is None else asdict(share) | {"p_holm": adjusted[arm.name]},
                "fidelity": {name: dict(zip(PHASES, _phases(events, f"exact/{name}"), strict=True)) for name in AGREEMENT},
                "explained_within": _mean_over(events, lambda run: _mean(_values(run, "exact/explained_variance_within"))),
                "tokens": _mean_over(events, lambda run: sum(_values(run, "train/tokens") + _values(run, "branch/tokens"))),
                "seconds": _mean_over(events, lambda run: sum(_values(run, "time/iteration"))),
            }
        )
    clear = bool(headroom.low > 0)
    return {"task": task, "floor": FLOOR, "ceiling": CEILING, "headroom": asdict(headroom), "clear": clear, "arms": rows}


def _area(events: Events) -> float:
    curve = [(event["iteration"], event["eval/accuracy"]) for event in events if "eval/accuracy" in event]
    return area_under_curve([x for x, _ in curve], [y for _, y in curve])


def _minus(found: Mapping[int, float], floor: Mapping[int, float]) -> dict[int, float]:
    return {seed: area - floor[seed] for seed, area in found.items() if seed in floor}


def _values(events: Events, metric: str) -> list[float]:
    return [event[metric] for event in events if metric in event]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _mean_over(runs: Mapping[int, Events], of_run: Callable[[Events], float]) -> float:
    """The mean over seeds of what each run has."""
    found = [of_run(events) for events in runs.values()]
    return _mean([x for x in found if math.isfinite(x)])


def _phases(runs: Mapping[int, Events], metric: str) -> list[float]:
    """The mean over each third of the iterations in which the policy learns, then over seeds."""
    found = list[float]()
    for third in range(len(PHASES)):

        def of_run(events: Events, third: int = third) -> float:
            learning = [event for event in events if event["iteration"] > 0]
            first, end = (len(learning) * n // len(PHASES) for n in (third, third + 1))
            return _mean(_values(learning[first:end], metric))

        found.append(_mean_over(runs, of_run))
    return found
