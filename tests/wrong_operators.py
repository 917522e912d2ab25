"""Wrong operators: real ones with one thing changed. Each stands beside the property that catches it, and a part of the reason.

Made part by part: flip a sign, drop a term, shift by one, take the wrong mask or denominator, compute in half, keep state.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import ClassVar

import torch
from pydantic import PrivateAttr
from torch import Tensor, nn

from cct.critic import Critic
from cct.critic.towers import Head, Tower
from cct.evidence import Evidence
from cct.geometry import Geometry
from cct.registry import Component
from cct.rollout import Credit, Rollout
from cct.statistic import Statistic, TokenEntropy
from cct.transport import Gate, Transport, gated_gae, group_advantage
from cct.transport.functional import join

FAULTS: list[tuple[type[Component], str, str]] = []


def fault(name: str, says: str):
    """Plant it: the property that it breaks, and a part of the reason."""

    def add(cls: type[Component]) -> type[Component]:
        FAULTS.append((cls, name, says))
        return cls

    return add


def on_steps(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(~mask, 0.0)


def last_steps(mask: Tensor) -> Tensor:
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)


def neighbours(x: Tensor, mask: Tensor, by: int) -> Tensor:
    """x at the step `by` steps further on, 0 beyond the ends."""
    packed = (~mask).long().sort(dim=1, stable=True).indices
    place, count = mask.long().cumsum(1) - 1 + by, mask.sum(1, keepdim=True)
    found = x.gather(1, packed).gather(1, place.clamp(0, mask.shape[1] - 1))
    return found.masked_fill(~mask | (place < 0) | (place >= count), 0.0)


# --- GAE ------------------------------------------------------------------------------------------
class _GAE(Transport):
    """GAE, whose inputs and outputs the others change."""

    needs: ClassVar = frozenset({"values"})
    gamma: float = 0.9
    """As GAE's."""

    def gae(self, rollout: Rollout, gamma: float | None = None) -> tuple[Tensor, Tensor]:
        assert rollout.values is not None
        gamma = self.gamma if gamma is None else gamma
        return gated_gae(rollout.rewards, rollout.values, rollout.mask, gamma=gamma, lam=0.8, bootstrap=rollout.bootstrap)

    def __call__(self, rollout: Rollout) -> Credit:
        return self.changed(rollout, *self.gae(rollout))

    def changed(self, rollout: Rollout, advantages: Tensor, targets: Tensor) -> Credit:
        raise NotImplementedError


@fault("bootstrap", "do not depend on rollout.bootstrap")
class IgnoresBootstrap(_GAE):
    def __call__(self, rollout):
        return Credit(*self.gae(rollout.replace(bootstrap=None)))


@fault("bootstrap", "advantages of a response that the length limit cut")
class IgnoresBootstrapInAdvantages(_GAE):
    def changed(self, rollout, advantages, targets):
        return Credit(self.gae(rollout.replace(bootstrap=None))[0], targets)


@fault("bootstrap", "value_targets of a response that the length limit cut")
class IgnoresBootstrapInTargets(_GAE):
    def changed(self, rollout, advantages, targets):
        return Credit(advantages, self.gae(rollout.replace(bootstrap=None))[1])


@fault("bootstrap", "the wrong way")
class BootstrapsBackwards(_GAE):
    def __call__(self, rollout):
        return Credit(*self.gae(rollout.replace(bootstrap=-rollout.bootstrap)))


@fault("targets", "not of one kernel")
class TargetsAreAdvantages(_GAE):
    def changed(self, rollout, advantages, targets):
        return Credit(advantages, advantages)


@fault("targets", "not of one kernel")
class TargetsOfTheNextToken(_GAE):
    def changed(self, rollout, advantages, targets):
        return Credit(advantages, neighbours(targets, rollout.mask, 1) + last_steps(rollout.mask) * targets)


@fault("targets", "not of one kernel")
class TargetsOfTheTokenBefore(_GAE):
    def changed(self, rollout, advantages, targets):
        first = rollout.mask & (rollout.mask.long().cumsum(1) == 1)
        return Credit(advantages, neighbours(targets, rollout.mask, -1) + first * targets)


@fault("targets", "not of one kernel")
class TargetsWithoutDiscount(_GAE):
    def changed(self, rollout, advantages, targets):
        return Credit(advantages, self.gae(rollout, 1.0)[1])


@fault("targets", "not of one kernel")
class TargetsHalved(_GAE):
    def changed(self, rollout, advantages, targets):
        return Credit(advantages, targets / 2)


@fault("targets", "not of one kernel")
class TargetsLeaveOutLaterRewards(_GAE):
    """One step, whatever the advantage looks at; right by itself, and scaled."""

    def changed(self, rollout, advantages, targets):
        return Credit(advantages, 0.5 * (targets + on_steps(rollout.values, rollout.mask)))


