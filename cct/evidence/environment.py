"""What an episode's environment gave, as evidence."""

from __future__ import annotations

from pydantic import Field, model_validator

from .base import Evidence, evidences, in_order


@evidences.register("environment")
class FromEnvironment(Evidence):
    """The rewards that the environment gave, each at the last token of its turn."""

    component: str | None = None
    """Name of the reward to use, if the environment names several; null for their sum."""
    low: float = Field(0.0, ge=-1e6, le=1e6)
    """Lowest total of an episode."""
    high: float = Field(1.0, ge=-1e6, le=1e6)
    """Highest total of an episode."""

    _ordered = model_validator(mode="after")(in_order)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"environment"})

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high

    def __call__(self, prompt, response):
        rewards, end = [0.0] * len(response.tokens), 0
        for turn in response.turns:
            end += turn.tokens
            given = turn.rewards
            rewards[max(0, end - 1)] += sum(given.values()) if self.component is None else given.get(self.component, 0.0)
        return rewards
