"""Critic-free transports: the score of a response against a baseline that no critic has to learn.

Most are one function, `group_advantage`, with another baseline and another scale; each name is a shell with its own
defaults. `like` sets the conventions of a public framework: numbers, not code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from cct.rollout import Credit, Rollout

from .base import Transport, transports

if TYPE_CHECKING:
    from torch import Tensor


# The frameworks' conventions were last read at verl 1dda039 (2026-08-22), TRL f2cd577 (1.10.0.dev0, 2026-07-24), OpenRLHF
# 3c3be62 (0.11.0, 2026-08-13) and NeMo RL 7ea279a (2026-08-22); the file and function stand beside each `presets`.


class _CriticFree(Transport):
    """A transport of rewards and groups alone, with `like`."""

    reads_policy = False
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    """Framework -> the knobs that are its conventions."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        like = data.get("like") if isinstance(data, dict) else None
        return {**cls.presets[like], **data} if isinstance(like, str) and like in cls.presets else data

    @model_validator(mode="after")
    def _agree(self) -> _CriticFree:
        like = getattr(self, "like", None)
        for knob, value in self.presets.get(like or "", {}).items():
            if (found := getattr(self, knob)) != value:
                raise ValueError(f"`like: {like}` means {knob}: {value}, and {knob} is {found}; leave out one of the two")
        return self

    def default_of(self, knob: str) -> Any:
        return self.presets.get(getattr(self, "like", None) or "", {}).get(knob, super().default_of(knob))


def _of_a_deviation(used: bool) -> dict[str, str]:
    return {} if used else dict.fromkeys(("eps", "ddof"), "with std: false nothing is divided by a deviation")


class _Group(_CriticFree):
    """One number per response, from the scores of its group, on each of its tokens."""

    single: Literal["zero", "raw"] = "zero"
    """What a response alone in its group gets, as the others were dropped: nothing, or its score as it is."""

    @property
    def waives(self) -> dict[str, str]:
        return {} if self.single == "zero" else {"equal": "single: raw keeps the score of a response alone in its group"}

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"groups"})

    @property
    def grain(self) -> Literal["token", "sequence"]:
        return "sequence"

    def _outcome(self, rollout: Rollout, **kinds: Any) -> Tensor:
        """`group_advantage`, [B], of the given kinds and this component's own knobs."""
        from .functional import group_advantage

        knobs = {name: getattr(self, name) for name in ("single", "eps", "ddof") if name in type(self).model_fields}
        return group_advantage(rollout.scores, rollout.groups, valid=rollout.valid, **knobs, **kinds)


def _on_every_token(outcome: Tensor, rollout: Rollout) -> Credit:
    return Credit(outcome.unsqueeze(1) * rollout.mask)


@transports.register("grpo")
class GRPO(_Group):
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
    """Take eps, ddof, single and leave_one_out from this framework; one that is given as well has to agree."""
    leave_one_out: bool = False
    """Mean and deviation of the other responses only. Where these all score the same nothing is divided: the one success of
    a group then gets 1, where the group's deviation would give it more."""
    std: bool = True
    """Divide by the standard deviation; off is Dr. GRPO (Liu et al. 2025), or RLOO with leave_one_out."""
    eps: float = Field(1e-6, gt=0, le=1)
    """Added to the standard deviation."""
    ddof: Literal[0, 1] = 1
    """Divide the sum of squares by n - ddof: 1 is torch's default, 0 numpy's."""

    @property
    def unread(self) -> dict[str, str]:
        return _of_a_deviation(self.std)

    def _relative(self, rollout: Rollout) -> Tensor:
        """The number of each response, [B]."""
        if self.leave_one_out:
            return self._outcome(rollout, baseline="leave_one_out", scale="others" if self.std else "none")
        return self._outcome(rollout, scale="group" if self.std else "none")

    def __call__(self, rollout: Rollout) -> Credit:
        return _on_every_token(self._relative(rollout), rollout)


