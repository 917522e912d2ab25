"""The verifier for tasks with one right string."""

from __future__ import annotations

from pydantic import Field

from cct.patterns import Pattern, last_match
from cct.rollout import Prompt, Response

from .base import Evidence, evidences


@evidences.register("exact_match")
class ExactMatch(Evidence):
    """1 where the extracted answer equals the gold answer, else 0."""

    pattern: Pattern = Field(r"#\s*(\S+)\s*$", min_length=1)
    """Regular expression; the first group of its last match is the answer (the whole match if it has no group)."""
    ignore_case: bool = False
    """Compare without regard to case."""

    def extract(self, text: str) -> str | None:
        """The answer in a response, stripped; None where there is none."""
        return last_match(self.pattern, text)

    def __call__(self, prompt: Prompt, response: Response) -> float:
        found, gold = self.extract(response.text), prompt.answer.strip()
        if found is None:
            return 0.0
        return float(found.lower() == gold.lower() if self.ignore_case else found == gold)
