"""Properties of statistics, measured in the forward of a random model of two layers, as in a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from cct.agent.agent import Agent
from cct.statistic import Statistic

from .base import Broken, Malformed, Property
from .cases import numbers, same
from .critics import ROUNDING, Batch, random_actor
from .watch import alone, later


def measured(
    statistic: Statistic,
    batch: Batch,
    left: int = 0,
    right: int = 0,
    rows: Tensor | None = None,
    change: Callable[[Tensor], None] = lambda tokens: None,
) -> Tensor:
    """[B, T] in the order of the batch, 0 where no token is. rows: those of the forward. change: of the token ids, in place."""
    ids, seen, width = batch.tokens(left, right)
    change(ids[:, -width:])
    rows = torch.arange(len(ids)) if rows is None else rows
    try:
        with torch.no_grad():
            found = Agent(random_actor(), None)(ids[rows], seen[rows], width, statistics={"it": statistic}).stats["it"]
    except Exception as error:
        raise Malformed(f"measuring it raised {type(error).__name__}: {error}") from error
    return found.masked_fill(~seen[rows, -width:].bool(), 0.0)


def determinism(statistic: Statistic, batch: Batch) -> None:
    batch, first = replace(batch, responses=tuple(max(1, length) for length in batch.responses)), None
    for when in ("", "called again", "called again, a day later"):
        with alone(len(when)), later() if "later" in when else nullcontext():
            found = measured(statistic, batch)
        first = found if first is None else first
        same("it", first, found, when)
        measured(statistic, replace(batch, seed=batch.seed + 1))


def form(statistic: Statistic, batch: Batch) -> None:
    found = measured(statistic, batch)
    if not bool(found.isfinite().all()):
        raise Broken(f"it is not finite at a response token: {numbers(found)}")


def known(statistic: Statistic, batch: Batch) -> None:
    if (altered := batch.altered()) is None:
        return
    row, t, change = altered
    before, after = measured(statistic, batch), measured(statistic, batch, change=change)
    others = torch.arange(len(before)) != row
    same("it at other responses", before[others], after[others], "with other tokens in one response", ROUNDING)
    end = {"before": t + 1, "token": t, "response": 0}[statistic.knows]
    same(f"it at [{row}, :{end}]", before[row, :end], after[row, :end], f"with other tokens from {t} on", ROUNDING)


def padding(statistic: Statistic, batch: Batch) -> None:
    plain = measured(statistic, batch)
    for left, right in ((3, 0), (0, 3)):
        wide = measured(statistic, batch, left, right)[:, : plain.shape[1]]
        same("it", plain, wide, f"with {left} more positions of padding before and {right} after", ROUNDING)


def split(statistic: Statistic, batch: Batch) -> None:
    whole = measured(statistic, batch)
    for row in range(len(whole)):
        alone = measured(statistic, batch, rows=torch.tensor([row]))
        same(f"it at [{row}]", whole[row], alone[0], "alone in a forward", ROUNDING)


def _too_large(statistic: Statistic) -> str:
    config = random_actor().config
    try:
        statistic.fits(config.num_hidden_layers, config.num_attention_heads)
    except ValueError as error:
        return f"the suite's model is too small: {error}"
    return ""


STATISTIC = [
    Property("determinism", "the same tokens give the same numbers", determinism, 0.25, excused=_too_large),
    Property("form", "[B, T], finite at every response token", form, excused=_too_large),
    Property(
        "known",
        "it depends only on what `knows` declares (tokens before t, token t, its response), on no other response",
        known,
        excused=_too_large,
    ),
    Property("padding", "neither padding before prompts nor after responses matters", padding, 0.5, excused=_too_large),
    Property("split", "each response alone in a forward gets the same numbers", split, 0.5, excused=_too_large),
]
