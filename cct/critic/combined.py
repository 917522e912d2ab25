"""Critics made of critics: an ensemble of small ones, and two that share their say with the group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

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
    """Small critics, each trained on different responses; the value is their mean (AsyPPO, Liu et al. 2025).

    How far they disagree, their standard deviation, is `value_disagreement` among the rollout's statistics, by which the
    transport `disagreement` masks advantages. Each learns from 1 / `count` of the responses only.
    Source: arXiv 2510.01656, its text by its abstract and public summaries. Its other use of the disagreement, leaving
    states out of an entropy bonus, is absent as there is no such bonus.
    """

    of: Annotated[Critic, critics] = TAC(width=32, depth=1)
    """The kind of each critic."""
    count: int = Field(2, ge=2, le=64)
    """Number of critics."""
    split: Literal["responses", "prompts"] = "responses"
    """responses: the responses to each prompt are divided evenly, so every critic sees every prompt (as in the source).
    prompts: a prompt is assigned to one critic by its tokens, always to the same one; with few prompts, some critics learn
    nothing."""

    @model_validator(mode="after")
    def _of_single_ones(self) -> MiniCritics:
        if isinstance(self.of, MiniCritics | GroupCritic):
            raise ValueError(
                f"mini_critics combine single critics, not '{self.of.use}'; use {self.of.use} with `of: mini_critics` instead"
            )
        return self

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"values", "disagreement"})

    @property
    def waives(self) -> dict[str, str]:
        return {}  # what is waived is of a critic's head, which the ensemble replaces

    @property
    def bounded(self) -> bool:
        return self.of.bounded

    def build(self, actor: PreTrainedModel, bounds: tuple[float, float]) -> Tower:
        from .towers import EnsembleTower

        return EnsembleTower([self.of.build(actor, bounds) for _ in range(self.count)], self.split)


class GroupCritic(Critic):
    """A critic whose values the group changes before the transport reads them.

    It learns as it would by itself, but where its target bootstraps (a trace below 1, a response cut by the length limit): from
    the changed values, since that is what the transport makes targets of.
    """

    of: Annotated[Critic, critics] = TAC()
    """The critic. Its training targets change only if they bootstrap."""

    @model_validator(mode="after")
    def _around_a_critic_by_itself(self) -> Self:
        if isinstance(self.of, GroupCritic):
            raise ValueError(f"{self.use} needs a critic that does not use the group; '{self.of.use}' already does")
        return self

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"groups"}

    @property
    def provides(self) -> frozenset[str]:
        return self.of.provides

    @property
    def bounded(self) -> bool:
        return self.of.bounded

    def build(self, actor: PreTrainedModel, bounds: tuple[float, float]) -> Tower:
        return self.of.build(actor, bounds)


@critics.register("group_mean")
class GroupMean(GroupCritic):
    """A mix of group mean and critic: (1 - weight) * mean of the other responses' targets + weight * V.

    The mean is of the value targets at the first token, gated where the transport's are: the prompt's level, which the
    critic need not know. It is the same at every token, so a discount below 1 makes it too low for late ones. A response
    that is alone in its group, the others dropped, has the critic alone.
    """

    weight: float = Field(0.5, ge=0, le=1)
    """The critic's share: 1 is the critic, 0 a leave-one-out baseline."""
    leave_one_out: bool = True
    """Leave out the response's own target, so that its baseline does not depend on it."""

    @property
    def unread(self) -> dict[str, str]:
        return {"leave_one_out": "with weight: 1 the group's mean does not count"} if self.weight == 1 else {}

    def baseline(self, rollout: Rollout, targets: Tensor, bounds: tuple[float, float]) -> Rollout | None:
        from .functional import group_mean

        assert rollout.values is not None
        first = rollout.mask.int().argmax(1, keepdim=True)
        mean, count = group_mean(
            targets.gather(1, first).squeeze(1), rollout.groups, rollout.valid, leave_one_out=self.leave_one_out
        )
        share = (1 - self.weight) * (count > 0).to(mean.dtype)  # of the group
        values = rollout.values * (1 - share).unsqueeze(1) + (share * mean).unsqueeze(1)
        after = rollout.bootstrap
        if after is not None:
            after = (after * (1 - share) + share * mean) * rollout.truncated
        return rollout.replace(values=values, bootstrap=after)


@critics.register("group_level")
class GroupLevel(GroupCritic):
    """A critic at the group's level: its log-odds are shifted so that its value at the first token is the group's.

    That level is the mean of the value targets at the first token over the other responses to the prompt, gated where the
    transport's are, to which the critic's own value there counts as `prior` further ones. While the policy gets better faster
    than the critic learns, the critic goes on telling a response that went wrong from one that did not, and the group tells how
    often that is. A value much nearer to an end of the range than the first one stays near it, which under `group_mean` it does
    not. Pitfall: where the first value itself is near an end and the group is not, small differences beside it are stretched.
    """

    prior: float = Field(4.0, gt=0, le=1000)
    """Number of responses that the critic's value at the first token counts as."""

    @model_validator(mode="after")
    def _around_a_bounded_critic(self) -> GroupLevel:
        if not self.of.bounded:
            raise ValueError(
                f"group_level shifts log-odds within the range of rewards, but values of '{self.of.use}' may leave it; choose "
                "an output that is bounded"
            )
        return self

    def baseline(self, rollout: Rollout, targets: Tensor, bounds: tuple[float, float]) -> Rollout | None:
        from cct.tensors import at_least_float32

        from .functional import at_level, group_mean

        assert rollout.values is not None
        at_first = rollout.mask.int().argmax(1, keepdim=True)
        first = at_least_float32(rollout.values).masked_fill(~rollout.mask, bounds[0]).gather(1, at_first).squeeze(1)
        mean, count = group_mean(targets.gather(1, at_first).squeeze(1), rollout.groups, rollout.valid)
        level = (count * mean + self.prior * first) / (count + self.prior)
        after = rollout.bootstrap
        if after is not None:
            after = at_level(after.unsqueeze(1), first, level, bounds).squeeze(1) * rollout.truncated
        return rollout.replace(values=at_level(rollout.values, first, level, bounds), bootstrap=after)
