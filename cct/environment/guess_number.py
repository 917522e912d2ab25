"""Guess a hidden number by hints, and the exact value of every state under any policy, by counting.

The hidden number is uniform, so after every hint it is uniform on the interval low..high that the hints leave. That
interval and the number of turns left are the whole state.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from .base import Action, Environment, Episode, Observation, Start, Step, environments

if TYPE_CHECKING:
    from cct.rollout import Prompt

LOWER, HIGHER, NO_NUMBER = "<", ">", "x"

# low, high, turns left -> probability of each guess; None is an action that is no number in range.
GuessPolicy = Callable[[int, int, int], Mapping[int | None, float]]


def best_value(low: int, high: int, turns: int) -> float:
    """Success probability of the best play, the hidden number uniform in low..high.

    A decision tree of depth `turns` holds 2^turns - 1 guesses, each of which finds one number.
    """
    return min(1.0, (2**turns - 1) / (high - low + 1))


def value_of(policy: GuessPolicy, low: int, high: int, turns: int) -> float:
    """Success probability of a policy from a state, the hidden number uniform in low..high. Exact, by recursion over states."""
    known: dict[tuple[int, int, int], float] = {}

    def value(low: int, high: int, turns: int) -> float:
        if turns == 0 or low > high:
            return 0.0
        state = low, high, turns
        if state not in known:
            known[state] = sum(p * value_after(guess, *state) for guess, p in policy(*state).items() if p)
        return known[state]

    def value_after(guess: int | None, low: int, high: int, turns: int) -> float:
        if guess is None or not low <= guess <= high:  # the hint was known before
            return value(low, high, turns - 1)
        below, above = guess - low, high - guess
        later = below * value(low, guess - 1, turns - 1) + above * value(guess + 1, high, turns - 1)
        return (1 + later) / (high - low + 1)

    return value(low, high, turns)


def narrowed(low: int, high: int, guess: int, hint: str) -> tuple[int, int]:
    """The interval that is left after a hint."""
    return (low, min(high, guess - 1)) if hint == LOWER else (max(low, guess + 1), high)


def number_in(text: str, numbers: int) -> int | None:
    """The number that an action names; None unless it is one of 1..numbers."""
    found = int(text) if re.fullmatch(r"[0-9]{1,6}", text.strip()) else 0
    return found if 1 <= found <= numbers else None


@environments.register("guess_number")
class GuessNumber(Environment):
    """A hidden number, found by guesses that are answered `<` (it is lower), `>` (higher) or `x` (no number in range).

    floor(log2(numbers)) + 1 turns suffice for the best play. The number follows from `prompt.meta["seed"]`, so all episodes of
    a group look for the same one. The reward is 1 for finding it. That the last turn ends the game is its rule.
    """

    numbers: int = Field(15, ge=1, le=100_000)
    """The hidden number is one of 1..numbers."""
    max_turns: int = Field(4, ge=1, le=1000)
    """Guesses."""
    noise: float = Field(0.7, ge=0, le=1)
    """How often the demonstrating expert guesses the lowest remaining number instead of the middle one."""

    def open(self, prompt: Prompt, seed: int) -> Episode:
        return _Game(self, hidden_number(prompt, self.numbers))

    def expert(self, prompt: Prompt, seen: Sequence[Observation], said: Sequence[str], rng: random.Random) -> str:
        low, high = 1, self.numbers
        for text, hint in zip(said, seen[1:], strict=True):
            low, high = narrowed(low, high, int(text), str(hint))
        return str(low if rng.random() < self.noise else (low + high) // 2)

    def expert_policy(self, low: int, high: int, turns: int) -> dict[int | None, float]:
        """The expert as `value_of` takes a policy."""
        middle = (low + high) // 2
        return {low: self.noise, middle: 1 - self.noise} if low < middle else {low: 1.0}

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"environment", "demonstrations", "anchors"})

    @property
    def alphabet(self) -> str:
        return "0123456789" + LOWER + HIGHER + NO_NUMBER + "?"


def hidden_number(prompt: Prompt, numbers: int) -> int:
    """Raises ValueError where the prompt holds no seed."""
    if "seed" not in prompt.meta:
        raise ValueError("guess_number draws its number from prompt.meta['seed'], which is missing; set task: seeds")
    return random.Random(f"guess_number {prompt.meta['seed']}").randint(1, numbers)


class _Game(Episode):
    def __init__(self, rules: GuessNumber, hidden: int):
        self.rules, self.hidden = rules, hidden
        self.low, self.high, self.turns = 1, rules.numbers, rules.max_turns

    @property
    def state(self) -> str:
        return f"{self.low}-{self.high}/{self.turns}"

    def reset(self) -> Start:
        return Start("?", self.state)

    def step(self, action: Action) -> Step:
        guess = number_in(action.text, self.rules.numbers)
        self.turns -= 1
        if guess == self.hidden or not self.turns:
            return Step(reward=float(guess == self.hidden), done=True)
        if guess is None:
            return Step(NO_NUMBER, state=self.state)
        hint = LOWER if self.hidden < guess else HIGHER
        self.low, self.high = narrowed(self.low, self.high, guess, hint)
        return Step(hint, state=self.state)
