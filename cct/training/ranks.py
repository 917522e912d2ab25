"""The processes of a run. With one process everything here is the identity.

Every rank samples, judges and reads its share, then all ranks hold the whole rollout (a few numbers per
token), so that group baselines, whitening and every denominator are global by construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed


@dataclass(frozen=True)
class Ranks:
    """This process among the others."""

    rank: int = 0
    world: int = 1

    @classmethod
    def current(cls) -> Ranks:
        if distributed.is_available() and distributed.is_initialized():
            return cls(distributed.get_rank(), distributed.get_world_size())
        return cls()

    def share(self, count: int) -> range:
        """This rank's contiguous part of range(count); parts differ by one at most, and may be empty."""
        return range(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value)
        return values

    def gather_rows(self, mine: Tensor, index: list[Tensor]) -> Tensor:
        """Rows of all ranks, placed by each rank's row numbers; every rank has equally many."""
        parts = [mine] if self.world == 1 else [torch.empty_like(mine) for _ in index]
        if self.world > 1:
            distributed.all_gather(parts, mine.contiguous())
        whole = mine.new_empty(sum(map(len, index)), *mine.shape[1:])
        for rows, part in zip(index, parts, strict=True):
            whole[rows] = part
        return whole
