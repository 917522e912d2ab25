"""Right operators of unusual kinds, which the conformance suite must accept."""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache
from typing import ClassVar

import numpy
import torch
from torch import nn
from wrong_operators import Read, critic, on_steps

from cct.critic.towers import Head
from cct.evidence import Evidence
from cct.geometry import Geometry
from cct.registry import Component
from cct.rollout import Credit
from cct.statistic import Statistic, TokenEntropy
from cct.transport import Gate, Transport, gated_gae, group_advantage

RIGHT: list[type[Component]] = []


def right(cls: type[Component]) -> type[Component]:
    RIGHT.append(cls)
    return cls


# --- transports -----------------------------------------------------------------------------------
@right
class HalfLife(Transport):
    """Outcome credit halves every few tokens before the end."""

    def __call__(self, rollout):
        to_end = rollout.mask.flip(1).cumsum(1).flip(1) - 1
        return Credit(rollout.scores.unsqueeze(1) * 0.5 ** (to_end / 8) * rollout.mask)


@right
class SuccessesOnly(Transport):
    """Rejection sampling: what is above the group's mean, the rest nothing."""

    needs: ClassVar = frozenset({"groups"})

    def __call__(self, rollout):
        found = group_advantage(rollout.scores, rollout.groups, scale="none", valid=rollout.valid)
        return Credit((found > 0).to(found.dtype).unsqueeze(1) * rollout.mask + 0 * (found * rollout.valid).unsqueeze(1))


@right
class FailuresOnly(Transport):
    """Negative samples only."""

    needs: ClassVar = frozenset({"groups"})

    def __call__(self, rollout):
        found = group_advantage(rollout.scores, rollout.groups, scale="none", valid=rollout.valid)
        return Credit(found.clamp(max=0).unsqueeze(1) * rollout.mask)


@right
class LeaveOneOutInNumpy(Transport):
    """Loops and float64, and no torch until the end."""

    needs: ClassVar = frozenset({"groups"})

    def __call__(self, rollout):
        scores, groups, valid = (x.double().numpy() for x in (rollout.scores, rollout.groups, rollout.valid))
        found = numpy.zeros_like(scores)
        for i in valid.nonzero()[0]:
            others = [j for j in valid.nonzero()[0] if j != i and groups[j] == groups[i]]
            found[i] = scores[i] - scores[others].mean() if others and (scores[others] != scores[i]).any() else scores[i] * 0
        return Credit(torch.from_numpy(found).to(rollout.rewards.dtype).unsqueeze(1) * rollout.mask)


@right
class AgainstTheBest(Transport):
    """The score minus the best of the group."""

    needs: ClassVar = frozenset({"groups"})

    def __call__(self, rollout):
        same = (rollout.groups.unsqueeze(0) == rollout.groups.unsqueeze(1)) & rollout.valid
        scores = rollout.scores.masked_fill(~rollout.valid, 0.0)
        best = scores.expand_as(same).masked_fill(~same, -torch.inf).amax(1)
        return Credit((scores - best).masked_fill(~rollout.valid, 0.0).unsqueeze(1) * rollout.mask)


@right
class TokenRewards(Transport):
    """Each token gets its own reward and nothing else."""

    claims: ClassVar = frozenset({"causal", "linear", "split"})

    def __call__(self, rollout):
        return Credit(on_steps(rollout.rewards, rollout.mask))


@right
class Squashed(Transport):
    """A bounded function of the score."""

    def __call__(self, rollout):
        return Credit(torch.tanh(rollout.scores).unsqueeze(1) * rollout.mask)


@right
class SureTokensLess(Transport):
    """Outcome credit by the entropy that each token was drawn with."""

    def __call__(self, rollout):
        return Credit(on_steps(rollout.scores.unsqueeze(1) * (0.5 + rollout.stats["entropy"]), rollout.mask))


@right
class ShiftedTargets(Transport):
    """GAE whose critic learns one step ahead, with another lambda."""

    needs: ClassVar = frozenset({"values"})

    def __call__(self, rollout):
        return Credit(
            *gated_gae(
                rollout.rewards, rollout.values, rollout.mask, gamma=0.95, lam=0.5, lam_value=0.0, bootstrap=rollout.bootstrap
            )
        )


@right
class Explores(Transport):
    """Noise from a generator that the run's seed reaches, the same for a response wherever it stands."""

    @property
    def waives(self):
        return dict.fromkeys(("gap", "padding", "order"), "it draws for each row and position")

    def __call__(self, rollout):
        generator = torch.Generator().manual_seed(rollout.seed)
        drawn = torch.rand(rollout.mask.shape, generator=generator).to(rollout.rewards.dtype)
        return Credit(on_steps(rollout.scores.unsqueeze(1) * (1 + 0.1 * drawn), rollout.mask))


@right
class OutcomeOnly(Transport):
    """A critic of the whole response as baseline; Monte Carlo, so that nothing follows a cut."""

    needs: ClassVar = frozenset({"values"})
    waives: ClassVar = {"bootstrap": "what a cut response would still have got is not guessed"}

    def __call__(self, rollout):
        returns = rollout.scores.unsqueeze(1) * rollout.mask
        return Credit(returns - on_steps(rollout.values, rollout.mask), returns)


