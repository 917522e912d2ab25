"""Small random rollouts, ways to write the same one differently, and tensors as Python."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from cct.rollout import Rollout
from cct.statistic import TokenEntropy, TokenLogprob

from .base import Broken, hypothesis

PROMPT = 3  # prompt positions of a case
NOISE = (float("nan"), float("inf"), -3.0)
ALWAYS = ("entropy", "value_disagreement")  # statistics that parts may read without asking for them
NAMED = ("stats", "components")  # of a rollout, [B, T] by name
RANGES = {TokenEntropy: 6.0, TokenLogprob: -6.0}  # in nats; other statistics go from 0 to 1


@dataclass(frozen=True)
class Case:
    """A rollout in few words; what is not said here is drawn from `seed`."""

    masked: tuple[tuple[bool, ...], ...]
    rewards: tuple[tuple[float, ...], ...]
    groups: tuple[int, ...]
    truncated: tuple[bool, ...]
    seed: int
    first: bool
    """Whether it is the first iteration, without moments of earlier ones."""
    pick: int
    """Chooses a token or a row, where a test changes one."""

    def rollout(self, statistics: Any = None) -> Rollout:
        mask = ~torch.tensor(self.masked)
        rewards = torch.tensor(self.rewards)
        return fill(mask, rewards, torch.tensor(self.groups), torch.tensor(self.truncated), self.seed, statistics, self.first)

    def token(self, mask: Tensor) -> tuple[int, int] | None:
        """(row, position) of one trainable token; None where there is none."""
        steps = mask.nonzero().tolist()
        return tuple(steps[self.pick % len(steps)]) if steps else None


CELLS = [(masked, reward) for masked in (False, True) for reward in (0.0, 1.0, -1.0, 0.5, 0.25)]  # the plainest first


def cases(rows: int = 3, width: int = 6) -> Any:
    """Any mask, rewards of few digits, any grouping; shrinks towards one full response without reward."""
    st = hypothesis().strategies

    def build(columns: Any, count: int, groups: Any, truncated: Any, *rest: Any) -> Case:
        table = [tuple(zip(*row, strict=True)) for row in list(zip(*columns, strict=True))[:count]]
        masked, rewards = zip(*table, strict=True)
        return Case(masked, rewards, groups[:count], truncated[:count], *rest)

    column = st.tuples(*[st.sampled_from(CELLS)] * rows)  # by position, so that shrinking takes one out
    return st.builds(
        build,
        st.lists(column, min_size=1, max_size=width),
        st.integers(1, rows),
        st.tuples(*[st.integers(0, 1)] * rows),
        st.tuples(*[st.booleans()] * rows),
        st.integers(0, 999),
        st.booleans(),
        st.integers(0, 99),
    )


def fill(
    mask: Tensor, rewards: Tensor, groups: Tensor, truncated: Tensor, seed: int, statistics: Any, first: bool = False
) -> Rollout:
    """The rollout of a mask: numbers of two digits for what a behaviour pass reads. Gaps are seen, padding is not."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = mask.shape

    def draw(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=generator) * 100).round() / 100

    seen = mask.flip(1).cummax(1).values.flip(1) if width else mask
    scales = {name: RANGES.get(type(what), 1.0) for name, what in (statistics or {}).items()}
    scales |= dict.fromkeys(ALWAYS, 1.0)
    branches = mask & (draw(rows, width) < 0.4)
    further = {
        "anchors": (draw(rows, width) * 2).long(),
        "starts": branches,
        "branch_values": draw(rows, width) * branches,
        "greedy_scores": draw(2)[groups % 2],  # of the group's prompt
        "turns": torch.where(mask, (mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]).long().cumsum(1) - 1, -1),
        "versions": torch.where(mask, 3, -1),
        "components": {"evidence": rewards},
        "exact_values": draw(rows, width),
        "decisions": mask & (draw(rows, width) < 0.5),
    }
    there = {field.name for field in fields(Rollout)}
    truncated = truncated & mask.any(1)
    rollout = Rollout(
        input_ids=torch.randint(3, 20, (rows, PROMPT + width), generator=generator),
        attention_mask=torch.cat([torch.ones(rows, PROMPT), seen], 1).long(),
        mask=mask,
        rewards=rewards,
        groups=groups,
        truncated=truncated,
        logprobs=-draw(rows, width),
        rollout_logprobs=-draw(rows, width),
        values=draw(rows, width),
        bootstrap=draw(rows) * truncated,
        reference_logprobs=-draw(rows, width),
        stats={name: scale * draw(rows, width) for name, scale in scales.items()},
        moments={} if first else {name: (0.5 * scale, 0.3 * abs(scale)) for name, scale in scales.items()},
        seed=seed,
        **{name: x for name, x in further.items() if name in there},  # type: ignore[arg-type]
    )
    return rollout.replace(teacher_logprobs=-draw(rows, width), prompt_values=draw(2)[groups % 2])


