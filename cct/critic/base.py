"""The Critic axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cct.registry import Component, Registry

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from cct.rollout import Rollout

    from .towers import Head, Tower


class Critic(Component):
    """Predicts, at each position, the return of the response from there on."""

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"values"})

    @property
    def bounded(self) -> bool:
        """Whether its values stay within the range of rewards that the evidence can give."""
        return False

    def build(self, actor: PreTrainedModel, bounds: tuple[float, float]) -> Tower:
        """The torch module for this actor; bounds: lowest and highest reward of a response."""
        raise NotImplementedError

    def baseline(self, rollout: Rollout, targets: Tensor, bounds: tuple[float, float]) -> Rollout | None:
        """The rollout with what the transport is to read instead of the critic's values; None for just these.

        targets: [B, T], the value targets that the transport gave to these values. bounds: as in `build`.
        """
        return None


class SingleCritic(Critic):
    """A critic with one output per position, and the choice of its kind."""

    output: Literal["bounded", "scalar", "hl_gauss", "two_hot"] = "bounded"
    """bounded: a sigmoid over the range of rewards that the evidence can give, trained by cross-entropy. scalar: linear,
    trained by squared error. hl_gauss, two_hot: a distribution over bins of that range, trained towards a normal distribution
    around the target (Farebrother et al. 2024) or the target's two neighbouring bins (MuZero, DreamerV3)."""
    bins: int = Field(51, ge=2, le=4096)
    """Number of bins of hl_gauss and two_hot, from the lowest to the highest reward; hl_gauss adds three beyond each end."""
    value_clip: float | None = Field(None, gt=0, le=1000)
    """PPO2's value clipping: a value that has moved farther than this, in units of reward, since the responses were sampled
    gets no gradient, unless it moved in the wrong direction. Null: no clipping. Clipping slows the critic."""

    @property
    def unread(self) -> dict[str, str]:
        return {} if self.output in ("hl_gauss", "two_hot") else {"bins": f"output: {self.output} has none"}

    @property
    def bounded(self) -> bool:
        return self.output != "scalar"

    def head(self, bounds: tuple[float, float]) -> Head:
        """The torch side of these knobs."""
        from .towers import make_head

        return make_head(self.output, bounds, bins=self.bins, value_clip=self.value_clip)


critics: Registry[Critic] = Registry("critic", Critic)
