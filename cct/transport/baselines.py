"""Other baselines than a group's mean: by the size of the gradient, by each reward of several, by earlier iterations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cct.rollout import Credit, Rollout
from cct.statistic import Collision, Statistic

from .base import transports
from .critic_free import CriticFree, Group, on_every_token
from .reinforce import Whitened

if TYPE_CHECKING:
    from torch import Tensor


@transports.register("maxrl")
class MaxRL(Group):
    """Score minus its group's mean, in units of that mean: the likelihood of success as objective (MaxRL, Tajwar et al. 2026).

    A_it = (s_i - mean) / (mean + eps), [B, T], the same at each token; 0 in groups whose mean is not above 0.
    Source: arXiv 2602.02710, with the baseline and the eps of its authors' code. With scores 0 and 1 and n responses its mean
    gradient is that of the first n terms of log p = -sum_k (1 - p)^k / k.
    Pitfall: a success weighs 1 / p, so rare ones take large steps. Scores must not be negative: the mean has to be a rate of
    success. A KL acts on groups of equal scores all the same.
    """

    eps: float = Field(1e-6, gt=0, le=1)
    """Added to the mean."""

    def __call__(self, rollout: Rollout) -> Credit:
        return on_every_token(self._outcome(rollout, scale="mean"), rollout)


@transports.register("otb")
class OTB(CriticFree):
    """Reward to go minus its group's mean at that step, weighted by the gradient so far (OTB, Li et al. 2026).

    A_it = G_it - B_t, B_t = sum_k(W_kt G_kt) / sum_k(W_kt), W_kt = sum over u <= t of (1 - 2 pi_ku + sum of squared
    probabilities at ku): the squared length of d log pi / d logits; t counts trainable tokens; [B, T].
    Source: arXiv 2602.07078, by the documentation and code that its authors have in verl. Without the weights of a truncated
    importance correction, which there multiply W.
    Pitfall: t-th tokens of two responses need have nothing in common, and the longest are compared with few. It keeps the
    distribution of each token in memory for a moment.
    """

    reads_policy = True
    # verl: core_algos.py, compute_multi_turn_optimal_token_baseline_advantage (handle_zero_tail).
    presets = {"verl": {"single": "raw"}}
    like: Literal["verl"] | None = None
    """Use this framework's `single`; if `single` is also set, it must agree."""
    single: Literal["zero", "raw"] = "zero"
    """Advantage of a token where no other response of the group is that long. zero: 0. raw: its reward to go."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"groups"}).union(*(what.needs for what in self.statistics.values()))

    @property
    def statistics(self) -> dict[str, Statistic]:
        return {"collision": Collision()}

    @property
    def waives(self) -> dict[str, str]:
        return {} if self.single == "zero" else {"equal": "single: raw keeps the reward to go of the longest response's end"}

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import optimal_token_advantage

        numbers = (rollout.rewards, rollout.logprobs, rollout.stats["collision"], rollout.mask, rollout.groups)
        return Credit(optimal_token_advantage(*numbers, single=self.single))


@transports.register("gdpo")
class GDPO(Whitened, Group):
    """Each reward of several relative to its group on its own, then their weighted sum, whitened (GDPO, Liu et al. 2026).

    c_i = sum_k w_k (r_ik - mean_k) / (deviation_k + group_eps), over the recipe's evidence k with its weight w_k;
    A_it = (c_i - mean) / deviation, over all responses of the batch; [B, T], the same at each token.
    Source: arXiv 2601.05242. Defaults: ddof 1 twice, group_eps 1e-6, eps 1e-8 added to the batch's deviation.
    Pitfall: a weight no longer depends on the size of a reward, so one of 0.1 that made a large length penalty small makes it
    small once more. Evidence that hardly ever varies weighs, where it does, as much as any. With one piece of evidence it is
    `grpo`, whitened. A KL acts on groups of equal scores all the same.
    """

    # verl: core_algos.py, compute_gdpo_outcome_advantage. TRL: grpo_trainer.py, multi_objective_aggregation.
    presets = {
        "verl": {"group_eps": 1e-6, "unit": "tokens", "ddof": 1, "eps": 1e-8, "eps_at": "variance", "single": "raw"},
        "trl": {"group_eps": 1e-4, "unit": "responses", "ddof": 1, "eps": 1e-4, "eps_at": "std", "single": "zero"},
    }
    like: Literal["verl", "trl"] | None = None
    """Use this framework's group_eps, unit, ddof, eps, eps_at and single; if one of them is also set, it must agree."""
    group_eps: float = Field(1e-6, gt=0, le=1)
    """Added to each reward's standard deviation in its group, which has ddof 1."""
    unit: Literal["tokens", "responses"] = "responses"
    """Unit of the batch's mean and deviation. tokens, which gives long responses more weight, is allowed only with `like`."""
    ddof: Literal[0, 1] = 1
    """Divide the batch's sum of squares by n - ddof."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"groups", "components"})

    @property
    def whitens(self) -> Literal["token", "sequence"] | None:
        return super().whitens if self.like is None else None  # a framework's convention, asked for by its name

    def _components(self, rollout: Rollout) -> tuple[Tensor, Tensor, tuple[float, ...]]:
        """Scores by each piece of evidence and whether it gave one, both [B, K], and their weights."""
        import torch

        valid = rollout.valid.unsqueeze(1)
        if not rollout.weights:  # without names the reward is the one component
            return rollout.scores.unsqueeze(1), valid, (1.0,)
        scores = [rollout.components[name].masked_fill(~rollout.mask, 0.0).sum(1) for name in rollout.weights]
        given = ~torch.stack(scores, 1).isnan() & valid
        return torch.stack(scores, 1).masked_fill(~given, 0.0), given, tuple(rollout.weights.values())

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import decoupled_advantage

        scores, given, weights = self._components(rollout)
        outcome = decoupled_advantage(scores, rollout.groups, weights, eps=self.group_eps, single=self.single, valid=given)
        return self._whiten(outcome.unsqueeze(1) * rollout.mask, rollout)


@transports.register("single_stream")
class SingleStream(Whitened):
    """Score minus its prompt's value, tracked over earlier iterations, whitened (Single-stream PO, Xu and Ding 2025).

    c_i = s_i - V, V = S / N of its prompt before this iteration; A_it = (c_i - mean) / deviation, over all responses of the
    batch; [B, T], the same at each token. Afterwards S = decay S + sum of its scores, N = decay N + their number.
    Source: arXiv 2509.13232, with the constant decay of its authors' recipe for verl. Not done: decay by the policy's KL since
    the prompt's last response, a first estimate from samples of the starting policy, and sampling prompts by their uncertainty.
    Several responses to a prompt in one iteration are ours. Defaults: those of the recipe, decay 0.875, S 0.5 and N 1.
    Another operator, `spo`, is segment policy optimization.
    Pitfall: a prompt that comes once only has the prior as its value: it needs a task whose prompts return. S and N are in
    checkpoints; another wording of a prompt is another prompt.
    """

    unit: Literal["tokens", "responses"] = "responses"
    """Unit of the batch's mean and deviation; with tokens, long responses weigh more."""
    ddof: Literal[0, 1] = 1
    """Divide the sum of squares by n - ddof."""
    decay: float = Field(0.875, ge=0, le=1)
    """Share of what is known of a prompt that is kept each time it is sampled; 1 forgets nothing."""
    prior: float = Field(0.5, ge=-1e6, le=1e6)
    """Value of a prompt that was never sampled, in units of the score."""
    prior_weight: float = Field(1.0, gt=0, le=1e6)
    """Responses that the prior counts as."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"history"})

    def remembered(self, past: tuple[float, float] | None, scores: Sequence[float]) -> tuple[float, float]:
        from .functional import tracked

        return tracked(past or (self.prior * self.prior_weight, self.prior_weight), scores, self.decay)

    def expected(self, past: tuple[float, float] | None) -> float:
        return self.prior if past is None or past[1] <= 0 else past[0] / past[1]

    def __call__(self, rollout: Rollout) -> Credit:
        assert rollout.prompt_values is not None
        return self._whiten((rollout.scores - rollout.prompt_values).unsqueeze(1) * rollout.mask, rollout)
