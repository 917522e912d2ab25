"""Which rows go through the model together. Splitting and padding change the cost of a forward, but no number."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from cct.recipe import Training

Size = tuple[int, int]  # tokens of a response, and of its prompt
Plan = list[list[list[int]]]  # for each rank, the rows of each of its forwards, minibatch after minibatch


def forward_plans(data: Sequence[tuple[Padded, Sequence[int]]], training: Training, world: int) -> list[Plan]:
    """For each iteration's rows, and for each rank, the rows of its forwards; all minibatches have equally many.

    data: of each iteration its rows, and how many of them each of its minibatches has.
    """
    sizes = [size for each, _ in data for size in _sizes(each)]
    cuts = [cut for _, each in data for cut in each]
    rows = training.micro_batch_size or max(1, training.minibatch_size // world)
    if training.micro_batch_size is None and training.micro_batch_tokens is None:
        rows = max(rows, *(-(-cut // world) for cut in cuts))
    whole = micro_batches(sizes, cuts, world, rows=rows, tokens=training.micro_batch_tokens)
    plans, forwards, first, count = list[Plan](), 0, 0, len(whole[0]) // len(cuts)
    for _, each in data:
        until = forwards + count * len(each)
        plans.append([[[row - first for row in part] for part in of_rank[forwards:until]] for of_rank in whole])
        forwards, first = until, first + sum(each)
    return plans


def _sizes(batch: Padded) -> list[Size]:
    prompt = batch.prompt_width
    return list(
        zip(batch.attention_mask[:, prompt:].sum(1).tolist(), batch.attention_mask[:, :prompt].sum(1).tolist(), strict=True)
    )


def micro_batches(
    sizes: Sequence[Size], cuts: Sequence[int], world: int, *, rows: int, tokens: int | None = None
) -> list[list[list[int]]]:
    """For each rank the rows of its forwards, minibatch after minibatch; every rank and minibatch has equally many.

    sizes: of all rows, in the order in which minibatches are cut from them. cuts: rows of each minibatch. Within a minibatch
    rows go by length, so that little is padded, and are dealt to the ranks in turn, whose forwards are of like lengths then.
    rows: in each forward. tokens: the most in a forward instead, padding included; a row longer than that goes alone.
    """
    shares = [
        sorted(range(end - cut, end), key=lambda row: sizes[row], reverse=True)[rank::world]
        for cut, end in zip(cuts, accumulate(cuts), strict=True)
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
    """The same rows in `count` parts, by halving the largest parts: all ranks must make the same number of forwards.

    Parts without a row where there are not enough rows; `or_any` says what is read for them.
    """
    while len(parts) < count:
        most = max(range(len(parts)), key=lambda i: len(parts[i]))
        half = len(parts[most]) // 2
        parts[most : most + 1] = [parts[most][:half], parts[most][half:]]
    return parts


def or_any(rows: list[int]) -> tuple[list[int], float]:
    """The rows of a forward, and the factor of their weights; without rows, any row with weight 0."""
    return (rows, 1.0) if rows else ([0], 0.0)


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
