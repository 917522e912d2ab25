"""GRPO and its kin: the score of a response against those of its group.

Most are one function, `group_advantage`, with another baseline and another scale; each name is a shell with its own
defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cct.rollout import Credit, Rollout

from .base import transports
from .critic_free import CriticFree, Group, of_a_deviation, on_every_token

if TYPE_CHECKING:
    from torch import Tensor


@transports.register("grpo")
class GRPO(Group):
    """Score relative to the other responses to the same prompt, on every token (Shao et al. 2024).

    A_it = (s_i - mean) / (deviation + eps), mean and deviation of the group's scores; the same at each token t of
    response i, [B, T]. Groups of equal scores get exactly 0.
    Source: arXiv 2402.03300. Defaults: deviation with ddof 1, eps 1e-6.
    Pitfalls: the division weighs nearly solved and nearly hopeless prompts most; `dr_grpo` leaves it out. Groups of equal
    scores still move the policy where the loss has a KL (`geometry.kl_coef`), which acts on their tokens too; a KL in rewards
    (`geometry.kl_in_reward`) makes their scores differ.
    """

    # verl: verl/trainer/ppo/core_algos.py, compute_grpo_outcome_advantage.
    # TRL: trl/trainer/grpo_trainer.py, GRPOTrainer (a mean over one is that one, so alone gives 0).
    # OpenRLHF: openrlhf/trainer/ppo_utils/experience_maker.py, group_norm (it refuses groups of one).
    # NeMo RL: nemo_rl/algorithms/utils.py, calculate_baseline_and_std_per_prompt, and advantage_estimator.py: baseline and
    # deviation are those of the other responses, and a deviation of 0 divides nothing.
    presets = {
        "verl": {"eps": 1e-6, "ddof": 1, "single": "raw", "leave_one_out": False},
        "trl": {"eps": 1e-4, "ddof": 1, "single": "zero", "leave_one_out": False},
        "openrlhf": {"eps": 1e-9, "ddof": 1, "leave_one_out": False},
        "nemo_rl": {"eps": 1e-6, "ddof": 1, "single": "zero", "leave_one_out": True},
    }
    like: Literal["verl", "trl", "openrlhf", "nemo_rl"] | None = None
    """Use this framework's eps, ddof, single and leave_one_out; if one of them is also set, it must agree."""
    leave_one_out: bool = False
    """Use mean and deviation of the other responses only. If their scores are all equal, nothing is divided: the only success
    of a group then gets 1, less than with the group's deviation."""
    std: bool = True
    """Divide by the standard deviation; off is Dr. GRPO (Liu et al. 2025), or RLOO with leave_one_out."""
    eps: float = Field(1e-6, gt=0, le=1)
    """Added to the standard deviation."""
    ddof: Literal[0, 1] = 1
    """Divide the sum of squares by n - ddof: 1 is torch's default, 0 numpy's."""

    @property
    def unread(self) -> dict[str, str]:
        return of_a_deviation(self.std)

    def _relative(self, rollout: Rollout) -> Tensor:
        """The number of each response, [B]."""
        if self.leave_one_out:
            return self._outcome(rollout, baseline="leave_one_out", scale="others" if self.std else "none")
        return self._outcome(rollout, scale="group" if self.std else "none")

    def __call__(self, rollout: Rollout) -> Credit:
        return on_every_token(self._relative(rollout), rollout)


@transports.register("dr_grpo")
class DrGRPO(Group):
    """GRPO without the division by the group's standard deviation (Liu et al. 2025).

    A_it = s_i - mean of the group, [B, T], the same at each token.
    Source: arXiv 2503.20783.
    Pitfall: this is half of Dr. GRPO. The other half is in the loss, which must not divide by a response's length:
    `geometry.aggregation: sequence_sum_over_constant`. A KL acts on groups of equal scores all the same.
    """

    # As for grpo, without the division: norm_adv_by_std_in_grpo=False, scale_rewards="none", dr_grpo.
    presets = {"verl": {"single": "raw"}, "trl": {"single": "zero"}, "openrlhf": {"single": "zero"}}
    like: Literal["verl", "trl", "openrlhf"] | None = None
    """Use this framework's `single`; if `single` is also set, it must agree."""

    def __call__(self, rollout: Rollout) -> Credit:
        return on_every_token(self._outcome(rollout, scale="none"), rollout)


