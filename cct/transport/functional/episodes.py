"""Episodes of several rows: their rows one after the other as one row, and back. The only place that knows of cuts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from cct.rollout import Rollout

PROMPTED = ("input_ids", "attention_mask")  # [B, S]
OF_THE_LAST_ROW = ("truncated", "bootstrap")  # [B]; all others are those of the first row


@dataclass(frozen=True)
class Split:
    """Where B rows of T positions stand in E joined rows of T' positions."""

    source: Tensor  # [E, T'] which of the B * T positions stands there; -1: none
    place: Tensor  # [B, T] at which of the E * T' positions it stands; -1: none, behind the row's last emitted token
    episode: Tensor  # [B] joined row that the row is in
    first: Tensor  # [E] first row of each episode
    last: Tensor  # [E] its last row

    def join(self, x: Tensor) -> Tensor:
        """x [B, T] as [E, T']; between the rows and behind them False, 0.0, or -1 of integers."""
        filler = -1 if x.dtype in (torch.int32, torch.int64) else 0
        return x.reshape(-1)[self.source.clamp(min=0)].masked_fill(self.source < 0, filler)

    def __call__(self, x: Tensor) -> Tensor:
        """x [E, T'] as [B, T]; 0 behind each row's last emitted token. Raises ValueError on another shape."""
        if x.shape != self.source.shape:
            raise ValueError(
                f"expected a tensor of the joined rollout's shape {tuple(self.source.shape)}; got {tuple(x.shape)}"
            )
        return x.reshape(-1)[self.place.clamp(min=0)].masked_fill(self.place < 0, 0)

    def at_ends(self, x: Tensor) -> Tensor:
        """x [E] as [B]: at the last row of each episode, 0 at the others."""
        return x.new_zeros(len(self.place)).index_copy_(0, self.last, x)


def join(rollout: Rollout) -> tuple[Rollout, Split | None]:
    """The rollout with one row per episode, and the way back. The rollout itself, and None, where each has one row.

    The rows of an episode follow each other by `order`, each up to its last emitted token, with one masked position between
    them, so that a turn stays a turn. Episodes stand in the order of their first rows. Of numbers per row, `truncated` and
    `bootstrap` are those of the last row; the others, and the prompt, are those of the first.
    Raises ValueError where two rows of an episode have the same `order`, or are of different groups.
    """
    if rollout.episodes is None:
        return rollout, None
    number, count = torch.unique(rollout.episodes, return_inverse=True, return_counts=True)[1:]
    if len(count) == len(number):
        return rollout, None
    split = _layout(rollout.mask, number, torch.zeros_like(number) if rollout.order is None else rollout.order)
    if bool((rollout.groups[split.first][split.episode] != rollout.groups).any()):
        raise ValueError("rows of one episode are of different groups (rollout.groups); an episode answers one prompt")
    return rollout.replace(**{field.name: _joined(rollout, field.name, split) for field in fields(rollout)}), split


def jointly(rollout: Rollout, ask: Callable[[Rollout], Tensor]) -> Tensor:
    """What `ask` gives for the rollout with one row per episode, [E, T'], back as [B, T]."""
    joined, split = join(rollout)
    return ask(joined) if split is None else split(ask(joined))


def _layout(mask: Tensor, episodes: Tensor, order: Tensor) -> Split:
    """mask: bool [B, T]. episodes: [B] int, 0 to E - 1. order: [B] int. Raises ValueError on an order that is not one."""
    rows, width = mask.shape
    number, position = torch.arange(rows, device=mask.device), torch.arange(width, device=mask.device)
    n_episodes = int(episodes.max()) + 1
    first_seen = number.new_full((n_episodes,), rows).scatter_reduce_(0, episodes, number, "amin")
    episode = first_seen.argsort().argsort()[episodes]
    by = order.argsort(stable=True)
    by = by[episode[by].argsort(stable=True)]  # rows, episode after episode
    begins = episode[by] != torch.nn.functional.pad(episode[by], (1, 0), value=-1)[:-1]
    if bool((~begins[1:] & (order[by][1:] == order[by][:-1])).any()):
        raise ValueError("two rows of one episode have the same place in it (rollout.order)")
    length = ((position + 1) * mask).amax(1)  # up to the last emitted token
    steps = length[by] + 1
    before = steps.cumsum(0) - steps
    offset = torch.empty_like(length).scatter_(0, by, before - before[begins][episode[by]])
    joined_width = int((offset + length).max().clamp(min=1))
    inside = position < length.unsqueeze(1)
    place = torch.where(inside, (episode * joined_width + offset).unsqueeze(1) + position, -1)
    source = number.new_full((n_episodes * joined_width,), -1)
    source[place[inside]] = inside.flatten().nonzero().squeeze(1)
    ends = torch.nn.functional.pad(begins, (0, 1), value=True)[1:]
    return Split(source.view(n_episodes, joined_width), place, episode, by[begins], by[ends])


def _joined(rollout: Rollout, name: str, split: Split) -> Any:
    x = getattr(rollout, name)
    if isinstance(x, dict):
        return {key: split.join(value) if isinstance(value, Tensor) else value for key, value in x.items()}
    if not isinstance(x, Tensor):
        return x
    if name in PROMPTED:
        prompt, response = x[:, : rollout.prompt_width], x[:, rollout.prompt_width :]
        return torch.cat([prompt[split.first], split.join(response).clamp(min=0)], 1)
    if x.dim() == 1:
        return x[split.last if name in OF_THE_LAST_ROW else split.first]
    return split.join(x)
