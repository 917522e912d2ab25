"""Evidence on the shape of a response: its format and its length."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from cct.rollout import Prompt, Response
from cct.system.patterns import Pattern, matches

from .base import Evidence, evidences


@evidences.register("format")
class Format(Evidence):
    """1 if the response matches a regular expression, else 0."""

    pattern: Pattern = Field(min_length=1)
    """Regular expression; `(?s)` at its beginning lets a dot also match a newline."""
    match: Literal["full", "contains"] = "full"
    """Whether the whole response must match, or a part of it."""

    def __call__(self, prompt: Prompt, response: Response) -> float:
        return float(matches(self.pattern, response.text, full=self.match == "full"))


@evidences.register("length")
class Length(Evidence):
    """The soft overlong penalty of DAPO: 0 up to a length, then falling to -1."""

    max_tokens: int = Field(ge=1)
    """Length at which the penalty is -1; usually generation.max_new_tokens."""
    buffer: int = Field(ge=0)
    """The penalty falls from 0 to -1 over this many tokens before max_tokens; 0 makes a sharp edge after it."""

    @model_validator(mode="after")
    def _fits(self) -> Length:
        if self.buffer > self.max_tokens:
            raise ValueError(f"buffer ({self.buffer}) must not exceed max_tokens ({self.max_tokens})")
        return self

    def __call__(self, prompt: Prompt, response: Response) -> float:
        over = len(response.tokens) - (self.max_tokens - self.buffer)
        return -min(1.0, over / self.buffer if self.buffer else 1.0) if over > 0 else 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        return -1.0, 0.0
