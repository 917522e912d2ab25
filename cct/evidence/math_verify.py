"""The verifier for mathematical answers, by the library math-verify."""

from __future__ import annotations

import logging
from typing import Literal

from pydantic import Field

from cct.registry import optional
from cct.rollout import Prompt, Response

from .base import Evidence, evidences


@evidences.register("math_verify")
class MathVerify(Evidence):
    """1 where the response's answer equals the gold answer as mathematics, else 0; needs the extra `.[math]`."""

    on_error: Literal["fail", "zero", "drop"] = "zero"
    """Where judging raises or takes too long, as wrong answers can make it: stop the run, count 0, or drop the response."""
    workers: int = Field(2, ge=0, le=256)
    """Processes that judge beside the trainer; 0 judges in the trainer's own and needs `time_limit: null`."""
    time_limit: float | None = Field(10.0, gt=0, le=86400)
    """Seconds for one response, after which its worker is ended and replaced; null for no limit."""

    def ready(self) -> None:
        optional("math_verify", "math")

    def __call__(self, prompt: Prompt, response: Response) -> float:
        library = optional("math_verify", "math")
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
        gold = prompt.answer
        if "$" not in gold and "\\boxed" not in gold:  # of a bare 2\sqrt{3} it would read the 2
            gold = f"\\boxed{{{gold}}}"
        # Its own time limits are alarms in the main thread; the worker's stands instead.
        right, found = (library.parse(text, parsing_timeout=None) for text in (gold, response.text))
        if not right:
            raise ValueError(f"the gold answer {prompt.answer!r} cannot be read as mathematics")
        return float(library.verify(right, found, timeout_seconds=None))