@fault("targets", "not of one kernel")
class AddsTheValue(_GAE):
    """The critic's sign is flipped."""

    def __call__(self, rollout):
        advantages, targets = self.gae(rollout)
        return Credit(advantages + 2 * on_steps(rollout.values, rollout.mask), targets)


@fault("targets", "not of one kernel")
class ValueOfTheNextToken(_GAE):
    """Off by one: the baseline is V of the state after the token."""

    def changed(self, rollout, advantages, targets):
        values = on_steps(rollout.values, rollout.mask)
        return Credit(advantages + values - neighbours(values, rollout.mask, 1), targets)


@fault("better", "the better one gets less")
class NegatesTruncated(_GAE):
    def changed(self, rollout, advantages, targets):
        return Credit(torch.where(rollout.truncated.unsqueeze(1), -1.0, 1.0).to(advantages.dtype) * advantages, targets)


@fault("better", "the better one gets less")
class NegatesTheFirstToken(_GAE):
    def changed(self, rollout, advantages, targets):
        first = rollout.mask & (rollout.mask.long().cumsum(1) == 1)
        return Credit(torch.where(first, -advantages, advantages), targets)


@fault("better", "the better one gets less")
class NegatesTheLastToken(_GAE):
    def changed(self, rollout, advantages, targets):
        return Credit(torch.where(last_steps(rollout.mask), -advantages, advantages), targets)


@fault("better", "the better one gets less")
class NegatesNegativeAdvantages(_GAE):
    def changed(self, rollout, advantages, targets):
        return Credit(advantages.abs(), targets)


@fault("precision", "it computes in torch.float16")
class GAEInHalf(_GAE):
    def __call__(self, rollout):
        low = rollout.replace(rewards=rollout.rewards.half(), values=rollout.values.half())
        return Credit(*(x.to(rollout.rewards.dtype) for x in self.gae(low)))


@fault("precision", "it computes in torch.bfloat16")
class RoundsAdvantages(_GAE):
    def changed(self, rollout, advantages, targets):
        return Credit(advantages.bfloat16().to(advantages.dtype), targets)


@fault("garbage", "garbage in must be NaN out")
class CleansItsInputs(_GAE):
    def __call__(self, rollout):
        return Credit(*self.gae(rollout.replace(rewards=rollout.rewards.nan_to_num(0.0))))


@fault("garbage", "garbage in must be NaN out")
class CleansItsOutputs(_GAE):
    def changed(self, rollout, advantages, targets):
        return Credit(advantages.nan_to_num(0.0), targets.nan_to_num(0.0))


@fault("garbage", "values[")
class CleansTheValues(_GAE):
    def __call__(self, rollout):
        return Credit(*self.gae(rollout.replace(values=rollout.values.where(rollout.values.isfinite(), 0.0))))


@fault("needs", "without what its `needs` and `statistics` do not name")
class CriticUnasked(_GAE):
    needs: ClassVar = frozenset()

    def changed(self, rollout, advantages, targets):
        return Credit(advantages, targets)


@fault("needs", "without what its `needs` and `statistics` do not name")
class StatisticUnasked(_GAE):
    def changed(self, rollout, advantages, targets):
        return Credit(advantages * (1 + on_steps(rollout.stats["value_disagreement"], rollout.mask)), targets)


@fault("form", "no value_targets")
class NoTargets(_GAE):
    def changed(self, rollout, advantages, targets):
        return Credit(advantages)


@fault("determinism", "called again")
class RunningMean(_GAE):
    """A baseline that moves with every call."""

    mean: ClassVar[list[float]] = [0.0]

    def changed(self, rollout, advantages, targets):
        self.mean[0] = 0.9 * self.mean[0] + 0.1 * float(rollout.scores.sum()) + 0.01
        return Credit((advantages - self.mean[0]).masked_fill(~rollout.mask, 0.0), targets)


@fault("determinism", "of another instance")
class RemembersItsFirstBatch(_GAE):
    _scale: float | None = PrivateAttr(None)

    def changed(self, rollout, advantages, targets):
        if self._scale is None:
            self._scale = 1.0 + float(advantages.abs().sum())
        return Credit(advantages / self._scale, targets)


@fault("determinism", "draws from a global generator")
class Jitter(_GAE):
    def changed(self, rollout, advantages, targets):
        return Credit((advantages + 0.1 * torch.randn(advantages.shape)).masked_fill(~rollout.mask, 0.0), targets)


@fault("determinism", "called again")
class OwnGenerator(_GAE):
    """Seeded, once."""

    generator: ClassVar = torch.Generator().manual_seed(0)

    def changed(self, rollout, advantages, targets):
        noise = torch.rand(advantages.shape, generator=self.generator)
        return Credit((advantages + noise).masked_fill(~rollout.mask, 0.0), targets)


