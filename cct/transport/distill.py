"""Learning from a teacher instead of rewards."""

from __future__ import annotations

from pydantic import Field

from cct.rollout import Credit, Rollout

from .base import Transport, transports


@transports.register("distill")
class Distill(Transport):
    """The teacher's log-probability of each sampled token minus the policy's own (on-policy distillation, Agarwal et al. 2024).

    A_it = log pi_teacher(y_it) - log pi(y_it), nats, [B, T], within [-bound, bound]; both at the sampling temperature. The
    recipe's `teacher` is frozen and has the policy's vocabulary. Rewards do not count; evidence is only logged.
    Sources: arXiv 2306.13649 (reverse KL on the student's own samples); Thinking Machines Lab 2025, "On-policy distillation"
    (as an advantage per token, without discount, which is done here).
    Pitfall: a token answers for itself alone, not for the states it leads to. Advantages are not centred: their mean is minus
    the KL to the teacher. The teacher reads the policy's prompts, chat template included.
    """

    bound: float | None = Field(None, gt=0, le=1000)
    """Largest size of an advantage, in nats; null for none. A token that the teacher hardly ever says has a large one below
    0."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"teacher"})

    @property
    def waives(self) -> dict[str, str]:
        return {"outcome": "it reads no rewards"}

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import distillation_advantage

        assert rollout.teacher_logprobs is not None
        return Credit(distillation_advantage(rollout.logprobs, rollout.teacher_logprobs, rollout.mask, bound=self.bound))
