"""Gates that are made of other gates or of the position; then controls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from cct.rollout import Rollout

from .base import Gate, gates
from .sigmoid import AttentionGate, EntropyGate

if TYPE_CHECKING:
    from torch import Tensor


@gates.register("constant")
class ConstantGate(Gate):
    """Control: one discount for every token, which turns Comp-GAE into GAE; set directly, or matched to another gate's rate."""

    gamma: float | None = Field(None, gt=0, le=1)
    """The discount; null uses the geometric mean of the gate `of` over the batch."""
    of: Annotated[Gate, gates] | None = None
    """The gate whose rate is matched if gamma is null."""

    @model_validator(mode="after")
    def _one_rate(self) -> ConstantGate:
        if (self.gamma is None) == (self.of is None):
            raise ValueError("a constant gate has its rate either from gamma or from the gate `of`: set exactly one")
        return self

    @property
    def claims(self) -> frozenset[str]:
        return frozenset() if self.of else frozenset({"split"})

    @property
    def waives(self) -> dict[str, str]:
        return {**super().waives, "future": "a control: it has the rate of the whole batch"} if self.of else {}

    def __call__(self, rollout: Rollout) -> Tensor:
        from cct.tensors import at_least_float32

        from .functional import geometric_mean

        rate = geometric_mean(self.of.discounts(rollout), rollout.mask) if self.of else self.gamma
        assert rate is not None
        return at_least_float32(rollout.rewards).new_full(rollout.rewards.shape, rate)


@gates.register("profile")
class ProfileGate(Gate):
    """A fixed curve over the tokens since the response began; it reads nothing from the forward.

    The place is absolute, because how long a response will be is not known while it is written.
    """

    start: float = Field(0.97, gt=0, le=1)
    """Discount at the first token."""
    end: float = Field(1.0, gt=0, le=1)
    """Discount far into the response."""
    shape: Literal["exponential", "linear", "step"] = "exponential"
    """How the discount goes from start to end: exponentially with scale `tokens`, linearly over `tokens`, or in one step after
    `tokens`."""
    tokens: float = Field(32.0, gt=0, le=1e6)
    """The scale of the curve."""

    def __call__(self, rollout: Rollout) -> Tensor:
        from .functional import position_curve

        return position_curve(rollout.mask, self.start, self.end, self.shape, self.tokens)


@gates.register("turn")
class TurnGate(Gate):
    """One discount within a turn, and another where credit crosses into an earlier turn.

    The crossing is charged at a later turn's first token, since a turn's last token is known to be its last only afterwards.
    """

    within: float = Field(1.0, gt=0, le=1)
    """Discount at every other token."""
    boundary: float = Field(0.9, gt=0, le=1)
    """Discount at the first token of every turn but the first."""

    @property
    def waives(self) -> dict[str, str]:
        return {"gap": "a gap ends a turn"}

    def __call__(self, rollout: Rollout) -> Tensor:
        from cct.tensors import at_least_float32

        from .functional import turn_starts

        starts = turn_starts(rollout.mask)
        later = starts & (starts.long().cumsum(1) > 1)
        within = at_least_float32(rollout.rewards).new_full(rollout.rewards.shape, self.within)
        return within.masked_fill(later, self.boundary)


class _Several(Gate):
    """A gate made of others."""

    parts: list[Annotated[Gate, gates]] = Field(default=[AttentionGate(), EntropyGate()], min_length=1)
    """The gates."""


@gates.register("product")
class ProductGate(_Several):
    """The product of several gates: each one reduces the credit."""

    def __call__(self, rollout: Rollout) -> Tensor:
        import torch

        return torch.stack([gate.discounts(rollout) for gate in self.parts]).prod(0)


@gates.register("mixture")
class MixtureGate(_Several):
    """The weighted mean of several gates."""

    weights: list[Annotated[float, Field(gt=0, le=1e6)]] | None = None
    """One weight per gate, divided by their sum. Null weights all gates equally."""

    @model_validator(mode="after")
    def _one_each(self) -> MixtureGate:
        if self.weights is not None and len(self.weights) != len(self.parts):
            raise ValueError(f"{len(self.weights)} weights for {len(self.parts)} gates: give one for each, or null")
        return self

    def __call__(self, rollout: Rollout) -> Tensor:
        weights = self.weights or [1.0] * len(self.parts)
        parts = [weight / sum(weights) * gate.discounts(rollout) for weight, gate in zip(weights, self.parts, strict=True)]
        return sum(parts[1:], parts[0]).clamp(max=1.0)


class _Control(Gate):
    """A gate that keeps something of another one and destroys the rest."""

    breaks: ClassVar[dict[str, str]] = {}
    """What it waives besides `future`, and why."""

    of: Annotated[Gate, gates] = AttentionGate()
    """The gate it is a control of."""

    @property
    def waives(self) -> dict[str, str]:
        return {**super().waives, "future": "a control: it moves gates between tokens", **self.breaks}


@gates.register("shuffle")
class ShuffleGate(_Control):
    """Control: another gate's values, permuted within each response (which keeps their product)."""

    breaks = dict.fromkeys(("gap", "padding", "order"), "it draws for each row and position")

    def __call__(self, rollout: Rollout) -> Tensor:
        from .functional import shuffle_within

        return shuffle_within(self.of.discounts(rollout), rollout.mask, rollout.seed)


@gates.register("position")
class PositionGate(_Control):
    """Control: another gate's mean over the batch at the same relative position."""

    def __call__(self, rollout: Rollout) -> Tensor:
        from .functional import position_profile

        return position_profile(self.of.discounts(rollout), rollout.mask)


@gates.register("swap")
class SwapGate(_Control):
    """Control: another response's gates, stretched to this one's length."""

    breaks = {"order": "it uses the next row's gates"}

    def __call__(self, rollout: Rollout) -> Tensor:
        from .functional import swap_between

        return swap_between(self.of.discounts(rollout), rollout.mask)


@gates.register("random")
class RandomGate(_Control):
    """Control: values drawn independently from another gate's marginal distribution."""

    breaks = dict.fromkeys(("gap", "padding", "order"), "it draws for each row and position")

    def __call__(self, rollout: Rollout) -> Tensor:
        from .functional import draw_marginal

        return draw_marginal(self.of.discounts(rollout), rollout.mask, rollout.seed)