@transports.register("dr_grpo")
class DrGRPO(_Group):
    """GRPO without the division by the group's standard deviation (Liu et al. 2025).

    A_it = s_i - mean of the group, [B, T], the same at each token.
    Source: arXiv 2503.20783.
    Pitfall: this is half of Dr. GRPO. The other half is in the loss, which must not divide by a response's length:
    `geometry.aggregation: sequence_sum_over_constant`. A KL acts on groups of equal scores all the same.
    """

    # As for grpo, without the division: norm_adv_by_std_in_grpo=False, scale_rewards="none", dr_grpo.
    presets = {"verl": {"single": "raw"}, "trl": {"single": "zero"}, "openrlhf": {"single": "zero"}}
    like: Literal["verl", "trl", "openrlhf"] | None = None
    """Take `single` from this framework; where it is given as well it has to agree."""

    def __call__(self, rollout: Rollout) -> Credit:
        return _on_every_token(self._outcome(rollout, scale="none"), rollout)


@transports.register("rloo")
class RLOO(_Group):
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
    """Take `single` from this framework; where it is given as well it has to agree."""

    def __call__(self, rollout: Rollout) -> Credit:
        return _on_every_token(self._outcome(rollout, baseline="leave_one_out", scale="none"), rollout)


@transports.register("opo")
class OPO(_Group):
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
    """Take `single` from this framework; where it is given as well it has to agree."""

    def __call__(self, rollout: Rollout) -> Credit:
        lengths = rollout.mask.sum(1)
        return _on_every_token(self._outcome(rollout, baseline="length_weighted", scale="none", lengths=lengths), rollout)


@transports.register("gpg")
class GPG(_Group):
    """Score minus its group's mean, scaled up by the share of responses that teach nothing (Chu et al. 2025).

    A_it = alpha (s_i - mean) [/ (deviation + eps)], alpha = responses / responses of groups whose scores differ; [B, T],
    the same at each token.
    Source: arXiv 2504.02546. Default: no division (its F_norm = 1), ddof 1 where there is one.
    Pitfall: alpha grows as fewer groups teach, so the noisiest rounds take the largest steps; watch `advantage/std`.
    A KL acts on groups of equal scores all the same.
    """

    # verl: core_algos.py, compute_gpg_outcome_advantage with f_norm = 1.
    presets = {"verl": {"std": False, "rescale": "nonzero_scores", "single": "raw"}}
    like: Literal["verl"] | None = None
    """Take std, rescale and single from this framework; one that is given as well has to agree."""
    rescale: Literal["groups", "nonzero_scores", "none"] = "groups"
    """What alpha divides by: responses of groups whose scores differ, responses whose score is not 0; or no alpha."""
    std: bool = False
    """Divide by the group's standard deviation too."""
    eps: float = Field(1e-6, gt=0, le=1)
    """Added to the standard deviation."""
    ddof: Literal[0, 1] = 1
    """Divide the sum of squares by n - ddof."""

    @property
    def unread(self) -> dict[str, str]:
        return _of_a_deviation(self.std)

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import informative_rescale

        outcome = self._outcome(rollout, scale="group" if self.std else "none")
        if self.rescale != "none":
            outcome = informative_rescale(outcome, rollout.scores, rollout.groups, by=self.rescale, valid=rollout.valid)
        return _on_every_token(outcome, rollout)


@transports.register("lite_ppo")
class LitePPO(_Group):
    """Score minus its group's mean, over the deviation of the whole batch's scores (Liu et al. 2025).

    A_it = (s_i - mean of the group) / (deviation of all scores + eps), [B, T], the same at each token.
    Source: arXiv 2508.08221, with `aggregation: token_mean`. Defaults: ddof 1, eps 1e-6.
    Pitfall: the deviation holds the differences between prompts too, so advantages shrink as the prompts get more mixed.
    A KL acts on groups of equal scores all the same.
    """

    # TRL: grpo_trainer.py with scale_rewards="batch".
    presets = {"trl": {"eps": 1e-4, "ddof": 1, "single": "zero"}}
    like: Literal["trl"] | None = None
    """Take eps, ddof and single from this framework; one that is given as well has to agree."""
    eps: float = Field(1e-6, gt=0, le=1)
    """Added to the standard deviation."""
    ddof: Literal[0, 1] = 1
    """Divide the sum of squares by n - ddof."""

    def __call__(self, rollout: Rollout) -> Credit:
        return _on_every_token(self._outcome(rollout, scale="batch"), rollout)