@transports.register("rloo")
class RLOO(Group):
    """Score minus the mean score of the other responses to the same prompt (leave one out; Ahmadian et al. 2024).

    A_it = s_i - mean of the others = (s_i - mean) n / (n - 1), [B, T], the same at each token.
    Source: arXiv 2402.14740; Kool et al. 2019.
    Pitfall: as it does not divide by a deviation, advantages have the unit of the rewards, and so does the step size.
    A KL acts on groups of equal scores all the same.
    """

    # verl: core_algos.py, compute_rloo_outcome_advantage. OpenRLHF: experience_maker.py, rloo (it refuses groups of one).
    # NeMo RL: nemo_rl/algorithms/utils.py, calculate_baseline_and_std_per_prompt with its leave-one-out baseline, and
    # rewards that are not normalised. TRL: trl/trainer/rloo_trainer.py (alone gives 0, advantages not normalised).
    presets = {"verl": {"single": "raw"}, "nemo_rl": {"single": "zero"}, "openrlhf": {}, "trl": {"single": "zero"}}
    like: Literal["verl", "trl", "openrlhf", "nemo_rl"] | None = None
    """Use this framework's `single`; if `single` is also set, it must agree."""

    def __call__(self, rollout: Rollout) -> Credit:
        return on_every_token(self._outcome(rollout, baseline="leave_one_out", scale="none"), rollout)


@transports.register("opo")
class OPO(Group):
    """Score minus the length-weighted mean of its group, the baseline of least variance (Hao et al. 2025).

    A_it = s_i - sum_j(n_j s_j) / sum_j(n_j), with n_j the trainable tokens of response j; [B, T], the same at each token.
    Source: arXiv 2505.23585. Least variance holds where a response's squared gradient grows as its length.
    Pitfall: the advantages of a group sum to 0 over its tokens, not over its responses: they suit `token_mean`. The
    source samples strictly on-policy, without a KL term and with one update per round. A KL acts on groups of
    equal scores all the same.
    """

    # verl: core_algos.py, compute_opo_outcome_advantage.
    presets = {"verl": {"single": "raw"}}
    like: Literal["verl"] | None = None
    """Use this framework's `single`; if `single` is also set, it must agree."""

    def __call__(self, rollout: Rollout) -> Credit:
        lengths = rollout.mask.sum(1)
        return on_every_token(self._outcome(rollout, baseline="length_weighted", scale="none", lengths=lengths), rollout)


@transports.register("gpg")
class GPG(Group):
    """Score minus its group's mean, scaled up to make up for responses without a gradient (Chu et al. 2025).

    A_it = alpha (s_i - mean) [/ (deviation + eps)], alpha = responses / responses of groups whose scores differ; [B, T],
    the same at each token.
    Source: arXiv 2504.02546. Default: no division (its F_norm = 1), ddof 1 where there is one.
    Pitfall: alpha grows as fewer groups have scores that differ, so the noisiest iterations take the largest steps; watch
    `advantage/std`.
    A KL acts on groups of equal scores all the same.
    """

    # verl: core_algos.py, compute_gpg_outcome_advantage with f_norm = 1.
    presets = {"verl": {"std": False, "rescale": "nonzero_scores", "single": "raw"}}
    like: Literal["verl"] | None = None
    """Use this framework's std, rescale and single; if one of them is also set, it must agree."""
    rescale: Literal["groups", "nonzero_scores", "none"] = "groups"
    """Denominator of alpha. groups: responses of groups whose scores differ. nonzero_scores: responses whose score is not 0.
    none: no alpha."""
    std: bool = False
    """Also divide by the group's standard deviation."""
    eps: float = Field(1e-6, gt=0, le=1)
    """Added to the standard deviation."""
    ddof: Literal[0, 1] = 1
    """Divide the sum of squares by n - ddof."""

    @property
    def unread(self) -> dict[str, str]:
        return of_a_deviation(self.std)

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import informative_rescale

        outcome = self._outcome(rollout, scale="group" if self.std else "none")
        if self.rescale != "none":
            outcome = informative_rescale(outcome, rollout.scores, rollout.groups, by=self.rescale, valid=rollout.valid)
        return on_every_token(outcome, rollout)


@transports.register("lite_ppo")
class LitePPO(Group):
    """Score minus its group's mean, over the deviation of the whole batch's scores (Liu et al. 2025).

    A_it = (s_i - mean of the group) / (deviation of all scores + eps), [B, T], the same at each token.
    Source: arXiv 2508.08221, with `aggregation: token_mean`. Defaults: ddof 1, eps 1e-6.
    Pitfall: the deviation holds the differences between prompts too, so advantages shrink as the prompts get more mixed.
    A KL acts on groups of equal scores all the same.
    """

    # TRL: grpo_trainer.py with scale_rewards="batch".
    presets = {"trl": {"eps": 1e-4, "ddof": 1, "single": "zero"}}
    like: Literal["trl"] | None = None
    """Use this framework's eps, ddof and single; if one of them is also set, it must agree."""
    eps: float = Field(1e-6, gt=0, le=1)
    """Added to the standard deviation."""
    ddof: Literal[0, 1] = 1
    """Divide the sum of squares by n - ddof."""

    def __call__(self, rollout: Rollout) -> Credit:
        return on_every_token(self._outcome(rollout, scale="batch"), rollout)


