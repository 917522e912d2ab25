"""A property, a verdict, and how a property is judged."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

from cct.registry import Component, optional

AXES = ("transport", "gate", "statistic", "geometry", "critic", "evidence", "environment")

Outcome = Literal["ok", "FAILED", "does not apply"]
OK: Outcome = "ok"
FAILED: Outcome = "FAILED"
NOT: Outcome = "does not apply"


class Broken(AssertionError):
    """A property does not hold; the message says what was expected and what was found."""

    case: Any = None


class Malformed(Broken):
    """It raised, or what it returned is of another shape or type: what `form` is about."""


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


def drawn(cases: Any, examples: int) -> list[Any]:
    """So many cases, the same ones every time."""
    library, found = hypothesis(), []

    @_settings(library, examples, [library.Phase.generate])
    @library.given(cases)
    def look(case: Any) -> None:
        found.append(case)

    look()
    return found


def shrunk(test: Callable[[Any], None], cases: Any, examples: int, broken: Broken) -> Broken:
    """The failure of the smallest case that breaks the test; `broken`, which is known to, where none is found."""
    library = hypothesis()

    @_settings(library, examples, [library.Phase.generate, library.Phase.shrink])
    @library.given(cases)
    def look(case: Any) -> None:
        _try(test, case)

    try:
        look()
    except Broken as error:
        return error
    except library.errors.Flaky:  # it broke once, and not when it was looked at again
        pass
    return broken


def _settings(library: Any, examples: int, phases: list[Any]) -> Any:
    return library.settings(
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


def _try(test: Callable[[Any], None], case: Any) -> None:
    try:
        test(case)
    except Broken as broken:
        broken.case = case
        raise


def broken(operator: Component, each: Property, drawn: list[Any], cases: Any, shrink: bool) -> Broken | None:
    """How a property fails, if it does. drawn: the cases to look at, of which it may want fewer."""
    count = max(1, round(len(drawn) * each.cases))
    for case in drawn[:count] if each.cases else [None]:
        try:
            _try(lambda case: each.test(operator, case), case)
        except Broken as error:
            return shrunk(lambda case: each.test(operator, case), cases, count, error) if shrink and each.cases else error
    return None


def judge(
    operator: Component,
    found: list[Property],
    cases: Any,
    examples: int,
    show: Callable[[Any], str],
    only: str = "",
    shrink: bool = True,
) -> list[Verdict]:
    """A verdict on each property. cases: Hypothesis's strategy. show: a case as Python. only: of this property alone.

    The first property is `determinism`. Where it fails nothing else is judged: no other verdict would mean anything, and its
    inputs must not have been seen before.
    """
    inputs, malformed = drawn(cases, examples), False

    def verdict(each: Property, unsteady: bool) -> Verdict:
        nonlocal malformed
        name, says = each.name, each.says
        if name in operator.waives and each.waivable:
            return Verdict(name, NOT, says, f"waived: {operator.waives[name]}")
        excuse = each.excused(operator) or (unsteady and "not judged, since `determinism` fails")
        if excuse:
            return Verdict(name, NOT, says, excuse)
        asked = not each.claimed or name in operator.claims
        error = broken(operator, each, inputs, cases, shrink and asked)
        if not asked:
            return Verdict(name, NOT, says, f"not claimed (it {'does not hold' if error else 'would hold'}): {each.claimed}")
        if error is None:
            return Verdict(name, OK, says)
        if isinstance(error, Malformed) and malformed:
            return Verdict(name, NOT, says, "not judged, since `form` fails")
        malformed |= isinstance(error, Malformed) and name == "form"
        advice = f"\nif this is intended, waive it: waives = {{'{name}': 'why'}}" if each.waivable else ""
        return Verdict(name, FAILED, says, f"{error}{advice}", show(error.case) if error.case is not None else "")

    verdicts = [_contract(operator, found)]
    if isinstance(operator.claims, Set) and isinstance(operator.waives, Mapping):
        verdicts.append(verdict(found[0], False))
        unsteady = verdicts[-1].outcome == FAILED
        verdicts += [verdict(each, unsteady) for each in found[1:] if only in ("", each.name)]
    return [each for each in verdicts if only in ("", each.property)]


def _contract(operator: Component, found: list[Property]) -> Verdict:
    """What it claims and waives can be claimed and waived."""
    says = "its claims and waivers are ones that can be claimed and waived"
    if not isinstance(operator.claims, Set) or not isinstance(operator.waives, Mapping):
        wrong = f"claims is {operator.claims!r}, waives {operator.waives!r}; expected a set of names, and a dict of reasons"
        return Verdict("contract", FAILED, says, wrong)
    unknown = [
        f"it {does} '{name}', and the properties that can be {done} are {', '.join(able) or 'none'}"
        for does, done, names, able in (
            ("claims", "claimed", operator.claims, [each.name for each in found if each.claimed]),
            ("waives", "waived", operator.waives, [each.name for each in found if each.waivable]),
        )
        for name in names
        if name not in able
    ]
    return Verdict("contract", FAILED, says, "; ".join(unknown)) if unknown else Verdict("contract", OK, says)
