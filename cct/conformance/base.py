"""A property, a verdict, and how a property is judged."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from cct.registry import Component, optional

AXES = ("transport", "gate", "geometry", "critic", "evidence")

Outcome = Literal["ok", "FAILED", "does not apply"]
OK: Outcome = "ok"
FAILED: Outcome = "FAILED"
NOT: Outcome = "does not apply"


class Broken(AssertionError):
    """A property does not hold; the message says what was expected and what was found."""

    case: Any = None


@dataclass(frozen=True)
class Verdict:
    """What was found of one property."""

    property: str
    outcome: Outcome
    says: str
    """The property as a sentence."""
    why: str = ""
    """How it failed, or why it does not apply."""
    example: str = ""
    """The smallest failing case, as Python that can be pasted."""


@dataclass(frozen=True)
class Property:
    """A statement about any input.

    test(operator, case) raises Broken. cases: how many inputs to look at as a share of the examples asked for; 0: the
    test brings its own inputs, and gets None. claimed: where the operator claims it only, and why not every
    operator has it. waivable: an operator may give it up with a reason. excused: why it does not apply to this
    operator, or nothing.
    """

    name: str
    says: str
    test: Callable[[Any, Any], None]
    cases: float = 1.0
    claimed: str = ""
    waivable: bool = False
    excused: Callable[[Any], str] = lambda operator: ""


def hypothesis() -> Any:
    """The library. Raises ValueError naming the extra where it is missing."""
    library = optional("hypothesis", "check")
    optional("hypothesis.configuration", "check").set_hypothesis_home_dir(tempfile.gettempdir())  # nothing is kept here
    return library


def search(test: Callable[[Any], None], cases: Any, examples: int, *, shrink: bool = True) -> Broken | None:
    """Look for a case that breaks the test and shrink it; the same cases every time."""
    library = hypothesis()
    phases = [library.Phase.generate, *([library.Phase.shrink] if shrink else [])]

    @library.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(library.HealthCheck),
        print_blob=False,
        verbosity=library.Verbosity.quiet,
        phases=phases,
    )
    @library.given(cases)
    def look(case: Any) -> None:
        try:
            test(case)
        except Broken as broken:
            broken.case = case
            raise

    try:
        look()
    except Broken as broken:
        return broken
    except library.errors.Flaky as error:  # it broke once, and not when it was looked at again
        return Broken(f"the same case breaks it one time and not another: {str(error).splitlines()[0]}")
    return None


def judge(
    operator: Component, found: list[Property], cases: Any, examples: int, show: Callable[[Any], str], only: str = ""
) -> list[Verdict]:
    """A verdict on each property. cases: Hypothesis's strategy. show: a case as Python. only: of this property alone."""

    def broken(each: Property, shrink: bool) -> Broken | None:
        if each.cases:
            return search(lambda case: each.test(operator, case), cases, max(1, round(examples * each.cases)), shrink=shrink)
        try:
            each.test(operator, None)
        except Broken as error:
            return error
        return None

    def verdict(each: Property) -> Verdict:
        name, says = each.name, each.says
        if name in operator.waives and each.waivable:
            return Verdict(name, NOT, says, f"waived: {operator.waives[name]}")
        excuse = each.excused(operator)
        if excuse:
            return Verdict(name, NOT, says, excuse)
        asked = not each.claimed or name in operator.claims
        error = broken(each, shrink=asked)
        if not asked:
            return Verdict(name, NOT, says, f"not claimed (it {'does not hold' if error else 'would hold'}): {each.claimed}")
        if error is None:
            return Verdict(name, OK, says)
        return Verdict(name, FAILED, says, str(error), show(error.case) if error.case is not None else "")

    unknown = [
        f"it {does} '{name}', and the properties that can be {done} are {', '.join(able) or 'none'}"
        for does, done, names, able in (
            ("claims", "claimed", operator.claims, [each.name for each in found if each.claimed]),
            ("waives", "waived", operator.waives, [each.name for each in found if each.waivable]),
        )
        for name in names
        if name not in able
    ]
    says = "what it claims and waives can be claimed and waived"
    first = [Verdict("contract", FAILED, says, "; ".join(unknown))] if unknown else [Verdict("contract", OK, says)]
    return [each for each in first if not only or each.property == only] + [
        verdict(each) for each in found if not only or each.name == only
    ]
