"""Critics made of critics: an ensemble of small ones, and one that shares its say with the group's mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from .base import Critic, critics
from .critic import TAC

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from cct.rollout import Rollout

    from .towers import Tower


@critics.register("mini_critics")
class MiniCritics(Critic):
    """Small critics, each taught on responses of its own; the value is their mean (AsyPPO, Liu et al. 2025).

    How far they disagree, their standard deviation, is `value_disagreement` among the rollout's statistics, by which the
    transport `disagreement` masks advantages. Each learns from 1 / `count` of the responses only.
    Source: arXiv 2510.01656, its text by its abstract and public summaries. Its other use of the disagreement, leaving
    states out of an entropy bonus, is absent as there is no such bonus.
    """

    of: Annotated[Critic, critics] = TAC(width=32, depth=1)
    """What each of them is."""
    count: int = Field(2, ge=2, le=64)
    """How many."""
    split: Literal["responses", "prompts"] = "responses"
    """responses: those to each prompt are dealt out evenly, so that every critic knows every prompt (the source). prompts: a
    prompt belongs to one critic by its tokens, and stays there when it comes again; with few prompts some learn nothing."""

    @model_validator(mode="after")
    def _of_single_ones(self) -> MiniCritics:
        if isinstance(self.of, MiniCritics | GroupMean):
            raise ValueError(f"mini_critics are of single critics, not of '{self.of.use}'; it may stand around them instead")
        return self

    @property
    def needs(self) -> frozenset[str]:
        return self.of.needs

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"values", "disagreement"})

    @property
    def bounded(self) -> bool:
        return self.of.bounded

    def build(self, actor: PreTrainedModel, bounds: tuple[float, float]) -> Tower:
        from .towers import EnsembleTower

        return EnsembleTower([self.of.build(actor, bounds) for _ in range(self.count)], self.split)


@critics.register("group_mean")
class GroupMean(Critic):
    """Between the group's mean and a critic: (1 - weight) mean of the other responses' targets + weight V.

    The mean is of the value targets at the first token, gated where the transport's are: the prompt's level, which the
    critic need not know. It is the same at every token, so a discount below 1 makes it too low for late ones. A response
    that is alone in its group, the others dropped, has the critic alone.
    """

    of: Annotated[Critic, critics] = TAC()
    """The critic; it learns as it would by itself."""
    weight: float = Field(0.5, ge=0, le=1)
    """The critic's share: 1 is the critic, 0 a leave-one-out baseline."""
    leave_one_out: bool = True
    """Without the response's own target, so that the baseline does not know what it judges."""

    @model_validator(mode="after")
    def _around_a_critic(self) -> GroupMean:
        if isinstance(self.of, GroupMean):
            raise ValueError("a group_mean of a group_mean is one with the product of their weights")
        return self

    @property
    def unread(self) -> dict[str, str]:
        return {"leave_one_out": "with weight: 1 the group's mean does not count"} if self.weight == 1 else {}

    @property
    def needs(self) -> frozenset[str]:
        return self.of.needs | {"groups"}

    @property
    def provides(self) -> frozenset[str]:
        return self.of.provides

    @property
    def bounded(self) -> bool:
        return self.of.bounded

    def build(self, actor: PreTrainedModel, bounds: tuple[float, float]) -> Tower:
        return self.of.build(actor, bounds)

    def baseline(self, rollout: Rollout, targets: Tensor) -> Rollout | None:
        from .functional import group_mean

        assert rollout.values is not None
        first = rollout.mask.int().argmax(1, keepdim=True)
        mean, known = group_mean(
            targets.gather(1, first).squeeze(1), rollout.groups, rollout.valid, leave_one_out=self.leave_one_out
        )
        share = (1 - self.weight) * known.to(mean.dtype)  # of the group
        values = rollout.values * (1 - share).unsqueeze(1) + (share * mean).unsqueeze(1)
        after = rollout.bootstrap
        if after is not None:
            after = (after * (1 - share) + share * mean) * rollout.truncated
        return rollout.replace(values=values, bootstrap=after)
