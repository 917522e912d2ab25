"""Geometry: how advantages become a policy change.

The tensor functions are public here and live in `functional`, which imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import ppo_clip  # noqa: F401  (registration)
from .base import Geometry, geometries

if TYPE_CHECKING:
    from .functional import aggregate, aggregation_weights, correction_weights, kl_estimate, ppo_clip_loss

__all__ = [
    "Geometry",
    "aggregate",
    "aggregation_weights",
    "correction_weights",
    "geometries",
    "kl_estimate",
    "ppo_clip_loss",
]


def __getattr__(name: str) -> Any:  # torch is imported when a tensor function is first asked for
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import functional

    return getattr(functional, name)