@transports.register("grpo_pass_at_k")
class GRPOPassAtK(_CriticFree):
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
    """Take credit, eps and ddof from this framework; one that is given as well has to agree."""
    credit: Literal["subsets", "lead"] = "subsets"
    """Over all k-subsets; or the lead of the best response, which is pass@k with k the whole group."""
    k: int = Field(4, ge=1, le=1024)
    """Responses of which the best counts, with `subsets`; 1 is GRPO with ddof 0."""
    std: bool = True
    """With `lead`, divide by the group's standard deviation."""
    eps: float = Field(1e-6, gt=0, le=1)
    """With `lead`, added to the standard deviation."""
    ddof: Literal[0, 1] = 1
    """With `lead`, divide the sum of squares by n - ddof."""

    @property
    def unread(self) -> dict[str, str]:
        if self.credit == "subsets":
            return dict.fromkeys(("std", "eps", "ddof"), "credit: subsets has a deviation of its own, that of the best of k")
        return {"k": "credit: lead takes the whole group"} | _of_a_deviation(self.std)

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
            return _on_every_token(pass_at_k_advantage(*where, k=self.k, valid=rollout.valid), rollout)
        outcome = lead_advantage(*where, std=self.std, eps=self.eps, ddof=self.ddof, valid=rollout.valid)
        return _on_every_token(outcome, rollout)


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
    """What of a token's part goes on to the token before it; gamma times lambda of the source."""
    trace: Literal["recent", "both", "outcome"] = "recent"
    """Which tokens weigh more: those before many others; these and the first ones too; those near the end."""
    floor: float | None = Field(None, ge=-1000, le=0)
    """Outcomes of the group below it count as it, before the trace; null for none."""

    @property
    def grain(self) -> Literal["token", "sequence"]:
        return "token"

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import trace_weights

        outcome = self._relative(rollout)
        outcome = outcome if self.floor is None else outcome.clamp(min=self.floor)
        return Credit(outcome.unsqueeze(1) * trace_weights(rollout.mask, self.lam, self.trace).to(outcome.dtype))


class _Whitened(_CriticFree):
    """Advantages shifted and scaled over the whole batch."""

    unit: Literal["tokens", "responses"] = "tokens"
    """What counts as one in the batch's mean and deviation; with tokens, long responses weigh more."""
    ddof: Literal[0, 1] = 0
    """Divide the sum of squares by n - ddof."""
    eps: float = Field(1e-8, gt=0, le=1)
    """Keeps the division finite, as eps_at says."""
    eps_at: Literal["std", "variance", "floor"] = "std"
    """Add eps to the standard deviation, add it to the variance, or let the variance be no less."""

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
class ReinforcePP(_Whitened):
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
    """Take unit, ddof, eps, eps_at and gap from this framework; one that is given as well has to agree."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token."""
    gap: Literal["carry", "decay", "cut"] = "carry"
    """What tokens that the policy did not emit do to credit that crosses them: nothing, decay it, stop it."""

    @property
    def waives(self) -> dict[str, str]:
        found = {} if self.gap == "carry" else {"gap": f"gap: {self.gap} lets masked tokens count"}
        return found | ({"observation": "gap: decay counts masked tokens"} if self.gap == "decay" else {})

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import token_returns

        return self._whiten(token_returns(rollout.rewards, rollout.mask, gamma=self.gamma, gap=self.gap), rollout)


@transports.register("reinforce_pp_baseline")
class ReinforcePPBaseline(_Whitened, _Group):
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
    """Take unit, ddof, eps, eps_at and single from this framework; one that is given as well has to agree."""

    unit: Literal["tokens", "responses"] = "responses"
    """What counts as one in the batch's mean and deviation. Tokens, which let a long response weigh more, only by `like`."""

    @property
    def whitens(self) -> Literal["token", "sequence"] | None:
        return super().whitens if self.like is None else None  # a framework's convention, asked for by its name

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import group_advantage

        outcome = group_advantage(rollout.scores, rollout.groups, scale="none", single=self.single, valid=rollout.valid)
        return self._whiten(outcome.unsqueeze(1) * rollout.mask, rollout)


@transports.register("remax")
class ReMax(_CriticFree):
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
    """Take reward_to_go from this framework; where it is given as well it has to agree."""
    reward_to_go: bool = False
    """Give a token the rewards from it on rather than all; the same where the only reward is at the end."""

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
