"""Which properties an operator is held to, and the verdicts on them."""

from __future__ import annotations

from typing import Any

from cct.critic import Critic
from cct.environment import Environment
from cct.evidence import Evidence
from cct.geometry import Geometry
from cct.registry import Component
from cct.statistic import Statistic
from cct.transport import Gate, Transport

from . import cases, critics, environments, evidences, geometries, operators, statistics, transports
from .base import AXES, Property, Verdict, judge
from .watch import restored

EXAMPLES = 60
# A forward of a model, or a verifier, costs a hundred times as much as a transport.
SLOW = 3

SUITES: dict[type[Component], tuple[list[Property], Any, Any, int]] = {
    Transport: (transports.TRANSPORT, cases.cases, operators.show, 1),
    Gate: (operators.GATE, cases.cases, operators.show, 1),
    Statistic: (statistics.STATISTIC, critics.cases, critics.show, SLOW),
    Geometry: (geometries.GEOMETRY, cases.cases, geometries.show, 1),
    Critic: (critics.CRITIC, critics.cases, critics.show, SLOW),
    Evidence: (evidences.EVIDENCE, evidences.cases, evidences.show, SLOW),
    Environment: (environments.ENVIRONMENT, environments.cases, environments.show, SLOW),
}


def _suite(operator: Component) -> tuple[list[Property], Any, Any, int]:
    for base, suite in SUITES.items():
        if isinstance(operator, base):
            return suite
    raise ValueError(f"{type(operator).__name__} is of none of these axes: {', '.join(AXES)}")


def properties(operator: Component) -> list[Property]:
    """What an operator of its axis is held to."""
    return _suite(operator)[0]


def check(operator: Component, *, examples: int = EXAMPLES, only: str = "", shrink: bool = True) -> list[Verdict]:
    """A verdict on each property, or on the one named; the same every time.

    examples: inputs that each property is tried on; of slow axes a third of it. shrink: look for the
    smallest failing case. Raises ValueError where the operator is of another axis or Hypothesis is not installed.
    """
    found, strategy, show, slow = _suite(operator)
    with restored():  # an operator that changes torch's settings has changed them for nobody else
        return judge(operator, found, strategy(), max(1, examples // slow), lambda case: show(operator, case), only, shrink)
