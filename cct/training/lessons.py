"""What the critic learns from: responses and their value targets, of this iteration and of those before it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from cct.critic.functional import rank_in_group
from cct.geometry.functional import aggregation_weights
from cct.recipe import Recipe
from cct.rollout import Rollout, Trace

from .agent import Agent
from .batching import Minibatch, Size, trimmed


def what_lessons_are_of(recipe: Recipe) -> str:
    """All of a recipe that decides on responses and value targets, as JSON: the critic's window holds iterations under one.

    Others would teach it two targets at once, and have minibatches of another size.
    """
    training = ("prompts_per_iteration", "responses_per_prompt", "bootstrap_truncated")
    content = recipe.model_dump(mode="json", include={"task", "generation", "evidence", "transport", "critic"})
    content["geometry"] = {knob: getattr(recipe.geometry, knob) for knob in ("kl_in_reward", "kl_estimator")}
    content["training"] = {knob: getattr(recipe.training, knob) for knob in training}
    return json.dumps(content, sort_keys=True)


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

    @torch.no_grad()
    def read_by(self, agent: Agent, mine: Sequence[list[int]]) -> list[Trace]:
        """What the critic reads as the present policy makes it, for the rows of each of a process's forwards."""
        traces = []
        for rows in mine:
            columns, width = trimmed(self, rows)
            trace = agent(self.input_ids[rows, columns], self.attention_mask[rows, columns], width, with_critic=True).trace
            assert trace is not None
            traces.append(trace)
        return traces

    def minibatches(self, mine: Sequence[list[int]], traces: Sequence[Trace], size: int) -> list[Minibatch]:
        """A process's part of each minibatch of so many responses, those of one minibatch together."""
        weights = torch.cat([aggregation_weights(mask) for mask in self.mask.split(size)])
        found = []
        for rows, trace in zip(mine, traces, strict=True):
            columns, width = trimmed(self, rows)
            found.append(
                Minibatch(
                    self.input_ids[rows, columns],
                    self.attention_mask[rows, columns],
                    self.mask[rows, :width],
                    weights[rows, :width],
                    trace,
                    self.numbers[rows],
                    self.targets[rows, :width],
                )
            )
        return found
