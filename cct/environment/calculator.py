"""Chain arithmetic with a calculator: which steps are worth a call, and which the policy can do itself."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from .base import Action, Environment, Episode, Observation, Start, Step, environments

if TYPE_CHECKING:
    from cct.rollout import Prompt

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
CALL = re.compile(r"([0-9])([-+*])([0-9])\?$")
ANSWER = re.compile(r"#([0-9])$")
WORKED = re.compile(r"[0-9][-+*][0-9](?:=([0-9]);?|\?)")  # a step, with the result that the policy gave itself


@environments.register("calculator")
class Calculator(Environment):
    """Chain arithmetic (`task: chain_arithmetic`) with a calculator: a turn may end by asking for a step.

    `3+5?` is answered `8;`, modulo 10. A turn that ends with `#8` is the answer and ends the episode, anything else gets `!`.
    Steps may be worked before a call, in the same turn: `3+5=8;8-7?`. The reward is 1 for the right answer, less what the
    calls cost. The expert errs at some operands where it does not ask.
    """

    max_turns: int = Field(12, ge=1, le=1000)
    """Maximum number of turns; each call is one, and so is the answer."""
    call_cost: float = Field(0.01, ge=0, le=1)
    """Reward subtracted for each call."""
    call_rate: float = Field(0.4, ge=0, le=1)
    """How often the expert asks for a step."""
    noisy_operands: tuple[Annotated[int, Field(ge=0, le=9)], ...] = (3, 7)
    """Right operands at which the expert errs when it computes the step itself."""
    noise: float = Field(0.7, ge=0, le=1)
    """How often the expert errs there (result + 1)."""

    def open(self, prompt: Prompt, seed: int) -> Episode:
        return _Sum(self, prompt)

    def expert(self, prompt: Prompt, seen: Sequence[Observation], said: Sequence[str], rng: random.Random) -> str:
        value, done = progress(prompt.text, said, [str(each) for each in seen[1:]])
        body, worked = prompt.text[1:-1], ""
        for operator, operand in list(zip(body[::2], body[1::2], strict=True))[done:]:
            if rng.random() < self.call_rate:
                return f"{worked}{value}{operator}{operand}?"
            result = OPERATIONS[operator](value, int(operand)) % 10
            if int(operand) in self.noisy_operands and rng.random() < self.noise:
                result = (result + 1) % 10
            worked += f"{value}{operator}{operand}={result};"
            value = result
        return f"{worked.rstrip(';')}#{value}"

    @property
    def components(self) -> tuple[str, ...]:
        return ("correct", "call")

    @property
    def bounds(self) -> tuple[float, float]:
        return -self.call_cost * self.max_turns, 1.0

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"environment", "demonstrations", "anchors"})

    @property
    def alphabet(self) -> str:
        return "0123456789+-*=;#?!"


def progress(problem: str, said: Sequence[str], answers: Sequence[str]) -> tuple[int, int]:
    """(value so far, steps that are done) after turns of the policy and the answers to them."""
    value, done = int(problem[0]), 0
    for turn, answer in zip(said, answers, strict=True):
        for step in WORKED.finditer(turn):
            result = step[1] if step[1] is not None else answer[0] if answer[:1].isdigit() else None
            if result is not None:
                value, done = int(result), done + 1
    return value, done


class _Sum(Episode):
    def __init__(self, rules: Calculator, prompt: Prompt):
        if not re.fullmatch(r"[0-9]([-+*][0-9])+=", prompt.text):
            raise ValueError(f"calculator needs sums such as 3+5-7=, from task chain_arithmetic; found {prompt.text[:80]!r}")
        self.rules, self.prompt = rules, prompt
        self.said: list[str] = []
        self.answers: list[str] = []

    @property
    def state(self) -> str:
        """What is left to do: the value so far, and the steps to come."""
        value, done = progress(self.prompt.text, self.said, self.answers)
        return f"{value}{self.prompt.text[1 + 2 * done :] or '='}"

    def reset(self) -> Start:
        return Start("", self.state)

    def step(self, action: Action) -> Step:
        text = action.text.strip()
        if answer := ANSWER.search(text):
            return Step(reward={"correct": float(answer[1] == self.prompt.answer)}, done=True)
        call = CALL.search(text)
        reply = f"{OPERATIONS[call[2]](int(call[1]), int(call[3])) % 10};" if call else "!"
        self.said.append(text)
        self.answers.append(reply)
        return Step(reply, {"call": -self.rules.call_cost} if call else 0.0, state=self.state)
