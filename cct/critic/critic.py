"""The critics: TAC, and the standard ones to compare it with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from .base import Critic, critics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .towers import Tower


@critics.register("tac")
class TAC(Critic):
    """Transport-aligned critic: a small tower that borrows the actor's hidden states and attention."""

    width: int = Field(64, ge=4, le=4096)
    """Width of the tower."""
    depth: int = Field(2, ge=1, le=64)
    """Blocks; each reads the hidden states of one layer, evenly spaced up to the last."""
    memory: int = Field(32, ge=0, le=1024)
    """Features whose running maximum over the response is kept, so that an error once seen is not forgotten; 0 for none."""
    borrow_attention: bool = True
    """Mix value vectors with the actor's attention; off leaves each position by itself."""
    concentration: bool = True
    """Read each head's attention concentration."""

    def build(self, actor: PreTrainedModel, bounds: tuple[float, float]) -> Tower:
        from .towers import TransportAlignedTower

        return TransportAlignedTower(
            actor.config.get_text_config(),
            self.output,
            bounds,
            width=self.width,
            depth=self.depth,
            memory=self.memory,
            borrow=self.borrow_attention,
            concentration=self.concentration,
        )


@critics.register("standard")
class Standard(Critic):
    """A second Transformer of the actor's size, started from its weights, with a value head."""

    def build(self, actor: PreTrainedModel, bounds: tuple[float, float]) -> Tower:
        from .towers import StandardTower

        return StandardTower(actor, self.output, bounds)


@critics.register("value_head")
class ValueHead(Critic):
    """A two-layer head on the actor's last hidden state, detached."""

    width: int = Field(128, ge=1)
    """Width of the head."""

    def build(self, actor: PreTrainedModel, bounds: tuple[float, float]) -> Tower:
        from .towers import HeadTower

        return HeadTower(actor.config.get_text_config(), self.output, bounds, width=self.width)
