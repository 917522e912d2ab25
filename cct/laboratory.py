"""Responses whose credit is known: their layout, what is right at each character, and values in closed form.

A response is a sequence of decisions, each a digit after routine characters. The reward is a sum over places, each of which
counts as long as what stands before it is intact, so the value of every state follows from the probabilities of being right
and of staying intact by one recursion from the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cct.rollout import Prompt

DIGITS = "0123456789"


@dataclass(frozen=True)
class Step:
    """A decision: routine characters, then the digit `left` + `right` modulo 10."""

    routine: str
    right: int
    left: int | None = None
    """None: the digit that was written at step `of`."""
    of: int = 0
    counts: bool = True
    """Whether the reward depends on it; where it does not, any digit is right."""
    copies: bool = False
    """It repeats a digit, in which the demonstrator does not err."""


@dataclass(frozen=True)
class Place:
    """One character of a response."""

    right: str
    """Characters that are right; of a digit that continues one which was not written none is known."""
    intact: str
    """Characters after which later places still count."""
    form: str
    """Characters after which the layout goes on as it was."""
    worth: float = 0.0
    """Reward of a right one."""
    decides: bool = False


@dataclass(frozen=True)
class Layout:
    """What a response to a prompt looks like, and what it is rewarded for."""

    steps: tuple[Step, ...]
    reward: Literal["share", "all"] = "share"
    """share: of the digits that count, how many are right. all: 1 where each of them is."""
    dense: bool = False
    """Each part of the reward is paid at its digit; else all of it after the last token."""

    def places(self, text: str) -> list[Place]:
        """The layout, character by character. What is right may depend on digits written before, which `text` tells."""
        counting, found, digits = sum(step.counts for step in self.steps), list[Place](), list[str]()
        for number, step in enumerate(self.steps):
            found += [Place(char, char, char) for char in step.routine]
            left = digits[step.of] if step.left is None else str(step.left)
            sum_of = str((int(left) + step.right) % 10) if left and left in DIGITS else ""
            right = sum_of if step.counts else DIGITS
            if self.reward == "all":
                last = not any(later.counts for later in self.steps[number + 1 :])
                found.append(Place(right, right, DIGITS, float(step.counts and last), True))
            else:
                found.append(Place(right, DIGITS, DIGITS, step.counts / counting, True))
            digits.append(text[len(found) - 1 : len(found)])
        return found

    def rewards(self, text: str) -> list[float]:
        """What each character of a response earns; it is paid there where `dense`."""
        earned, intact = [0.0] * len(text), True
        for number, (place, char) in enumerate(zip(self.places(text), text, strict=False)):
            earned[number] = place.worth if intact and char in place.right else 0.0
            intact = intact and char in place.intact
        return earned

    def aligned(self, text: str) -> int:
        """How many characters of a response follow the layout."""
        pairs = zip(self.places(text), text, strict=False)
        return next((number for number, (place, char) in enumerate(pairs) if char not in place.form), len(text))

    def values(self, text: str, right: Sequence[float], intact: Sequence[float]) -> list[float]:
        """V before each character of a response and after the last, [len(text) + 1]: reward that is yet to be paid.

        right, intact: for each place, the probability of a right character, and of one after which later places count. A
        character is taken to change neither of later places, so with F the reward to come while all is intact,
        F_i = right_i worth_i + intact_i F_(i+1), and V_i is F_i, or 0 where something is not intact, plus what is earned and
        not paid yet.
        """
        places, earned = self.places(text), self.rewards(text)
        future = [0.0] * (max(len(places), len(text)) + 1)
        for number in reversed(range(len(places))):
            future[number] = right[number] * places[number].worth + intact[number] * future[number + 1]
        found, unpaid, whole = [future[0]], 0.0, True
        for number, char in enumerate(text):
            unpaid += 0.0 if self.dense else earned[number]
            whole = whole and (number >= len(places) or char in places[number].intact)
            found.append(unpaid + (future[number + 1] if whole else 0.0))
        return found


def layout_of(prompt: Prompt) -> Layout:
    """Raises ValueError where the prompt is of no task of the laboratory."""
    layout = prompt.meta.get("layout")
    if not isinstance(layout, Layout):
        raise ValueError(
            f"the prompt {prompt.text[:60]!r} has no layout in its meta; tasks parts, chain, filler and recall give prompts one"
        )
    return layout
