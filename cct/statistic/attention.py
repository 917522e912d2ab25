"""Statistics of the policy's attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .base import LayerStatistic, statistics

if TYPE_CHECKING:
    from torch import Tensor

    from .forward import Forward


@statistics.register("concentration")
class Concentration(LayerStatistic):
    """Concentration of the attention of the query that emits token t, averaged over heads and layers.

    1 - H(p) / log n over the n visible keys for the two entropies; the largest p itself for `max`.
    """

    statistic: Literal["shannon", "renyi2", "max"] = "shannon"
    """Shannon's entropy H, Renyi's of order 2 (-log sum p^2), or the largest attention probability."""
    sinks: int = Field(0, ge=0, le=64)
    """Leading keys left out (attention sinks); the rest is renormalised."""
    heads: Literal["all"] | tuple[Annotated[int, Field(ge=0)], ...] = "all"
    """Query heads averaged over, the same in every layer."""

    reads: ClassVar[frozenset[str]] = frozenset({"attention"})

    @property
    def name(self) -> str:
        heads = "" if self.heads == "all" else f"/heads {'+'.join(map(str, self.heads))}"
        return f"concentration/{self.statistic}/{self.layers_name}/{self.sinks}{heads}"

    def fits(self, n_layers: int, n_heads: int) -> None:
        super().fits(n_layers, n_heads)
        if self.heads != "all" and (not self.heads or max(self.heads) >= n_heads):
            raise ValueError(f"heads {list(self.heads)} do not fit a model of {n_heads} attention heads")

    def measure(self, forward: Forward) -> Tensor:
        import torch

        per_layer = []
        for layer in self.layer_indices(forward.n_layers):
            per_head = forward.concentration(forward.attention[layer], statistic=self.statistic, sinks=self.sinks)
            chosen = per_head if self.heads == "all" else per_head[:, list(self.heads)]
            per_layer.append(chosen.mean(1))
        return forward.emitting(torch.stack(per_layer).mean(0))


@statistics.register("outcome_attention")
class OutcomeAttention(LayerStatistic):
    """Attention that the last token of a response pays to token t, averaged over heads and layers.

    One query per response: no more memory than the keys.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"attention"})
    knows = "response"

    def measure(self, forward: Forward) -> Tensor:
        import torch

        length = forward.attention_mask.shape[1]
        last = length - 1 - forward.attention_mask.flip(1).argmax(1)
        layers = [forward.attention[layer].of_query(last).mean(1) for layer in self.layer_indices(forward.n_layers)]
        return forward.emitted(torch.stack(layers).mean(0))


@statistics.register("preplan")
class Preplan(LayerStatistic):
    """How far back, in tokens, the query that emits token t attends on average; no key counts as farther than `window`.

    Cost: the attention of each layer written out once more for the response's queries, 256 at a time.
    """

    window: int = Field(64, ge=1, le=1_000_000)
    """Largest distance, in tokens: a key farther back counts as this far."""

    reads: ClassVar[frozenset[str]] = frozenset({"attention"})

    def measure(self, forward: Forward) -> Tensor:
        import torch

        rows_of, length = forward.attention_mask.shape
        position = torch.arange(length, device=forward.attention_mask.device)
        distance = torch.zeros(rows_of, length, device=position.device)
        layers = self.layer_indices(forward.n_layers)
        for layer in layers:
            for rows, probabilities in forward.attention[layer].blocks(start=length - forward.width - 1):
                back = (position[rows].unsqueeze(1) - position).clamp(0, self.window)
                distance[:, rows] += (probabilities.mean(1) * back).sum(-1) / len(layers)
        return forward.emitting(distance)


@statistics.register("anchor")
class Anchor(LayerStatistic):
    """Mean attention to token t of the tokens `near` to `far` after it; 0 if there are none.

    Cost: as `preplan`.
    """

    near: int = Field(4, ge=1, le=1_000_000)
    """Nearest later token that counts; closer ones attend to token t because it is close."""
    far: int = Field(64, ge=1, le=1_000_000)
    """Farthest later token that counts."""

    reads: ClassVar[frozenset[str]] = frozenset({"attention"})
    knows = "response"

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.near > self.far:
            raise ValueError(f"near ({self.near}) must not exceed far ({self.far})")
        return self

    @property
    def name(self) -> str:
        return f"anchor/{self.layers_name}/{self.near}-{self.far}"

    def measure(self, forward: Forward) -> Tensor:
        import torch

        tokens = forward.attention_mask.bool()
        length = tokens.shape[1]
        position = torch.arange(length, device=tokens.device)
        received, queries = torch.zeros(2, *tokens.shape, device=tokens.device)
        layers = self.layer_indices(forward.n_layers)
        for layer in layers:
            for rows, probabilities in forward.attention[layer].blocks(start=length - forward.width):
                lag = position[rows].unsqueeze(1) - position
                counts = (lag >= self.near) & (lag <= self.far) & tokens[:, rows].unsqueeze(2)
                received += (probabilities.mean(1) * counts).sum(1)
                queries += counts.sum(1)
        return forward.emitted(received / queries.clamp(min=1))