# --- gates ----------------------------------------------------------------------------------------
@right
class Threshold(Gate):
    """Two discounts."""

    def __call__(self, rollout):
        entropy = rollout.stats["entropy"]
        return torch.where(entropy > 0.505, 0.9, 1.0).to(entropy.dtype) + 0 * entropy


@right
class Exponential(Gate):
    """Of a statistic of several nats."""

    statistics: ClassVar = {"mine": TokenEntropy()}

    def __call__(self, rollout):
        return (-0.1 * rollout.stats["mine"]).exp()


@right
class EverySecondStep(Gate):
    """By the place in the response."""

    def __call__(self, rollout):
        return torch.where((rollout.mask.long().cumsum(1) - rollout.mask.long()) % 2 == 0, 0.5, 1.0).to(rollout.rewards.dtype)


@right
class RunningMean(Gate):
    """The mean of the gates up to here."""

    def __call__(self, rollout):
        gate = on_steps(1 / (1 + rollout.stats["entropy"]), rollout.mask)
        return gate.cumsum(1) / rollout.mask.cumsum(1).clamp(min=1)


# --- geometries -----------------------------------------------------------------------------------
@right
class FromScratch(Geometry):
    """PPO without anything of the library's, in `__call__`."""

    def __call__(self, logprobs, old_logprobs, advantages, mask, reference_logprobs):
        new, old, advantages = (torch.where(mask, x, torch.zeros_like(x)) for x in (logprobs, old_logprobs, advantages))
        moved = torch.clamp(new - old, -10, 10)
        ratio = torch.exp(moved)
        loss = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.3))
        return loss, {"kl": -moved.detach()}


@right
class TruncatedImportance(Geometry):
    """REINFORCE by a ratio of at most 1, detached."""

    def surrogate(self, logprobs, old_logprobs, advantages, mask, marked):
        new, old, advantages = (on_steps(x, mask) for x in (logprobs, old_logprobs, advantages))
        return -(new - old).detach().clamp(-20, 0).exp() * advantages * new, {}


@right
class LogRatio(Geometry):
    """The advantage times the log-ratio, held by a bound on it."""

    def surrogate(self, logprobs, old_logprobs, advantages, mask, marked):
        new, old, advantages = (on_steps(x, mask) for x in (logprobs, old_logprobs, advantages))
        moved = (new - old).clamp(-20, 20)
        return -torch.minimum(moved * advantages, moved.clamp(-0.3, 0.3) * advantages), {}


@right
class Imitates(Geometry):
    """Good tokens only, as in supervised learning, and says so."""

    @property
    def waives(self):
        return {"moves": "failures are left out", "clip": "failures are left out"}

    def surrogate(self, logprobs, old_logprobs, advantages, mask, marked):
        return -on_steps(advantages, mask).clamp(min=0) * on_steps(logprobs, mask), {}


# --- critics --------------------------------------------------------------------------------------
class OnlyABias(Read):
    """The same value everywhere."""

    def of(self, hidden, trace):
        return super().of(0 * hidden, trace)


class Running(Read):
    """The mean over the tokens up to here."""

    def of(self, hidden, trace):
        count = trace.attention_mask.cumsum(1).clamp(min=1).unsqueeze(2)
        return super().of(hidden.cumsum(1) / count, trace)


class Huber(Head):
    """Robust."""

    def fit(self, raw, target):
        return nn.functional.huber_loss(raw, target, reduction="none")


RIGHT += [critic(Read), critic(OnlyABias), critic(Running), critic(Read, Huber)]


# --- evidence -------------------------------------------------------------------------------------
@lru_cache
def digits(text: str) -> int:
    return sum(char.isdigit() for char in text)


@right
class Remembers(Evidence):
    """A cache that changes nothing."""

    def __call__(self, prompt, response):
        return digits(response.text) / max(1, len(response.text))


@right
class PerToken(Evidence):
    """One reward a token, a tuple of numpy's numbers."""

    def __call__(self, prompt, response):
        return tuple(numpy.float32(1 / len(response.tokens)) for _ in response.tokens)


@right
class Whole(Evidence):
    """A whole number."""

    def __call__(self, prompt, response):
        return int(prompt.answer in response.text)


@right
class Rubric(Evidence):
    """Draws from a generator of its own, seeded by what is judged."""

    def __call__(self, prompt, response):
        return random.Random(hashlib.sha256(response.text.encode()).digest()).random()


@right
class AllAtOnce(Evidence):
    """Judges a batch in its own way."""

    def __call__(self, prompt, response):
        return float(response.finished)

    def judge_batch(self, prompts, responses):
        return numpy.array([response.finished for response in responses], dtype=float).tolist()


# --- statistics -----------------------------------------------------------------------------------
@right
class OfTheLastLayer(Statistic):
    """Reads every layer, without a knob for it."""

    reads: ClassVar = frozenset({"hidden_states"})

    def measure(self, forward):
        return forward.emitting(forward.hidden_states[forward.n_layers - 1].norm(dim=-1))


@right
class EntropyOfTheRest(Statistic):
    """Mean entropy from here to the end of the response."""

    knows = "response"

    def measure(self, forward):
        seen = forward.emitted(forward.attention_mask)
        return (forward.entropy * seen).flip(1).cumsum(1).flip(1) / seen.flip(1).cumsum(1).flip(1).clamp(min=1)
