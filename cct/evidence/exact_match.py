"""The verifier for tasks with one right string."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from cct.rollout import Prompt, Response

from .base import Evidence, evidences


@evidences.register("exact_match")
class ExactMatch(Evidence):
    """1 where the extracted answer equals the gold answer, else 0."""

    pattern: str = Field(r"#\s*(\S+)\s*$", min_length=1)
    """Regular expression; the first group of its last match is the answer (the whole match if it has no group)."""
    ignore_case: bool = False
    """Compare without regard to case."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern

    def extract(self, text: str) -> str | None:
        """The answer in a response, stripped; None where there is none."""
        matches = list(re.finditer(self.pattern, text))
        if not matches:
            return None
        return (matches[-1].group(1 if matches[-1].re.groups else 0) or "").strip()

    def __call__(self, prompt: Prompt, response: Response) -> float:
        found, gold = self.extract(response.text), prompt.answer.strip()
        if found is None:
            return 0.0
        return float(found.lower() == gold.lower() if self.ignore_case else found == gold)
