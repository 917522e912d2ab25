"""Gates: per-token discounts. `attention` is Comp-GAE's; the others are its controls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from cct.rollout import Concentration, Rollout

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
    def needs(self) -> frozenset[str]:
        return self.of.needs if self.of else frozenset()

    @property
    def statistics(self) -> dict[str, Concentration]:
        return self.of.statistics if self.of else {}

    @property
    def claims(self) -> frozenset[str]:
        return frozenset() if self.of else frozenset({"split"})

    @property
    def waives(self) -> dict[str, str]:
        return {**self.of.waives, "future": "a control: it has the rate of the whole batch"} if self.of else {}

    def __call__(self, rollout: Rollout) -> Tensor:
        from .functional import geometric_mean

        rate = geometric_mean(self.of(rollout), rollout.mask) if self.of else self.gamma
        assert rate is not None
        return rollout.rewards.new_full(rollout.rewards.shape, rate)


@gates.register("attention")
class AttentionGate(Gate):
    """Concentrated attention of the query that emits a token retains more credit."""

    statistic: Literal["shannon", "renyi2"] = "shannon"
    """Entropy behind the concentration, 1 - H / log n."""
    layers: Literal["last_half", "last_quarter", "all"] | tuple[int, ...] = "last_half"
    """Layers averaged over."""
    sinks: int = Field(0, ge=0, le=64)
    """Leading keys left out of the statistic."""
    low: float = Field(0.97, gt=0, le=1)
    """Discount where attention is most spread."""
    high: float = Field(1.0, gt=0, le=1)
    """Discount where attention is most concentrated."""
    half_life: tuple[float, float] | None = None
    """The bounds as half-lives in tokens, (short, long), in place of low and high: g = 0.5^(1/h)."""
    slope: float = Field(1.0, gt=0, le=100)
    """Steepness of the sigmoid, per standard deviation of the statistic."""
    sign: Literal[1, -1] = 1
    """-1 lets spread attention retain more: a control."""
    match_gamma: float | None = Field(None, gt=0, le=1)
    """Rescale so that the batch's mean log-gate is that of this fixed discount."""

    @model_validator(mode="after")
    def _bounds(self) -> AttentionGate:
        if self.half_life and not 0 < self.half_life[0] <= self.half_life[1]:
            raise ValueError(f"half_life must be (short, long) with 0 < short <= long; got {self.half_life}")
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) must not exceed high ({self.high}); `sign: -1` reverses the gate")
        return self

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"attention"})

    @property
    def _concentration(self) -> Concentration:
        return Concentration(statistic=self.statistic, layers=self.layers, sinks=self.sinks)

    @property
    def _name(self) -> str:
        layers = self.layers if isinstance(self.layers, str) else "+".join(map(str, self.layers))
        return f"concentration/{self.statistic}/{layers}/{self.sinks}"

    @property
    def statistics(self) -> dict[str, Concentration]:
        return {self._name: self._concentration}

    @property
    def claims(self) -> frozenset[str]:
        return frozenset() if self.match_gamma else frozenset({"split"})

    @property
    def waives(self) -> dict[str, str]:
        return {"future": "match_gamma rescales by the mean of the whole batch"} if self.match_gamma else {}

    def __call__(self, rollout: Rollout) -> Tensor:
        from .functional import masked_mean_std, match_mean_log, sigmoid_gate

        concentration = rollout.stats[self._name].detach()
        mean, std = rollout.moments.get(self._name) or [float(x) for x in masked_mean_std(concentration, rollout.mask)]
        low, high = [0.5 ** (1 / h) for h in self.half_life] if self.half_life else (self.low, self.high)
        gate = sigmoid_gate(concentration, mean, std, low, high, self.sign * self.slope)
        return match_mean_log(gate, rollout.mask, self.match_gamma) if self.match_gamma else gate


class _Control(Gate):
    """A gate that keeps something of another one and destroys the rest."""

    breaks: ClassVar[dict[str, str]] = {}
    """What it waives besides `future`, and why."""

    of: Annotated[Gate, gates] = AttentionGate()
    """The gate it is a control of."""

    @property
    def waives(self) -> dict[str, str]:
        return {**self.of.waives, "future": "a control: it moves gates between tokens", **self.breaks}

    @property
    def needs(self) -> frozenset[str]:
        return self.of.needs

    @property
    def statistics(self) -> dict[str, Concentration]:
        return self.of.statistics


@gates.register("shuffle")
class ShuffleGate(_Control):
    """Control: another gate's values, permuted within each response (which keeps their product)."""

    breaks = dict.fromkeys(("gap", "padding", "order"), "it draws for each row and position")

    def __call__(self, rollout: Rollout) -> Tensor:
        from .functional import shuffle_within

        return shuffle_within(self.of(rollout), rollout.mask, rollout.seed)


@gates.register("position")
class PositionGate(_Control):
    """Control: another gate's mean over the batch at the same relative position."""

    def __call__(self, rollout: Rollout) -> Tensor:
        from .functional import position_profile

        return position_profile(self.of(rollout), rollout.mask)


@gates.register("swap")
class SwapGate(_Control):
    """Control: another response's gates, stretched to this one's length."""

    breaks = {"order": "it takes the next row's gates"}

    def __call__(self, rollout: Rollout) -> Tensor:
        from .functional import swap_between

        return swap_between(self.of(rollout), rollout.mask)


@gates.register("random")
class RandomGate(_Control):
    """Control: values drawn independently from another gate's marginal distribution."""

    breaks = dict.fromkeys(("gap", "padding", "order"), "it draws for each row and position")

    def __call__(self, rollout: Rollout) -> Tensor:
        from .functional import draw_marginal

        return draw_marginal(self.of(rollout), rollout.mask, rollout.seed)
