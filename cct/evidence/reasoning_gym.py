"""The scorers of the library reasoning-gym."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from cct.registry import optional
from cct.rollout import Prompt, Response
from cct.system.patterns import Pattern, last_match

from .base import Evidence, evidences


@evidences.register("reasoning_gym")
class ReasoningGymScore(Evidence):
    """The score of reasoning-gym's scorer, for problems of the task reasoning_gym."""

    pattern: Pattern | None = None
    """Regular expression; the first group of its last match is the answer. Null uses the whole response, stripped."""
    partial: bool = True
    """Keep scores between 0 and 1; false counts anything below 1 as 0."""

    def ready(self) -> None:
        optional("reasoning_gym", "reasoning-gym")

    def unreadable(self, prompt: Prompt) -> str | None:
        known = {"dataset", "config", "entry"} <= prompt.meta.keys()
        return None if known else "it scores only problems of the task reasoning_gym; this prompt is not one"

    def __call__(self, prompt: Prompt, response: Response) -> float:
        if reason := self.unreadable(prompt):
            raise ValueError(reason)
        answer = response.text.strip() if self.pattern is None else last_match(self.pattern, response.text)
        scorer = _scorer(prompt.meta["dataset"], json.dumps(prompt.meta["config"]))
        score = float(scorer(answer, prompt.meta["entry"])) if answer is not None else 0.0
        return score if self.partial or score >= 1 else 0.0

    @property
    def example(self) -> Prompt:
        config = {"min_terms": 2, "max_terms": 2}
        entry = optional("reasoning_gym", "reasoning-gym").create_dataset("chain_sum", seed=0, size=1, **config)[0]
        return Prompt(entry["question"], entry["answer"], {"dataset": "chain_sum", "config": config, "entry": entry})


@lru_cache(maxsize=256)
def _scorer(name: str, config: str) -> Callable[[str, dict[str, Any]], float]:
    return optional("reasoning_gym", "reasoning-gym").create_dataset(name, seed=0, size=1, **json.loads(config)).score_answer
