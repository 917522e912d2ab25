"""Policy: the language model, what is read off its forward, and the engines it generates with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import builtin, models  # noqa: F401  (registration)
from .base import WARM_START_SEED, LoRA, Policy, Shape, WarmStart, end_tokens, policies
from .generation import Generation, engines

if TYPE_CHECKING:
    from .attention import Runs, attention_concentration, kernel_of, tap, tappable

__all__ = [
    "Generation",
    "LoRA",
    "Policy",
    "Runs",
    "Shape",
    "WARM_START_SEED",
    "WarmStart",
    "attention_concentration",
    "end_tokens",
    "engines",
    "kernel_of",
    "policies",
    "tap",
    "tappable",
]


def __getattr__(name: str) -> Any:  # torch is imported when a tensor function is first asked for
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import attention

    return getattr(attention, name)
