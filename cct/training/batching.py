"""Minibatches, and which responses go through the model together: no number changes by it, only what padding costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cct.rollout import Trace

Size = tuple[int, int]  # tokens of a response, and of its prompt


@dataclass
class Minibatch:
    """Rows for one forward and backward. Weights are taken over the whole minibatch, before it is split into these."""

    input_ids: Tensor  # [B, S]
    attention_mask: Tensor  # [B, S]
    mask: Tensor  # [B, T]
    token_weights: Tensor  # [B, T] 1 / tokens of the minibatch: of the critic's loss and of metrics
    # --- for the critic
    trace: Trace | None = None  # set: the critic learns from it; None: the policy learns
    numbers: Tensor | None = None  # [B] of each response among those to its prompt in its iteration
    value_targets: Tensor | None = None  # [B, T]
    # --- for the policy
    loss_weights: Tensor | None = None  # [B, T] of its loss, by the geometry's aggregation
    correction: Tensor | None = None  # [B, T] of its surrogate alone, by the geometry's correction
    advantages: Tensor | None = None  # [B, T]
    logprobs: Tensor | None = None  # [B, T] of the behaviour policy, which the ratio is to; None: it is the one that learns
    marked: Tensor | None = None  # [B, T] tokens that the geometry chose from the whole minibatch
    reference_logprobs: Tensor | None = None  # [B, T]
    read_before: bool = True  # by a behaviour forward; without one the update's own has to tell the entropy


def micro_batches(
    sizes: Sequence[Size], minibatch: int, world: int, *, rows: int, tokens: int | None = None
) -> list[list[list[int]]]:
    """For each rank the rows of its forwards, minibatch after minibatch; every rank and minibatch has equally many.

    sizes: of all rows, in the order in which minibatches are cut from them. Within a minibatch rows go by length, so that
    little is padded, and are dealt to the ranks in turn, whose forwards are of like lengths then.
    rows: in each forward. tokens: the most in a forward instead, padding included; a row longer than that goes alone.
    """
    shares = [
        sorted(range(start, start + minibatch), key=lambda row: sizes[row], reverse=True)[rank::world]
        for start in range(0, len(sizes), minibatch)
        for rank in range(world)
    ]
    if tokens is None:
        parts = [[share[i : i + rows] for i in range(0, len(share), rows)] for share in shares]
    else:
        parts = [_within(share, sizes, tokens) for share in shares]
    count = max(map(len, parts))
    return [[part for share in parts[rank::world] for part in _divide(share, count)] for rank in range(world)]


def _within(share: list[int], sizes: Sequence[Size], tokens: int) -> list[list[int]]:
    """Consecutive rows as long as their number times the longest response and the longest prompt stays within `tokens`."""
    parts: list[list[int]] = []
    width = prompt = 0
    for row in share:
        response, asked = sizes[row]
        width, prompt = max(width, response), max(prompt, asked)
        if parts and (len(parts[-1]) + 1) * (width + prompt) <= tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
            width, prompt = response, asked
    return parts


def _divide(parts: list[list[int]], count: int) -> list[list[int]]:
    """The same rows in `count` parts, by halving those with most rows: ranks must make equally many forwards."""
    while len(parts) < count:
        most = max(range(len(parts)), key=lambda i: len(parts[i]))
        half = len(parts[most]) // 2
        parts[most : most + 1] = [parts[most][:half], parts[most][half:]]
    return parts


class Padded(Protocol):
    """Prompts padded on the left to `prompt_width`, responses on the right."""

    @property
    def attention_mask(self) -> Tensor: ...  # [B, S]

    @property
    def prompt_width(self) -> int: ...


def trimmed(batch: Padded, rows: Sequence[int]) -> tuple[slice, int]:
    """Columns of `input_ids` that these rows fill, and how many of them respond (at least 1)."""
    used = batch.attention_mask[list(rows)].any(0)
    prompt = batch.prompt_width
    left = int(used[:prompt].int().argmax()) if bool(used[:prompt].any()) else prompt
    width = max(1, int(used[prompt:].sum()))
    return slice(left, prompt + width), width
