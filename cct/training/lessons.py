"""What the critic learns from: responses and their value targets, of this iteration and of those before it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from cct.critic.functional import rank_in_group
from cct.rollout import Rollout

from .batching import Size


@dataclass(frozen=True)
class Lesson:
    """One iteration's. Traces are not kept: the policy that is there when a lesson is gone over again makes new ones."""

    input_ids: Tensor  # [B, S]
    attention_mask: Tensor  # [B, S]
    mask: Tensor  # [B, T] bool
    numbers: Tensor  # [B] of each response among those to its prompt
    targets: Tensor  # [B, T]

    @classmethod
    def of(cls, rollout: Rollout, targets: Tensor) -> Lesson:
        return cls(rollout.input_ids, rollout.attention_mask, rollout.mask, rank_in_group(rollout.groups), targets)

    @property
    def saved(self) -> dict[str, Tensor]:
        """As it stands in a checkpoint."""
        return {field.name: getattr(self, field.name).cpu() for field in fields(self)}

    @property
    def prompt_width(self) -> int:
        return self.input_ids.shape[1] - self.mask.shape[1]

    @property
    def sizes(self) -> list[Size]:
        """Tokens of each response and of its prompt."""
        prompt = self.prompt_width
        return list(
            zip(self.attention_mask[:, prompt:].sum(1).tolist(), self.attention_mask[:, :prompt].sum(1).tolist(), strict=True)
        )
