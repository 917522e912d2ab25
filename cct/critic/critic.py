"""The critics: TAC, and the standard ones to compare it with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from .base import SingleCritic, critics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .towers import Tower


@critics.register("tac")
class TAC(SingleCritic):
    """Transport-aligned critic: a small tower that borrows the actor's hidden states and attention."""

    width: int = Field(64, ge=4, le=4096)
    """Width of the tower."""
    depth: int = Field(2, ge=1, le=64)
    """Blocks; each reads the hidden states of one layer, evenly spaced up to the last."""
    ladder: tuple[int, ...] | None = None
    """The layers to read instead, one per block: 1 is the first, -1 the last; `depth` must equal their number."""
    memory: int = Field(32, ge=0, le=1024)
    """Number of features whose running maximum over the response is kept, so that an error is not forgotten; 0 for none."""
    borrow_attention: bool = True
    """Mix value vectors with the actor's attention; without it, positions are not mixed."""
    concentration: bool = True
    """Read each head's attention concentration."""

    @model_validator(mode="after")
    def _a_layer_a_block(self) -> TAC:
        if self.ladder is not None and len(self.ladder) != self.depth:
            raise ValueError(
                f"ladder names {len(self.ladder)} layers, one per block; set depth to that number (it is {self.depth})"
            )
        return self

    def layers(self, n_layers: int) -> tuple[int, ...]:
        """The layers read, 1 to n_layers. Raises ValueError where one does not exist."""
        if self.ladder is None:
            return tuple(max(1, round((i + 1) * n_layers / self.depth)) for i in range(self.depth))
        read = tuple(n_layers + 1 + layer if layer < 0 else layer for layer in self.ladder)
        if any(not 1 <= layer <= n_layers for layer in read):
            raise ValueError(f"critic.ladder {list(self.ladder)} does not fit a model of {n_layers} layers, 1 to {n_layers}")
        return read

    def build(self, actor: PreTrainedModel, bounds: tuple[float, float]) -> Tower:
        from .towers import TransportAlignedTower

        config = actor.config.get_text_config()
        return TransportAlignedTower(
            config,
            self.head(bounds),
            width=self.width,
            ladder=self.layers(config.num_hidden_layers),
            memory=self.memory,
            borrow=self.borrow_attention,
            concentration=self.concentration,
        )


@critics.register("standard")
class Standard(SingleCritic):
    """A second Transformer of the actor's size, initialised from its weights, with a value head."""

    def build(self, actor: PreTrainedModel, bounds: tuple[float, float]) -> Tower:
        from .towers import StandardTower

        return StandardTower(actor, self.head(bounds))


@critics.register("value_head")
class ValueHead(SingleCritic):
    """A two-layer head on the actor's last hidden state, detached."""

    width: int = Field(128, ge=1)
    """Width of the head."""

    def build(self, actor: PreTrainedModel, bounds: tuple[float, float]) -> Tower:
        from .towers import HeadTower

        return HeadTower(actor.config.get_text_config(), self.head(bounds), width=self.width)