def full(rows: int, width: int, statistics: Any) -> Rollout:
    """Responses of full length to prompts of two responses each, rewarded at the end."""
    rewards = torch.zeros(rows, width)
    rewards[:, -1] = torch.arange(rows) % 2
    mask = torch.ones(rows, width, dtype=torch.bool)
    return fill(mask, rewards, torch.arange(rows) // 2, torch.zeros(rows, dtype=torch.bool), 0, statistics)


# --- the same rollout, written differently --------------------------------------------------------
def each_tensor(rollout: Rollout, change: Any, *, mask: bool = True) -> Rollout:
    """`change` on every tensor [B, T], statistics and components included; on the mask too unless said otherwise."""
    found = {
        field.name: change(x)
        for field in fields(rollout)
        if isinstance(x := getattr(rollout, field.name), Tensor)
        and x.shape == rollout.mask.shape
        and (mask or field.name != "mask")
    }
    named = {kind: {name: change(x) for name, x in getattr(rollout, kind).items()} for kind in NAMED}
    return rollout.replace(**found, **named)


def noisy(rollout: Rollout, noise: float) -> Rollout:
    """Noise wherever the mask is off."""
    return each_tensor(rollout, lambda x: x.where(rollout.mask, noise) if x.is_floating_point() else x, mask=False)


def with_copy(rollout: Rollout, row: int) -> Rollout:
    """One response once more, at the end."""
    return rows_of(rollout, torch.tensor([*range(len(rollout.mask)), row]))


def reordered(rollout: Rollout, index: Tensor) -> Rollout:
    """Positions of each response by `index` [B, T], tokens included; padding follows the last step again."""
    ids, seen = rollout.input_ids.clone(), rollout.attention_mask.clone()
    ids[:, PROMPT:] = ids[:, PROMPT:].gather(1, index)
    seen[:, PROMPT:] = seen[:, PROMPT:].gather(1, index)
    return each_tensor(rollout, lambda x: x.gather(1, index)).replace(input_ids=ids, attention_mask=seen)


def packing(mask: Tensor) -> Tensor:
    """Index [B, T] that moves each response's steps to its left."""
    return (~mask).long().sort(dim=1, stable=True).indices


def without_gaps(rollout: Rollout) -> tuple[Rollout, Tensor]:
    """Each response without its gaps, and the index that it was made by."""
    index = packing(rollout.mask)
    packed = reordered(rollout, index)
    seen = torch.cat([rollout.attention_mask[:, :PROMPT], packed.mask.long()], 1)
    return packed.replace(attention_mask=seen), index


def padding_left(rollout: Rollout) -> tuple[Rollout, Tensor]:
    """Each response's padding on its left side, and the index."""
    width = rollout.mask.shape[1]
    after = (~rollout.mask).flip(1).long().cumprod(1).sum(1, keepdim=True)
    index = (torch.arange(width) - after) % width
    return reordered(rollout, index), index


def padded(rollout: Rollout, right: int, left: int = 0) -> Rollout:
    """More padding after the responses and before the prompts."""
    pad = torch.nn.functional.pad
    wide = each_tensor(rollout, lambda x: pad(x, (0, right)))
    return wide.replace(
        input_ids=pad(rollout.input_ids, (left, right)), attention_mask=pad(rollout.attention_mask, (left, right))
    )


def rows_of(rollout: Rollout, rows: Tensor, width: int | None = None) -> Rollout:
    """Some responses, in this order, cut to `width` positions."""
    width = rollout.mask.shape[1] if width is None else width
    some = each_tensor(rollout, lambda x: x[rows, :width])
    per_row = {
        field.name: x[rows]
        for field in fields(rollout)
        if isinstance(x := getattr(rollout, field.name), Tensor) and x.dim() == 1
    }
    end = PROMPT + width
    return some.replace(**per_row, input_ids=rollout.input_ids[rows, :end], attention_mask=rollout.attention_mask[rows, :end])


def stretched(rollout: Rollout, times: int) -> tuple[Rollout, Tensor]:
    """Each masked position between steps `times` over, and where each position went, [B, T]."""
    mask = rollout.mask
    between = ~mask & mask.cummax(1).values & mask.flip(1).cummax(1).values.flip(1)
    ends = torch.where(between, times, 1).cumsum(1)
    width = int(ends.max())
    index = torch.searchsorted(ends, torch.arange(width).repeat(len(mask), 1), right=True)
    inside, index = index < mask.shape[1], index.clamp(max=mask.shape[1] - 1)
    return _taken(rollout, index, inside), ends - 1


def cut(rollout: Rollout, later: Tensor, backwards: bool) -> tuple[Rollout, Tensor]:
    """Each row as an episode that has a new row from each position in `later` [B, T] on; and where each position went, [B, T].

    A later row has a longer prompt instead of what stands before it. backwards: the rows in the opposite order.
    """
    width = later.shape[1]
    begins = [[0, *row.nonzero().flatten().tolist()] for row in later]
    pieces = [(row, n, *ends) for row, at in enumerate(begins) for n, ends in enumerate(zip(at, [*at[1:], width], strict=True))]
    rows, order, first, end = torch.tensor(pieces[::-1] if backwards else pieces).T
    index = first.unsqueeze(1) + torch.arange(width)
    inside, index = index < end.unsqueeze(1), index.clamp(max=width - 1)
    places = torch.zeros_like(index[: len(later)])
    places[rows.unsqueeze(1).expand_as(index)[inside], index[inside]] = inside.flatten().nonzero().squeeze(1)
    some, is_last = _taken(rows_of(rollout, rows), index, inside), end == width
    assert some.bootstrap is not None
    return some.replace(
        input_ids=some.input_ids + order.unsqueeze(1) * (torch.arange(PROMPT + width) < PROMPT),
        truncated=some.truncated & is_last,
        bootstrap=some.bootstrap * is_last,
        episodes=7 - 3 * rows,
        order=order,
    ), places


def _taken(rollout: Rollout, index: Tensor, inside: Tensor) -> Rollout:
    """The positions [B, T'] of each row, nothing outside; the prompts as they are."""
    prompted = {
        name: torch.cat([x[:, :PROMPT], x[:, PROMPT:].gather(1, index).masked_fill(~inside, 0)], 1)
        for name, x in (("input_ids", rollout.input_ids), ("attention_mask", rollout.attention_mask))
    }
    return each_tensor(rollout, lambda x: x.gather(1, index).masked_fill(~inside, 0)).replace(**prompted)


def cast(rollout: Rollout, dtype: torch.dtype) -> Rollout:
    """Every floating-point tensor in another precision."""

    def to(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    changed = {field.name: to(getattr(rollout, field.name)) for field in fields(rollout)}
    return Rollout(**changed | {kind: {name: to(x) for name, x in getattr(rollout, kind).items()} for kind in NAMED})


# --- comparing and showing ------------------------------------------------------------------------
def same(name: str, expected: Tensor, got: Tensor, when: str, tolerance: float = 0.0) -> None:
    """Raises Broken where two tensors differ by more than `tolerance` of the greatest number (0: by one bit)."""
    if expected.shape != got.shape:
        raise Broken(f"{when}, {name} has the shape {tuple(got.shape)} instead of {tuple(expected.shape)}")
    expected, got = expected.detach(), got.detach()
    if tolerance:
        limit = tolerance * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
        good = bool(((expected.double() - got.double()).abs() <= limit).all() and got.isfinite().all())
    else:
        good = torch.equal(expected, got)
    if not good:
        raise Broken(f"{when}, {name} is {numbers(got)} instead of {numbers(expected)}")


def numbers(x: Tensor) -> str:
    """A tensor's numbers, short; of a long one its beginning."""
    if x.numel() > 64:
        return f"{numbers(x.flatten()[:6])[:-1]}, ...]"

    def short(value: Any) -> Any:
        if isinstance(value, list):
            return "[" + ", ".join(map(short, value)) + "]"
        return f"{value:.4g}" if isinstance(value, float) else str(int(value) if isinstance(value, bool) else value)

    return short(x.detach().tolist())


def _tensor(x: Tensor) -> str:
    kind = ".bool()" if x.dtype == torch.bool else ".float()" if x.is_floating_point() else ""
    return f"torch.tensor({numbers(x.int() if x.dtype == torch.bool else x)}){kind}"


def python(**tensors: Any) -> str:
    """Tensors as Python to paste."""
    lines = []
    for name, x in tensors.items():
        if isinstance(x, Tensor):
            lines.append(f"{name} = {_tensor(x)}")
        elif isinstance(x, dict):
            inside = ", ".join(
                f"{key!r}: {_tensor(value)}" if isinstance(value, Tensor) else f"{key!r}: {value}" for key, value in x.items()
            )
            lines.append(f"{name} = {{{inside}}}")
        elif x is not None:
            lines.append(f"{name} = {x!r}")
    return "\n".join(lines)