@transports.register("grpo_pass_at_k")
class GRPOPassAtK(CriticFree):
    """What a response adds to the best of k: GRPO for pass@k, with exact means over all k-subsets (Chen et al. 2025).

    A_it = (E[M | i in S] - E[M]) / sqrt(Var M), with M the best score of S, a k-subset of the group; [B, T], the same at
    each token. `credit: lead` instead gives the best response its lead over the second, the others 0.
    Source: arXiv 2508.10751 for scores 0 and 1, here for any; `lead` is arXiv 2503.19595 (Tang et al. 2025).
    Default: k = 4. A group of k or fewer responses gets 0.
    Pitfall: with more than n - k successes in a group every subset succeeds and all get 0; no failure of such a group is
    punished, so pass@1 can stand still. A KL acts on groups of equal scores all the same.
    """

    # verl: core_algos.py, compute_grpo_passk_outcome_advantage.
    presets = {"verl": {"credit": "lead", "eps": 1e-6, "ddof": 1}}
    like: Literal["verl"] | None = None
    """Use this framework's credit, eps and ddof; if one of them is also set, it must agree."""
    credit: Literal["subsets", "lead"] = "subsets"
    """subsets: means over all k-subsets. lead: the lead of the best response, which is pass@k with k the whole group."""
    k: int = Field(4, ge=1, le=1024)
    """With `subsets`, number of responses of which the best counts; 1 is GRPO with ddof 0."""
    std: bool = True
    """With `lead`, divide by the group's standard deviation."""
    eps: float = Field(1e-6, gt=0, le=1)
    """With `lead`, added to the standard deviation."""
    ddof: Literal[0, 1] = 1
    """With `lead`, divide the sum of squares by n - ddof."""

    @property
    def unread(self) -> dict[str, str]:
        if self.credit == "subsets":
            return dict.fromkeys(("std", "eps", "ddof"), "credit: subsets divides by the deviation of the best of k")
        return {"k": "credit: lead uses the whole group"} | of_a_deviation(self.std)

    @property
    def grain(self) -> Literal["token", "sequence"]:
        return "sequence"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"groups"})

    @property
    def least_responses(self) -> int:
        return max(2, self.k + 1) if self.credit == "subsets" else 2

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import lead_advantage, pass_at_k_advantage

        where = (rollout.scores, rollout.groups)
        if self.credit == "subsets":
            return on_every_token(pass_at_k_advantage(*where, k=self.k, valid=rollout.valid), rollout)
        outcome = lead_advantage(*where, std=self.std, eps=self.eps, ddof=self.ddof, valid=rollout.valid)
        return on_every_token(outcome, rollout)


@transports.register("grpo_lambda")
class GRPOLambda(GRPO):
    """GRPO's outcome through an eligibility trace, which gives each token a share of what later tokens get.

    A_it = w_t A_i, with A_i as in `grpo`; [B, T]. With t counted from 0 and n_i trainable tokens,
    recent: w_t = sum over u >= t of lam^(u - t); both: w_t = sum over u >= t of max(lam^(u - t), lam^t);
    outcome: w_t = lam^(n_i - 1 - t), gated GAE with V = 0 and one reward at the end, which is not the source's.
    Source: GRPO-lambda, Parthasarathi et al. 2025, arXiv 2510.00194, by its abstract and two public readings of its
    equations. There the trace sums log-probabilities inside the ratio, which is clipped as a whole; at ratio 1 its gradient
    is that of these weights, and farther off it is not. Its floor for advantages is -0.1.
    Defaults: recent, lam 0.99, no floor. recent at lam 0 and outcome at 1 are `grpo`.
    Pitfall: under recent a token weighs up to 1 / (1 - lam), 100 times as much as under `grpo`, and the last ones least;
    under outcome half is lost every log(0.5) / log(lam) tokens, 69 at 0.99. A KL acts on groups of equal scores all the same.
    """

    lam: float = Field(0.99, ge=0, le=1)
    """Share of a token's credit that is passed to the token before it; gamma times lambda in the source."""
    trace: Literal["recent", "both", "outcome"] = "recent"
    """Which tokens weigh more. recent: those followed by many others. both: these, and the first ones. outcome: those near the
    end."""
    floor: float | None = Field(None, ge=-1000, le=0)
    """Group-relative outcomes below this are raised to it before the trace; null for no floor."""

    @property
    def grain(self) -> Literal["token", "sequence"]:
        return "token"

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import trace_weights

        outcome = self._relative(rollout)
        outcome = outcome if self.floor is None else outcome.clamp(min=self.floor)
        return Credit(outcome.unsqueeze(1) * trace_weights(rollout.mask, self.lam, self.trace).to(outcome.dtype))
