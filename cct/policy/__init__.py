"""Policy: the language model, what is read off its forward, and the engines it generates with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import models  # noqa: F401  (registration)
from .base import Policy, WarmStart, policies
from .generation import Generation, engines

if TYPE_CHECKING:
    from .agent import Agent
    from .attention import attention_concentration, tap

__all__ = ["Agent", "Generation", "Policy", "WarmStart", "attention_concentration", "engines", "policies", "tap"]


def __getattr__(name: str) -> Any:  # torch is imported when a tensor function is first asked for
    if name == "Agent":
        from .agent import Agent

        return Agent
    if name in ("attention_concentration", "tap"):
        from . import attention

        return getattr(attention, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
