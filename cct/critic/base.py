"""The Critic axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from cct.registry import Component, Registry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .towers import Tower


class Critic(Component):
    """Predicts, at each position, the return of the response from there on."""

    output: Literal["bounded", "scalar"] = "bounded"
    """bounded: a sigmoid over the range that the evidence can give, trained by cross-entropy. scalar: linear, squared error."""

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"values"})

    def build(self, actor: PreTrainedModel, bounds: tuple[float, float]) -> Tower:
        """The torch module for this actor; bounds: least and greatest reward of a response."""
        raise NotImplementedError


critics: Registry[Critic] = Registry("critic", Critic)
