"""Gates that are a sigmoid of a statistic: `attention`, which is Comp-GAE's, three others by name, and `statistic` of any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from cct.rollout import Rollout
from cct.statistic import Concentration, HiddenChange, Statistic, TokenEntropy, TokenLogprob, statistics

from .base import Gate, gates

if TYPE_CHECKING:
    from torch import Tensor


class SigmoidGate(Gate):
    """A sigmoid of one statistic, `measured`, standardised by moments of earlier iterations."""

    low: float = Field(0.97, gt=0, le=1)
    """Lowest discount, approached where the statistic retains least credit."""
    high: float = Field(1.0, gt=0, le=1)
    """Highest discount, approached where the statistic retains most credit."""
    half_life: tuple[float, float] | None = None
    """The bounds as half-lives in tokens, (short, long), instead of low and high: g = 0.5^(1/h)."""
    slope: float = Field(1.0, gt=0, le=100)
    """Steepness of the sigmoid, per standard deviation of the statistic."""
    sign: Literal[1, -1] = 1
    """-1 reverses the gate: a control."""
    match_gamma: float | None = Field(None, gt=0, le=1)
    """Rescale the gate so that its mean logarithm over the batch equals that of this fixed discount."""

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
    """A sigmoid of any statistic: a token where it is large retains more credit, or less with `sign: -1`.

    A statistic that depends on the token itself, as `logprob` does, is read at the token before; the first token gets the
    middle of the gate.
    """

    of: Annotated[Statistic, statistics] = Concentration()
    """The statistic; one that depends on later tokens is refused, because a discount must not."""
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
    """A token emitted with concentrated attention retains more credit."""

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
    """A token drawn from a distribution of low entropy retains more credit."""

    rising: ClassVar[bool] = False

    @property
    def measured(self) -> Statistic:
        return TokenEntropy()


@gates.register("logprob")
class LogprobGate(SigmoidGate):
    """A token whose predecessor was likely retains more credit. Its own log-probability would depend on the token itself.

    The first token of a response has no sampled predecessor and gets the middle of the gate.
    """

    @property
    def measured(self) -> Statistic:
        return TokenLogprob()


@gates.register("hidden_change")
class HiddenChangeGate(SigmoidGate):
    """A token emitted from a hidden state close to the previous one retains more credit; a jump retains less."""

    distance: Literal["cosine", "relative"] = "cosine"
    """1 - cosine, or the norm of the difference over the norm of the earlier state."""
    layers: Literal["last_half", "last_quarter", "all"] | tuple[int, ...] = "last_half"
    """Layers averaged over."""

    rising: ClassVar[bool] = False

    @property
    def measured(self) -> Statistic:
        return HiddenChange(distance=self.distance, layers=self.layers)
