"""Prompts without text: each is a seed, from which an environment makes the start of an episode."""

from __future__ import annotations

from pydantic import Field

from cct.rollout import Prompt, derive_seed

from .base import Task, tasks


@tasks.register("seeds")
class Seeds(Task):
    """Seeds instead of questions, for an environment that creates its starts from `prompt.meta["seed"]`."""

    held_out_size: int = Field(200, ge=1, le=10_000)
    """Seeds kept for evaluation, 0 to held_out_size - 1, and never trained on."""

    def held_out(self) -> list[Prompt]:
        return [Prompt("", meta={"seed": seed}) for seed in range(self.held_out_size)]

    def prompts(self, seed: int, start: int, count: int) -> list[Prompt]:
        free = 2**31 - self.held_out_size
        drawn = (self.held_out_size + derive_seed("seeds", seed, index) % free for index in range(start, start + count))
        return [Prompt("", meta={"seed": each}) for each in drawn]
