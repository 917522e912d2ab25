"""Gates: per-token discounts. `attention` is Comp-GAE's, others read other statistics or are made of gates; then controls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from cct.rollout import Rollout
from cct.statistic import Concentration, HiddenChange, Statistic, TokenEntropy, TokenLogprob, statistics

from .base import Gate, gates

if TYPE_CHECKING:
    from torch import Tensor


@gates.register("constant")
class ConstantGate(Gate):
    """Control: the same discount at every token, which makes Comp-GAE GAE; given, or rate-matched to another gate."""

    gamma: float | None = Field(None, gt=0, le=1)
    """The discount; null takes the geometric mean of the gate `of` over the batch."""
    of: Annotated[Gate, gates] | None = None
    """The gate whose rate it takes, where gamma is null."""

    @model_validator(mode="after")
    def _one_rate(self) -> ConstantGate:
        if (self.gamma is None) == (self.of is None):
            raise ValueError("a constant gate takes its rate either from gamma or from the gate `of`: give exactly one")
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


class SigmoidGate(Gate):
    """A sigmoid of one statistic, `measured`, standardised by moments of earlier iterations."""

    low: float = Field(0.97, gt=0, le=1)
    """Least discount, approached at the end of the statistic that retains least."""
    high: float = Field(1.0, gt=0, le=1)
    """Greatest discount, approached at the other end."""
    half_life: tuple[float, float] | None = None
    """The bounds as half-lives in tokens, (short, long), in place of low and high: g = 0.5^(1/h)."""
    slope: float = Field(1.0, gt=0, le=100)
    """Steepness of the sigmoid, per standard deviation of the statistic."""
    sign: Literal[1, -1] = 1
    """-1 reverses the gate: a control."""
    match_gamma: float | None = Field(None, gt=0, le=1)
    """Rescale so that the batch's mean log-gate is that of this fixed discount."""

    rising: ClassVar[bool] = True
    """Whether a larger statistic retains more, where sign is 1."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.half_life and not 0 < self.half_life[0] <= self.half_life[1]:
            raise ValueError(f"half_life must be (short, long) with 0 < short <= long; got {self.half_life}")
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) must not exceed high ({self.high}); `sign: -1` reverses the gate")
        return self

    @property
    def unread(self) -> dict[str, str]:
        return dict.fromkeys(("low", "high"), "half_life gives the bounds") if self.half_life else {}

    @property
    def measured(self) -> Statistic:
        """The statistic. One that depends on the token itself is read one token later."""
        raise NotImplementedError

    @property
    def statistics(self) -> dict[str, Statistic]:
        return {self.measured.name: self.measured}

    @property
    def claims(self) -> frozenset[str]:
        return frozenset() if self.match_gamma else frozenset({"split"})

    @property
    def waives(self) -> dict[str, str]:
        return {"future": "match_gamma rescales by the mean of the whole batch"} if self.match_gamma else {}

    def __call__(self, rollout: Rollout) -> Tensor:
        from .functional import masked_mean_std, match_mean_log, previous_step, sigmoid_gate

        what, mask = self.measured, rollout.mask
        known = rollout.stats[what.name].detach()
        mean, std = rollout.moments.get(what.name) or [float(x) for x in masked_mean_std(known, mask)]
        if what.knows == "token":
            known = previous_step(known, mask, first=mean)
        low, high = [0.5 ** (1 / h) for h in self.half_life] if self.half_life else (self.low, self.high)
        slope = self.sign * self.slope * (1 if self.rising else -1)
        gate = sigmoid_gate(known, mean, std, low, high, slope)
        return match_mean_log(gate, mask, self.match_gamma) if self.match_gamma else gate


@gates.register("statistic")
class StatisticGate(SigmoidGate):
    """A sigmoid of any statistic: a token at which it is large retains more credit, with `sign: -1` less.

    A statistic that depends on the token itself, as `logprob` does, is read at the token before; the first token gets the
    middle of the gate.
    """

    of: Annotated[Statistic, statistics] = Concentration()
    """The statistic. One that depends on later tokens is refused: a discount must not."""
    sign: Literal[1, -1] = 1
    """1: a larger statistic retains more. -1: a smaller one does."""

    @model_validator(mode="after")
    def _knows_no_later_token(self) -> Self:
        if self.of.knows == "response":
            able = [name for name in statistics.names() if statistics[name].knows != "response"]
            raise ValueError(
                f"statistic '{self.of.use}' depends on later tokens, which a discount must not; these do not: {', '.join(able)}"
            )
        return self

    @property
    def measured(self) -> Statistic:
        return self.of


@gates.register("attention")
class AttentionGate(SigmoidGate):
    """Concentrated attention of the query that emits a token retains more credit."""

    statistic: Literal["shannon", "renyi2", "max"] = "shannon"
    """The concentration: 1 - H / log n of an entropy, or the largest attention probability."""
    layers: Literal["last_half", "last_quarter", "all"] | tuple[int, ...] = "last_half"
    """Layers averaged over."""
    heads: Literal["all"] | tuple[Annotated[int, Field(ge=0)], ...] = "all"
    """Query heads averaged over, the same in every layer."""
    sinks: int = Field(0, ge=0, le=64)
    """Leading keys left out of the statistic."""

    @property
    def measured(self) -> Statistic:
        return Concentration(statistic=self.statistic, layers=self.layers, sinks=self.sinks, heads=self.heads)


@gates.register("entropy")
class EntropyGate(SigmoidGate):
    """Tokens that the policy is sure about, by the entropy of the distribution they are drawn from, retain more credit."""

    rising: ClassVar[bool] = False

    @property
    def measured(self) -> Statistic:
        return TokenEntropy()


@gates.register("logprob")
class LogprobGate(SigmoidGate):
    """A token whose predecessor was likely retains more credit. The token's own log-probability would know the token.

    The first token of a response has no sampled predecessor and gets the middle of the gate.
    """

    @property
    def measured(self) -> Statistic:
        return TokenLogprob()


@gates.register("hidden_change")
class HiddenChangeGate(SigmoidGate):
    """A token emitted from a hidden state close to the one before retains more credit; a jump holds it up."""

    distance: Literal["cosine", "relative"] = "cosine"
    """1 - cosine, or the norm of the difference over the norm of the earlier state."""
    layers: Literal["last_half", "last_quarter", "all"] | tuple[int, ...] = "last_half"
    """Layers averaged over."""

    rising: ClassVar[bool] = False

    @property
    def measured(self) -> Statistic:
        return HiddenChange(distance=self.distance, layers=self.layers)


@gates.register("profile")
class ProfileGate(Gate):
    """A fixed curve over the tokens since the response began: nothing is learnt, nothing of the forward is read.

    The place is absolute, because how long a response will be is not known while it is written.
    """

    start: float = Field(0.97, gt=0, le=1)
    """Discount at the first token."""
    end: float = Field(1.0, gt=0, le=1)
    """Discount far into the response."""
    shape: Literal["exponential", "linear", "step"] = "exponential"
    """From start to end: closer by a factor e every `tokens`, evenly over `tokens`, or at once after `tokens`."""
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
    """The product of several gates: each takes its share of the credit."""

    def __call__(self, rollout: Rollout) -> Tensor:
        import torch

        return torch.stack([gate.discounts(rollout) for gate in self.parts]).prod(0)


@gates.register("mixture")
class MixtureGate(_Several):
    """The weighted mean of several gates."""

    weights: list[Annotated[float, Field(gt=0, le=1e6)]] | None = None
    """One for each gate; they are divided by their sum. null weighs all alike."""

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

    breaks = {"order": "it takes the next row's gates"}

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
