"""One forward of the actor as a statistic sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Queries at once wherever attention is written out: bounds extra memory to H * 256 * S per sequence.
QUERY_BLOCK = 256


@dataclass
class Attention:
    """Queries and keys of one layer as the kernel saw them, detached: enough to attend once more."""

    query: Tensor  # [B, H, S, head_dim]
    key: Tensor  # [B, H_kv, S, head_dim]
    mask: Tensor | None  # bool or additive [B, 1, S, S]; None means plain causal
    scaling: float

    def blocks(self, size: int = QUERY_BLOCK, start: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """The attention probabilities, `size` queries at a time: (queries, [B, H, size, S]), float32, detached.

        Never more than H * size * S numbers a sequence. A query that sees no key has zeros. start: the first query.
        """
        import torch

        length = self.query.shape[2]
        position = torch.arange(length, device=self.query.device)
        for first in range(start, length, size):
            rows = slice(first, min(first + size, length))
            mask = position <= position[rows].unsqueeze(1) if self.mask is None else self.mask[:, :, rows]
            yield rows, self._probabilities(self.query[:, :, rows], mask)

    def of_query(self, position: Tensor) -> Tensor:
        """The attention of one query per sequence, [B] of positions, over the keys: [B, H, S], float32, detached."""
        import torch

        batch = torch.arange(len(position), device=position.device)
        if self.mask is None:
            keys = torch.arange(self.query.shape[2], device=position.device)
            mask = (keys <= position.unsqueeze(1))[:, None, None]
        else:
            mask = self.mask.expand(len(position), -1, -1, -1)[batch, :, position].unsqueeze(2)
        return self._probabilities(self.query[batch, :, position].unsqueeze(2), mask).squeeze(2)

    def _probabilities(self, query: Tensor, mask: Tensor) -> Tensor:
        import torch

        with torch.no_grad():
            key = self.key.float().repeat_interleave(query.shape[1] // self.key.shape[1], dim=1)
            logits = query.float() @ key.transpose(-1, -2) * self.scaling
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
            return logits.softmax(-1).nan_to_num(0.0)


@dataclass
class Forward:
    """One forward of the actor as a `Statistic` sees it, detached."""

    input_ids: Tensor  # [B, S]
    attention_mask: Tensor  # [B, S], 1 = token
    width: int  # T
    n_layers: int
    logprobs: Tensor  # [B, T] of token t in it
    entropy: Tensor  # [B, T] of it
    attention: dict[int, Attention]  # layer -> queries and keys, of the layers asked for
    hidden_states: dict[int, Tensor]  # layer -> [B, S, D] after that layer, of the layers asked for
    concentration: Callable[..., Tensor]  # of (attention, statistic="shannon", sinks=0): [B, H, S], each query's
    all_logprobs: Tensor | None = None

    @property
    def distribution(self) -> Tensor:
        """[B, T, V], the log-probabilities that token t was drawn from. Raises ValueError where no statistic reads them."""
        if self.all_logprobs is None:
            raise ValueError(
                "the distribution was not kept: a statistic that uses it must set reads = frozenset({'distribution'})"
            )
        return self.all_logprobs

    def emitting(self, x: Tensor) -> Tensor:
        """[B, S, ...] by position, as [B, T, ...] at the positions that emit the response's tokens."""
        return x[:, -self.width - 1 : -1]

    def emitted(self, x: Tensor) -> Tensor:
        """[B, S, ...] by position, as [B, T, ...] at the response's tokens themselves."""
        return x[:, -self.width :]
