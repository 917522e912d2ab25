"""Transport: the operators that carry evidence back along the tokens, and the gates that meter it.

The tensor functions (`gated_gae`, `group_advantage`, ...) are public here and live in `functional`,
which imports torch; the components' knobs do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import baselines, distill, entropy, exact, gae, gate, group, reinforce, reweight, segments, traces, turns  # noqa: F401
from .base import Gate, Transport, Wrapper, gates, transports

if TYPE_CHECKING:
    from .functional import (
        bi_level_gae,
        decoupled_advantage,
        distillation_advantage,
        entropy_weighted_advantage,
        explained_variance,
        explained_variance_within,
        gated_gae,
        gigpo_advantage,
        greedy_advantage,
        group_advantage,
        high_entropy_mask,
        informative_rescale,
        lead_advantage,
        length_adaptive_lambda,
        optimal_token_advantage,
        pass_at_k_advantage,
        retrace,
        scan,
        segment_advantage,
        token_returns,
        trace_weights,
        turn_gae,
        turn_return,
        vtrace,
        whiten,
    )

__all__ = [
    "Gate",
    "Transport",
    "Wrapper",
    "bi_level_gae",
    "decoupled_advantage",
    "distillation_advantage",
    "entropy_weighted_advantage",
    "explained_variance",
    "explained_variance_within",
    "gated_gae",
    "gates",
    "gigpo_advantage",
    "greedy_advantage",
    "group_advantage",
    "high_entropy_mask",
    "informative_rescale",
    "lead_advantage",
    "length_adaptive_lambda",
    "optimal_token_advantage",
    "pass_at_k_advantage",
    "retrace",
    "scan",
    "segment_advantage",
    "token_returns",
    "trace_weights",
    "transports",
    "turn_gae",
    "turn_return",
    "vtrace",
    "whiten",
]


def __getattr__(name: str) -> Any:  # torch is imported when a tensor function is first asked for
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import functional

    return getattr(functional, name)