@fault("determinism", "called again")
class Ages(_GAE):
    """What it gives depends on the day."""

    def changed(self, rollout, advantages, targets):
        return Credit(advantages * (1 + time.time() // 3600 % 7), targets)


@fault("determinism", "it wrote into rollout.stats")
class WritesAStatistic(_GAE):
    def changed(self, rollout, advantages, targets):
        rollout.stats["mine"] = advantages
        return Credit(advantages, targets)


@fault("determinism", "it wrote into rollout.values")
class WritesValues(_GAE):
    def __call__(self, rollout):
        rollout.values.mul_(0.5)
        return Credit(*self.gae(rollout))


@fault("determinism", "it changes torch's default type")
class LeavesDoubleBehind(_GAE):
    def changed(self, rollout, advantages, targets):
        torch.set_default_dtype(torch.float64)
        return Credit(advantages, targets)


@fault("padding", "more positions of padding")
class DividesByTheWidth(_GAE):
    def changed(self, rollout, advantages, targets):
        return Credit(advantages / rollout.mask.shape[1], targets)


@fault("gap", "with the gaps removed")
class CountsPositions(_GAE):
    """Masked ones too, from the first token on."""

    def changed(self, rollout, advantages, targets):
        place = torch.arange(rollout.mask.shape[1]) - rollout.mask.int().argmax(1, keepdim=True)
        return Credit(advantages / (1 + place.clamp(min=0)), targets)


# --- the group ------------------------------------------------------------------------------------
class _Group(Transport):
    """GRPO without the deviation, whose score the others change."""

    needs: ClassVar = frozenset({"groups"})

    def relative(self, rollout: Rollout) -> Tensor:
        return group_advantage(rollout.scores, rollout.groups, scale="none", valid=rollout.valid)

    def __call__(self, rollout: Rollout) -> Credit:
        return Credit(self.outcome(rollout).unsqueeze(1) * rollout.mask)

    def outcome(self, rollout: Rollout) -> Tensor:
        raise NotImplementedError


@fault("better", "the better one gets less")
class NegatesFailures(_Group):
    def outcome(self, rollout):
        found = self.relative(rollout)
        return torch.where(rollout.scores > 0, found, -found)


@fault("better", "the better one gets less")
class NegatesBelowTheMean(_Group):
    def outcome(self, rollout):
        return self.relative(rollout).abs()


@fault("better", "the better one gets less")
class RewardsTheWorst(_Group):
    def outcome(self, rollout):
        return -self.relative(rollout)


@fault("better", "the better one gets less")
class SquaresTheScore(_Group):
    def outcome(self, rollout):
        return group_advantage(rollout.scores.square(), rollout.groups, scale="none", valid=rollout.valid)


@fault("better", "the better one gets less")
class FallsBeyondOne(_Group):
    """A success of more than 1 is taken for an outlier."""

    def outcome(self, rollout):
        return group_advantage(
            rollout.scores.masked_fill(rollout.scores > 1, 0.0), rollout.groups, scale="none", valid=rollout.valid
        )


@fault("equal", "with the same reward for every response of a group")
class BaselineOfTheBatch(_Group):
    def outcome(self, rollout):
        valid = rollout.valid
        mean = rollout.scores.masked_fill(~valid, 0.0).sum() / valid.sum().clamp(min=1)
        return (rollout.scores - mean).masked_fill(~valid, 0.0)


@fault("dropped", "with a dropped response added")
class CountsTheDropped(_Group):
    def outcome(self, rollout):
        return group_advantage(rollout.scores, rollout.groups, scale="none")


@fault("garbage", "rewards[")
class IgnoresBrokenScores(_Group):
    def outcome(self, rollout):
        return self.relative(rollout).nan_to_num(0.0)


@fault("precision", "it computes in torch.float16")
class ScoresInHalf(_Group):
    def outcome(self, rollout):
        return group_advantage(
            rollout.scores.half().to(rollout.rewards.dtype), rollout.groups, scale="none", valid=rollout.valid
        )


@fault("determinism", "called again")
class BestSoFar(_Group):
    best: ClassVar[Counter] = Counter()

    def outcome(self, rollout):
        self.best["score"] += 1
        return self.relative(rollout) / self.best["score"]


@fault("order", "in the order")
class Neighbours(_Group):
    """Takes two rows for a group."""

    def outcome(self, rollout):
        found = self.relative(rollout)
        return found + 0.1 * found.roll(1)

    waives: ClassVar = {"better": "not what this one is about", "dropped": "nor this"}


# --- episodes -------------------------------------------------------------------------------------
class _AsItComes(Transport):
    """Takes rows as they come, in place of episodes."""

    def checked(self, rollout: Rollout) -> Credit:
        return self(rollout)


@fault("cut", "with a row for each turn, advantages is")
class RowsAreEpisodes(_AsItComes, _Group):
    """A row counts as an episode in the baseline, and its rewards as the outcome."""

    def outcome(self, rollout):
        return self.relative(rollout)


@fault("cut", "with a row for each turn, advantages is")
class CountsAnEpisodeByItsRows(_Group):
    """The outcome is the episode's, and the baseline counts it once for each of its rows."""

    def checked(self, rollout):
        joined, split = join(rollout)
        if split is None:
            return self(rollout)
        scores = joined.scores[split.episode]
        advantages = group_advantage(scores, rollout.groups, scale="none", valid=joined.valid[split.episode])
        return Credit(advantages.unsqueeze(1) * rollout.mask)

    def outcome(self, rollout):
        return self.relative(rollout)


@fault("cut", "with a row for each turn, advantages is")
class TraceEndsAtACut(_AsItComes, _GAE):
    def changed(self, rollout, advantages, targets):
        return Credit(advantages, targets)


@fault("cut", "with a row for each turn, advantages is")
class BootstrapsAtACut(_GAE):
    """Each row goes on with the value at the start of the next, and its trace ends."""

    def checked(self, rollout):
        if join(rollout)[1] is None:
            return self(rollout)
        first = rollout.mask.int().argmax(1, keepdim=True)
        starts = rollout.values.gather(1, first).squeeze(1)
        follows = (rollout.episodes.unsqueeze(1) == rollout.episodes) & (rollout.order.unsqueeze(1) + 1 == rollout.order)
        next_value = torch.where(follows.any(1), starts[follows.int().argmax(1)], rollout.bootstrap)
        return self(rollout.replace(bootstrap=next_value))

    def changed(self, rollout, advantages, targets):
        return Credit(advantages, targets)


@fault("cut", "backwards, advantages is")
class RowsAsTheyLie(_GAE):
    """Rows of an episode follow each other as they lie in the batch."""

    def checked(self, rollout):
        return super().checked(rollout if rollout.episodes is None else rollout.replace(order=torch.arange(len(rollout.mask))))

    def changed(self, rollout, advantages, targets):
        return Credit(advantages, targets)


@fault("cut", "value_targets is")
class TargetsOfTheRow(_GAE):
    """Advantages of the episode, and value targets of the row."""

    def checked(self, rollout):
        return Credit(super().checked(rollout).advantages, self(rollout).value_targets)

    def changed(self, rollout, advantages, targets):
        return Credit(advantages, targets)


@fault("observation", "with every gap four times as long")
class ObservationsDecay(_Group):
    """A turn's credit halves with every token of an observation after it."""

    waives: ClassVar = {"gap": "a gap ends a turn"}

    def __call__(self, rollout):
        between = ~rollout.mask & (rollout.mask.flip(1).cumsum(1).flip(1) > 0)
        return Credit(self.relative(rollout).unsqueeze(1) * 0.5 ** between.flip(1).cumsum(1).flip(1) * rollout.mask)


@fault("noise", "at masked positions")
class ObservationsAreRewarded(_GAE):
    """What an environment's output was given counts for the turn before it."""

    def __call__(self, rollout):
        before = torch.nn.functional.pad(rollout.rewards.masked_fill(rollout.mask, 0.0), (0, 1))[:, 1:]
        return Credit(*self.gae(rollout.replace(rewards=rollout.rewards + before)))


@fault("noise", "at masked positions")
class ObservationsHaveValues(_GAE):
    """A turn goes on with the value read in the observation after it."""

    def __call__(self, rollout):
        advantages, targets = self.gae(rollout)
        there = torch.nn.functional.pad(rollout.values.masked_fill(rollout.mask, 0.0), (0, 1))[:, 1:]
        return Credit((advantages + there).masked_fill(~rollout.mask, 0.0), targets)


# --- gates ----------------------------------------------------------------------------------------
class _Gate(Gate):
    """1 / (1 + H), whose entropy the others change."""

    def of(self, entropy: Tensor) -> Tensor:
        return 1 / (1 + entropy)


@fault("form", "the gate leaves [0, 1]")
class EntropyAsItIs(_Gate):
    """In [0, 1] as long as no entropy exceeds one nat."""

    statistics: ClassVar = {"mine": TokenEntropy()}

    def __call__(self, rollout):
        return rollout.stats["mine"]


@fault("form", "the gate leaves [0, 1]")
class Two(_Gate):
    def __call__(self, rollout):
        return torch.full_like(rollout.rewards, 2.0)


@fault("form", "the gate leaves [0, 1]")
class MinusOne(_Gate):
    def __call__(self, rollout):
        return 1 - 2 * self.of(rollout.stats["entropy"])


@fault("precision", "it computes in torch.float16")
class GateInHalf(_Gate):
    def __call__(self, rollout):
        return self.of(rollout.stats["entropy"].half()).to(rollout.rewards.dtype)


@fault("garbage", "entropy[")
class OpensOnNaN(_Gate):
    def __call__(self, rollout):
        return self.of(rollout.stats["entropy"]).nan_to_num(1.0)


@fault("future", "the number of later tokens")
class KnowsTheCut(_Gate):
    def __call__(self, rollout):
        return torch.where(rollout.truncated.unsqueeze(1), 1.0, self.of(rollout.stats["entropy"]))


@fault("future", "the rewards")
class KnowsTheReward(_Gate):
    def __call__(self, rollout):
        return self.of(rollout.stats["entropy"]) * torch.sigmoid(rollout.scores).unsqueeze(1)


@fault("future", "later tokens")
class MeanOfTheResponse(_Gate):
    def __call__(self, rollout):
        entropy = on_steps(rollout.stats["entropy"], rollout.mask)
        mean = entropy.sum(1, keepdim=True) / rollout.mask.sum(1, keepdim=True).clamp(min=1)
        return self.of(mean).expand_as(entropy)


@fault("needs", "without what its `needs` and `statistics` do not name")
class ReadsTheCritic(_Gate):
    def __call__(self, rollout):
        return (1 / (1 + rollout.values.clamp(min=0))).to(rollout.rewards.dtype)


@fault("dropped", "with a dropped response added")
class ShareOfTheBatch(_Gate):
    def __call__(self, rollout):
        return torch.full_like(rollout.rewards, 1 / (1 + len(rollout.mask)))


@fault("order", "in the order")
class ByTheRow(_Gate):
    def __call__(self, rollout):
        return (1 / (1 + torch.arange(len(rollout.mask))).unsqueeze(1).expand_as(rollout.rewards)).to(rollout.rewards.dtype)


@fault("determinism", "called again")
class Warms(_Gate):
    calls: ClassVar[list[int]] = [0]

    def __call__(self, rollout):
        self.calls[0] += 1
        return self.of(rollout.stats["entropy"]) / self.calls[0]


@fault("determinism", "it wrote into rollout.moments")
class KeepsItsMoments(_Gate):
    def __call__(self, rollout):
        rollout.moments["mine"] = (0.0, 1.0)
        return self.of(rollout.stats["entropy"])


class OfTheToken(Statistic):
    def measure(self, forward):
        return forward.emitted(forward.input_ids).float()


class OfThePosition(Statistic):
    def measure(self, forward):
        return forward.emitting(torch.arange(forward.input_ids.shape[1]).expand_as(forward.input_ids)).float()


@fault("determinism", "called again")
class OfChance(Statistic):
    count: ClassVar = itertools.count()

    def measure(self, forward):
        return forward.entropy + next(self.count)


@fault("form", "not finite")
class LogOfZero(Statistic):
    def measure(self, forward):
        return (forward.emitting(forward.input_ids) - 3).float().log()


@fault("known", "with other tokens from 0 on")
class KnowsTheToken(Statistic):
    def measure(self, forward):
        return forward.logprobs


@fault("known", "with other tokens")
class KnowsTheNextToken(Statistic):
    knows = "token"

    def measure(self, forward):
        return forward.emitted(forward.input_ids).float().roll(-1, 1)


@fault("padding", "positions of padding")
class MeasuresPositions(OfThePosition):
    pass


@fault("split", "alone in a forward")
class ComparesResponses(Statistic):
    knows = "response"

    def measure(self, forward):
        return forward.entropy - forward.entropy.mean()


class _Measures(_Gate):
    what: ClassVar[Statistic]

    @property
    def statistics(self):
        return {"mine": self.what}

    def __call__(self, rollout):
        return self.of(rollout.stats["mine"])


@fault("measured", "with other tokens from 0 on")
class MeasuresItsOwnToken(_Measures):
    what: ClassVar = OfTheToken()


@fault("measured", "positions of padding before the prompts")
class MeasuresThePadding(_Measures):
    what: ClassVar = OfThePosition()


# --- geometries -----------------------------------------------------------------------------------
class _PPO(Geometry):
    """PPO's clip, of which the others change a part."""

    def surrogate(self, logprobs, old_logprobs, advantages, mask, marked):
        advantages = on_steps(advantages, mask)
        ratio = (on_steps(logprobs, mask) - on_steps(old_logprobs, mask)).clamp(-20, 20).exp()
        return -self.objective(ratio, advantages, mask), self.metrics(ratio.detach())

    def objective(self, ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

    def metrics(self, ratio: Tensor) -> dict[str, Tensor]:
        return {"ratio": ratio}


@fault("clip", "nothing pulls the token back")
class OptimisticForNegatives(_PPO):
    """min and max are swapped where the advantage is negative."""

    def objective(self, ratio, advantages, mask):
        plain, clipped = ratio * advantages, ratio.clamp(0.8, 1.2) * advantages
        return torch.where(advantages < 0, torch.maximum(plain, clipped), torch.minimum(plain, clipped))


@fault("clip", "nothing pulls the token back")
class OptimisticForPositives(_PPO):
    def objective(self, ratio, advantages, mask):
        plain, clipped = ratio * advantages, ratio.clamp(0.8, 1.2) * advantages
        return torch.where(advantages > 0, torch.maximum(plain, clipped), torch.minimum(plain, clipped))


@fault("clip", "nothing pulls the token back")
class ClipsBothSides(_PPO):
    def objective(self, ratio, advantages, mask):
        return ratio.clamp(0.8, 1.2) * advantages


@fault("clip", "pushes against the advantage")
class PullsTooFar(_PPO):
    """A squared distance in place of the clip."""

    def objective(self, ratio, advantages, mask):
        return ratio * advantages - 2 * advantages.abs() * (ratio - 1).square()


@fault("weight", "the ratio counts more than once")
class RatioTwice(_PPO):
    def objective(self, ratio, advantages, mask):
        return ratio.detach() * ratio * advantages


@fault("moves", "minus the advantages")
class MagnitudeOnly(_PPO):
    def objective(self, ratio, advantages, mask):
        return super().objective(ratio, advantages.abs(), mask)


@fault("moves", "minus the advantages")
class FailuresOnly(_PPO):
    """Successes are dropped."""

    def objective(self, ratio, advantages, mask):
        return super().objective(ratio, advantages.clamp(max=0), mask)


@fault("moves", "minus the advantages")
class TwiceTheAdvantage(_PPO):
    def objective(self, ratio, advantages, mask):
        return super().objective(ratio, 2 * advantages, mask)


@fault("moves", "minus the advantages")
class AdvantageOfTheNextToken(_PPO):
    def objective(self, ratio, advantages, mask):
        return super().objective(ratio, neighbours(advantages, mask, 1), mask)

    @property
    def waives(self):
        return {"clip": "not what this one is about"}


@fault("moves", "minus the advantages")
class WithoutTheLastToken(_PPO):
    def objective(self, ratio, advantages, mask):
        return super().objective(ratio, advantages * ~last_steps(mask), mask)

    @property
    def waives(self):
        return {"clip": "not what this one is about"}


@fault("moves", "minus the advantages")
class OverTheLength(_PPO):
    """The aggregation's division, once more."""

    def objective(self, ratio, advantages, mask):
        return super().objective(ratio, advantages, mask) / mask.sum(1, keepdim=True).clamp(min=1)


@fault("moves", "minus the advantages")
class DetachedPolicy(_PPO):
    def objective(self, ratio, advantages, mask):
        return super().objective(ratio.detach(), advantages, mask) + 0 * ratio

    @property
    def waives(self):
        return {"clip": "not what this one is about"}


@fault("moves", "minus the advantages")
class OldOverNew(_PPO):
    def objective(self, ratio, advantages, mask):
        return super().objective(1 / ratio, advantages, mask)

    @property
    def waives(self):
        return {"clip": "not what this one is about", "weight": "nor this"}


@fault("split", "alone in a micro-batch")
class CentresTheMicroBatch(_PPO):
    def objective(self, ratio, advantages, mask):
        mean = advantages.sum() / mask.sum().clamp(min=1)
        return super().objective(ratio, on_steps(advantages - mean, mask), mask)

    @property
    def waives(self):
        return {"moves": "not what this one is about", "clip": "nor this"}


@fault("padding", "positions of padding")
class OverTheWidth(_PPO):
    def objective(self, ratio, advantages, mask):
        return super().objective(ratio, advantages, mask) / mask.shape[1]

    @property
    def waives(self):
        return {"moves": "not what this one is about"}


@fault("precision", "it computes in torch.float16")
class LossInHalf(_PPO):
    def objective(self, ratio, advantages, mask):
        return super().objective(ratio.half(), advantages.half(), mask).to(ratio.dtype)


@fault("precision", "it computes in torch.bfloat16")
class RatioInHalf(_PPO):
    def objective(self, ratio, advantages, mask):
        return super().objective(ratio.bfloat16().to(ratio.dtype), advantages, mask)


@fault("garbage", "advantages[")
class SkipsBrokenAdvantages(_PPO):
    def objective(self, ratio, advantages, mask):
        return super().objective(ratio, advantages.nan_to_num(0.0), mask)


@fault("garbage", "logprobs[")
class SkipsBrokenTokens(_PPO):
    def surrogate(self, logprobs, old_logprobs, advantages, mask, marked):
        fine = logprobs.isfinite() & old_logprobs.isfinite()
        return super().surrogate(logprobs, old_logprobs, advantages, mask & fine, marked)


@fault("determinism", "called again")
class Anneals(_PPO):
    calls: ClassVar[list[int]] = [0]

    def objective(self, ratio, advantages, mask):
        self.calls[0] += 1
        return super().objective(ratio, advantages, mask) / self.calls[0]


@fault("determinism", "draws from a global generator")
class DropsTokens(_PPO):
    def objective(self, ratio, advantages, mask):
        return super().objective(ratio, advantages, mask) * (torch.rand(mask.shape) < 0.9)


@fault("determinism", "it wrote into update.advantages")
class ClampsInPlace(_PPO):
    def surrogate(self, logprobs, old_logprobs, advantages, mask, marked):
        return super().surrogate(logprobs, old_logprobs, advantages.clamp_(-0.4, 0.4), mask, marked)


@fault("form", "metric 'kl' is")
class NaNMetric(_PPO):
    def metrics(self, ratio):
        return {"kl": (ratio - ratio).log() * 0}


@fault("form", "metric 'ratio' is")
class MeanMetric(_PPO):
    def metrics(self, ratio):
        return {"ratio": ratio.mean()}


@fault("form", "metric 'ratio' is")
class FloatMetric(_PPO):
    def metrics(self, ratio):
        return {"ratio": float(ratio.sum())}


@fault("noise", "metric 'raw' is")
class MetricOfTheNoise(_PPO):
    def surrogate(self, logprobs, old_logprobs, advantages, mask, marked):
        loss, metrics = super().surrogate(logprobs, old_logprobs, advantages, mask, marked)
        return loss, metrics | {"raw": advantages.clone()}


class _WithKL(_PPO):
    kl_coef: float = 0.1
    """As every geometry's."""

    def __call__(self, logprobs, old_logprobs, advantages, mask, reference_logprobs, marked=None):
        loss, metrics = self.surrogate(logprobs, old_logprobs, advantages, mask, marked)
        return loss + self.kl(on_steps(logprobs, mask) - on_steps(reference_logprobs, mask)), metrics

    def kl(self, apart: Tensor) -> Tensor:
        raise NotImplementedError


@fault("reference", "away from the reference")
class FleesTheReference(_WithKL):
    def kl(self, apart):
        return -0.1 * apart.square()


@fault("reference", "does not depend on the reference")
class ForgetsTheReference(_WithKL):
    def kl(self, apart):
        return 0 * apart


class _Marks(_PPO):
    def surrogate(self, logprobs, old_logprobs, advantages, mask, marked):
        held = torch.zeros_like(mask) if marked is None else marked & mask
        loss, metrics = super().surrogate(logprobs, old_logprobs, advantages, mask, marked)
        return torch.where(held, loss.detach(), loss), metrics


@fault("marks", "mark chose masked positions")
class MarksThePadding(_Marks):
    def mark(self, old_logprobs, advantages, mask, seed):
        return on_steps(old_logprobs, mask) >= 0


@fault("marks", "at masked positions")
class MarksByTheNoise(_Marks):
    def mark(self, old_logprobs, advantages, mask, seed):
        return mask & (advantages >= advantages.mean())


@fault("marks", "mark gave")
class MarksByNumber(_Marks):
    def mark(self, old_logprobs, advantages, mask, seed):
        return mask.float()


# --- critics --------------------------------------------------------------------------------------
class Read(Tower):
    """A linear map of the actor's last hidden state."""

    reads_hidden = (2,)

    def __init__(self, actor, bounds, head=None):
        super().__init__(head or Head())
        self.out = nn.Linear(actor.config.hidden_size, 1)

    def forward(self, trace):
        return self.of(trace.hidden_states[2].masked_fill((trace.attention_mask == 0).unsqueeze(2), 0.0), trace)

    def of(self, hidden: Tensor, trace) -> Tensor:
        return self.out(hidden).squeeze(2).float()


def critic(tower: type[Tower], head: type[Head] | None = None, **declared):
    """A critic of that tower and head."""
    build = lambda self, actor, bounds: tower(actor, bounds, head() if head else None)  # noqa: E731
    return type(tower.__name__ + (head.__name__ if head else ""), (Critic,), {"build": build, **declared})


class AheadByOne(Read):
    def of(self, hidden, trace):
        return super().of(torch.cat([hidden[:, 1:], hidden[:, -1:]], 1), trace)


class InHalf(Read):
    def of(self, hidden, trace):
        return super().of(hidden.half().to(hidden.dtype), trace)


class CentresItsBatch(Read):
    def of(self, hidden, trace):
        return super().of(hidden - hidden.mean(0), trace)


class CountsThePadding(Read):
    def of(self, hidden, trace):
        return super().of(hidden, trace) + 0.1 * torch.arange(hidden.shape[1])


class Drops(Read):
    def of(self, hidden, trace):
        return super().of(nn.functional.dropout(hidden, 0.2), trace)


class Tires(Read):
    def of(self, hidden, trace):
        self.calls = getattr(self, "calls", 0) + 1
        return super().of(hidden, trace) / self.calls


class FarOut(Read):
    def of(self, hidden, trace):
        return 9 + super().of(hidden, trace)


class TowardsMinusTheTarget(Head):
    def fit(self, raw, target):
        return 0.5 * (raw + target).square()


class MinusTheMean(Head):
    """Losses of other positions are in each."""

    def fit(self, raw, target):
        loss = 0.5 * (raw - target).square()
        return loss + loss.mean()


class OneNumber(Head):
    def fit(self, raw, target):
        return 0.5 * (raw - target).square().mean()


class Upwards(Head):
    """Lowers a loss by raising every value."""

    def fit(self, raw, target):
        return -raw + 0 * target


def mean_of_everything(self, rollout, targets, bounds):
    return rollout.replace(values=rollout.values - rollout.values.mean())


def after_the_end(self, rollout, targets, bounds):
    return rollout.replace(bootstrap=rollout.bootstrap + 0.5)


def of_the_first_row(self, rollout, targets, bounds):
    return rollout.replace(values=rollout.values + targets[0, 0] * torch.arange(len(targets)).unsqueeze(1))


FAULTS += [
    (critic(AheadByOne), "future", "with other tokens from there on"),
    (critic(InHalf), "precision", "it computes in torch.float16"),
    (critic(CentresItsBatch), "split", "alone in a micro-batch"),
    (critic(CountsThePadding), "padding", "of padding before"),
    (critic(Drops), "determinism", "draws from a global generator"),
    (critic(Tires), "determinism", "called again"),
    (critic(FarOut, bounded=property(lambda self: True)), "form", "leave the rewards' bounds"),
    (critic(Read, TowardsMinusTheTarget), "learns", "the distance of its values"),
    (critic(Read, MinusTheMean), "noise", "where the mask is off"),
    (critic(Read, OneNumber), "learns", "one number for each target"),
    (critic(Read, Upwards), "learns", "the distance of its values"),
    (critic(Read, baseline=mean_of_everything), "baseline", "at masked positions"),
    (critic(Read, baseline=after_the_end), "baseline", "not 0"),
    (critic(Read, baseline=of_the_first_row), "baseline", "in reverse order"),
]


# --- evidence -------------------------------------------------------------------------------------
@fault("determinism", "judged again")
class Novelty(Evidence):
    """1 for what it has not read before."""

    seen: ClassVar[set[str]] = set()

    def __call__(self, prompt, response):
        new = response.text not in self.seen
        self.seen.add(response.text)
        return float(new)


@fault("determinism", "judged again")
class AboveTheRecord(Evidence):
    longest: ClassVar[list[int]] = [0]

    def __call__(self, prompt, response):
        self.longest[0] = max(self.longest[0], len(response.text))
        return len(response.text) / max(1, self.longest[0])


@fault("determinism", "judged again")
class ByTheClock(Evidence):
    def __call__(self, prompt, response):
        return time.time() % 1000 / 1000


@fault("determinism", "it wrote into prompt.meta")
class CountsInThePrompt(Evidence):
    def __call__(self, prompt, response):
        prompt.meta["judged"] = prompt.meta.get("judged", 0) + 1
        return 0.0


@fault("determinism", "draws from a global generator")
class SeedsTheWorld(Evidence):
    def __call__(self, prompt, response):
        torch.manual_seed(0)
        return 0.0


@fault("form", "it raised SystemExit")
class Exits(Evidence):
    def __call__(self, prompt, response):
        raise SystemExit(0)


@fault("form", "expected finite numbers")
class NotANumber(Evidence):
    def __call__(self, prompt, response):
        return float("nan") if "é" in response.text else 0.0


@fault("short", "it raised RecursionError")
class Nests(Evidence):
    def __call__(self, prompt, response):
        if response.text.count("(") > 100:
            raise RecursionError("too many brackets")
        return 0.0


@fault("batch", "in a batch")
class BestOfTheBatch(Evidence):
    def __call__(self, prompt, response):
        return 1.0 - 1 / (1 + len(response.text))

    def judge_batch(self, prompts, responses):
        each = [self(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        return [x / 2 if x < max(each) else x for x in each]


@fault("batch", "verdicts on")
class BatchWithoutDoubles(Evidence):
    def __call__(self, prompt, response):
        return 0.5

    def judge_batch(self, prompts, responses):
        return [0.5 for _ in {response.text for response in responses}]
