"""Geometry: how advantages become a policy change.

The tensor functions are public here and live in `functional`, which imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import covariance, ppo_clip, sequence, weighted  # noqa: F401  (registration)
from .base import Geometry, geometries

if TYPE_CHECKING:
    from .functional import (
        aggregate,
        aggregation_weights,
        cispo_loss,
        clip_cov_loss,
        correction_weights,
        dis_loss,
        dppo_loss,
        gmpo_loss,
        gspo_loss,
        gspo_token_loss,
        kl_cov_loss,
        kl_estimate,
        kl_loss,
        mark_some_covariances,
        mark_top_covariances,
        policy_gradient_loss,
        ppo_clip_loss,
        sapo_loss,
        token_covariances,
        topr_loss,
        vespo_loss,
    )

__all__ = [
    "Geometry",
    "geometries",
    "aggregate",
    "aggregation_weights",
    "cispo_loss",
    "clip_cov_loss",
    "correction_weights",
    "dis_loss",
    "dppo_loss",
    "gmpo_loss",
    "gspo_loss",
    "gspo_token_loss",
    "kl_cov_loss",
    "kl_estimate",
    "kl_loss",
    "mark_some_covariances",
    "mark_top_covariances",
    "policy_gradient_loss",
    "ppo_clip_loss",
    "sapo_loss",
    "token_covariances",
    "topr_loss",
    "vespo_loss",
]


def __getattr__(name: str) -> Any:  # torch is imported when a tensor function is first asked for
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import functional

    return getattr(functional, name)
