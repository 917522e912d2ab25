"""The conformance suite: what a part must be to be exchanged for another of its axis.

    verdicts = check(transports["gae"](lam=0.9))

Every property is a statement about any input. Hypothesis (extra `.[check]`) looks for an input that breaks it
and shrinks what it finds. Some properties are for those who claim them, in `Component.claims`; some may be
given up with a reason, in `Component.waives`; the others are what every part of the axis must be.
`cct check-operator` prints the verdicts and the tests take them, over every registered component.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import AXES, Verdict

if TYPE_CHECKING:
    from .suite import check, properties

__all__ = ["AXES", "Verdict", "check", "properties"]


def __getattr__(name: str) -> Any:  # torch is imported when the suite is first asked for
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import suite

    return getattr(suite, name)
