"""The verifier for tasks with one right string."""

from __future__ import annotations

import re

from pydantic import Field

from cct.rollout import Prompt, Response
from cct.system.patterns import Pattern, last_match

from .base import Evidence, evidences

_DECIMAL = re.compile(r"^([-+]?(?:0|[1-9]\d*))(?:\.0+|(\.\d*[1-9])0+)$")


@evidences.register("exact_match")
class ExactMatch(Evidence):
    """1 if the extracted answer equals the gold answer, else 0; trailing zeros of a decimal are ignored, so `6.0` is `6`."""

    pattern: Pattern = Field(r"#\s*(\S+)\s*$", min_length=1)
    """Regular expression; the first group of its last match is the answer (the whole match if it has no group)."""
    ignore_case: bool = False
    """Compare without regard to case."""

    def extract(self, text: str) -> str | None:
        """The answer in a response, stripped; None where there is none."""
        return last_match(self.pattern, text)

    def __call__(self, prompt: Prompt, response: Response) -> float:
        found = self.extract(response.text)
        if found is None:
            return 0.0
        found, gold = (_DECIMAL.sub(r"\1\2", text) for text in (found, prompt.answer.strip()))
        return float(found.lower() == gold.lower() if self.ignore_case else found == gold)
