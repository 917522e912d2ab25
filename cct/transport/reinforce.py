"""REINFORCE++ and ReMax: rewards against the mean of the batch, or against a greedy response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cct.rollout import Credit, Rollout

from .base import transports
from .critic_free import CriticFree, Group

if TYPE_CHECKING:
    from torch import Tensor


class Whitened(CriticFree):
    """Advantages shifted and scaled over the whole batch."""

    unit: Literal["tokens", "responses"] = "tokens"
    """Unit of the batch's mean and deviation; with tokens, long responses weigh more."""
    ddof: Literal[0, 1] = 0
    """Divide the sum of squares by n - ddof."""
    eps: float = Field(1e-8, gt=0, le=1)
    """Keeps the division finite; see eps_at."""
    eps_at: Literal["std", "variance", "floor"] = "std"
    """Add eps to the standard deviation, add it to the variance, or use it as the variance's lower bound."""

    @property
    def whitens(self) -> Literal["token", "sequence"] | None:
        return "token" if self.unit == "tokens" else "sequence"

    def _whiten(self, advantages: Tensor, rollout: Rollout) -> Credit:
        from .functional import whiten

        whitened = whiten(advantages, rollout.mask, eps=self.eps, eps_at=self.eps_at, ddof=self.ddof, unit=self.unit)
        return Credit(whitened)


# How the two frameworks whiten. verl: verl/utils/torch_functional.py, masked_whiten.
# OpenRLHF: experience_maker.py, compute_advantages_and_returns.
_WHITEN = {
    "verl": {"unit": "tokens", "ddof": 1, "eps": 1e-8, "eps_at": "variance"},
    "openrlhf": {"unit": "tokens", "ddof": 0, "eps": 1e-8, "eps_at": "floor"},
}


@transports.register("reinforce_pp")
class ReinforcePP(Whitened):
    """Discounted reward to go of each token, whitened over the batch (REINFORCE++, Hu et al. 2025).

    G_it = r_it + gamma G_i,t+1; A_it = (G_it - mean) / deviation, over all trainable tokens of the batch; [B, T].
    Source: arXiv 2501.03262. Defaults: gamma 1, ddof 0, eps 1e-8 added to the deviation. It needs no groups.
    Pitfall: the one baseline is the batch's mean, so an easy prompt's failure can still be pushed up when prompts differ
    much; and with gamma 1 a long response counts in that mean as often as it has tokens.
    """

    # verl: core_algos.py, compute_reinforce_plus_plus_outcome_advantage: a masked token carries the running return, since its
    # pull request 7300 (2026-08-10); before, it cut it.
    # OpenRLHF: experience_maker.py, get_cumulative_returns: a masked token is a step with reward 0.
    presets = {"verl": {**_WHITEN["verl"], "gap": "carry"}, "openrlhf": {**_WHITEN["openrlhf"], "gap": "decay"}}
    like: Literal["verl", "openrlhf"] | None = None
    """Use this framework's unit, ddof, eps, eps_at and gap; if one of them is also set, it must agree."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token."""
    gap: Literal["carry", "decay", "cut"] = "carry"
    """Effect on credit that crosses tokens the policy did not emit. carry: none. decay: it decays. cut: it stops."""

    @property
    def waives(self) -> dict[str, str]:
        found = {} if self.gap == "carry" else {"gap": f"gap: {self.gap} lets masked tokens count"}
        return found | ({"observation": "gap: decay counts masked tokens"} if self.gap == "decay" else {})

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import token_returns

        return self._whiten(token_returns(rollout.rewards, rollout.mask, gamma=self.gamma, gap=self.gap), rollout)


@transports.register("reinforce_pp_baseline")
class ReinforcePPBaseline(Whitened, Group):
    """Score minus its group's mean, whitened over the batch instead of the group (REINFORCE++-baseline, Hu et al. 2025).

    c_i = s_i - mean of the group; A_it = (c_i - mean) / deviation, over all trainable tokens of the batch; [B, T], the
    same at each token of a response.
    Source: arXiv 2501.03262, which whitens over tokens, as `like` does. Defaults: over responses, ddof 0, eps 1e-8 added to the
    deviation.
    Pitfall: over tokens the batch's mean is not 0 where right and wrong responses differ in length; it is subtracted once
    more, so that groups of equal scores get a small advantage, too.
    """

    # verl: core_algos.py, compute_reinforce_plus_plus_baseline_outcome_advantage. OpenRLHF: reinforce_baseline.
    # NeMo RL: advantage_estimator.py, ReinforcePlusPlusAdvantageEstimator with minus_baseline.
    presets = {
        "verl": {**_WHITEN["verl"], "single": "raw"},
        "openrlhf": {**_WHITEN["openrlhf"], "single": "zero"},
        "nemo_rl": {**_WHITEN["openrlhf"], "single": "zero"},
    }
    like: Literal["verl", "openrlhf", "nemo_rl"] | None = None
    """Use this framework's unit, ddof, eps, eps_at and single; if one of them is also set, it must agree."""

    unit: Literal["tokens", "responses"] = "responses"
    """Unit of the batch's mean and deviation. tokens, which gives long responses more weight, is allowed only with `like`."""

    @property
    def whitens(self) -> Literal["token", "sequence"] | None:
        return super().whitens if self.like is None else None  # a framework's convention, asked for by its name

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import group_advantage

        outcome = group_advantage(rollout.scores, rollout.groups, scale="none", single=self.single, valid=rollout.valid)
        return self._whiten(outcome.unsqueeze(1) * rollout.mask, rollout)


@transports.register("remax")
class ReMax(CriticFree):
    """Score minus the score of the greedy response to the same prompt (ReMax, Li et al. 2023).

    A_it = s_i - s_greedy, [B, T], the same at each token; with `reward_to_go` the rewards from t on, minus s_greedy.
    Source: arXiv 2310.10505. It needs no groups: one response per prompt will do.
    Pitfall: one more response per prompt and round is sampled and judged (`time/greedy`, `train/greedy_reward`). Greedy
    and sampled responses can differ much in score, and then nearly all advantages have one sign. Where the greedy
    response could not be judged (`on_error: drop`), the prompt's responses get 0.
    """

    # verl: core_algos.py, compute_remax_outcome_advantage.
    presets = {"verl": {"reward_to_go": True}}
    like: Literal["verl"] | None = None
    """Use this framework's reward_to_go; if reward_to_go is also set, it must agree."""
    reward_to_go: bool = False
    """Give a token only the rewards from it on, instead of all; no difference if the only reward is at the end."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"greedy"})

    @property
    def grain(self) -> Literal["token", "sequence"]:
        return "token" if self.reward_to_go else "sequence"

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import greedy_advantage

        assert rollout.greedy_scores is not None
        return Credit(greedy_advantage(rollout.rewards, rollout.greedy_scores, rollout.mask, reward_to_go=self.reward_to_go))
