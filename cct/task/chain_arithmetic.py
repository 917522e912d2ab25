"""Chain arithmetic: the embedded task, on which reinforcement learning visibly works in minutes on a CPU.

`3+5-7=` is answered `3+5=8;8-7=1#1`: left to right, modulo 10, each step written out. The expert that
demonstrates is wrong for some operands (it prints the result plus one), so a policy that copies it has
something to discover: the right step is in its repertoire, but in the minority.
"""

from __future__ import annotations

import random
from typing import Annotated

from pydantic import Field

from cct.rollout import Prompt

from .base import Task, tasks

_OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


@tasks.register("chain_arithmetic")
class ChainArithmetic(Task):
    """Left-to-right arithmetic modulo 10 with worked steps, and a noisy expert to start from."""

    steps: int = Field(8, ge=1, le=64)
    """Operations in a problem."""
    operators: str = Field("+-", pattern=r"^[-+*]+$")
    """Operations to draw from. Multiplication can erase earlier errors, which leaves a critic less to explain."""
    noisy_operands: tuple[Annotated[int, Field(ge=0, le=9)], ...] = (3, 7)
    """Right operands for which the expert errs."""
    noise: float = Field(0.7, ge=0, le=1)
    """How often the expert's step is wrong (result + 1) at a noisy operand."""
    held_out_size: int = Field(400, ge=1, le=10_000)
    """Problems kept for evaluation and never trained on."""

    def _problem(self, rng: random.Random) -> str:
        return (
            str(rng.randrange(10))
            + "".join(rng.choice(self.operators) + str(rng.randrange(10)) for _ in range(self.steps))
            + "="
        )

    def solve(self, problem: str, rng: random.Random | None = None) -> str:
        """The worked answer; with `rng`, the noisy expert's."""
        value, body, worked = int(problem[0]), problem[1:-1], []
        for operator, operand in zip(body[::2], body[1::2], strict=True):
            result = _OPERATIONS[operator](value, int(operand)) % 10
            if rng and int(operand) in self.noisy_operands and rng.random() < self.noise:
                result = (result + 1) % 10
            worked.append(f"{value}{operator}{operand}={result}")
            value = result
        return ";".join(worked) + f"#{value}"

    def held_out(self) -> list[Prompt]:
        rng = random.Random("chain_arithmetic held out")
        problems: dict[str, None] = {}
        space = 10 * (10 * len(set(self.operators))) ** self.steps
        while len(problems) < min(self.held_out_size, space // 2):
            problems.setdefault(self._problem(rng))
        return [Prompt(text, self.solve(text).split("#")[1]) for text in problems]

    def _stream(self, seed: int, start: int, count: int) -> list[tuple[str, random.Random]]:
        kept_out, drawn = {prompt.text for prompt in self.held_out()}, []
        for index in range(start, start + count):
            rng = random.Random(f"{seed}:{index}")
            problem = self._problem(rng)
            while problem in kept_out:
                problem = self._problem(rng)
            drawn.append((problem, rng))
        return drawn

    def prompts(self, seed: int, start: int, count: int) -> list[Prompt]:
        return [Prompt(text, self.solve(text).split("#")[1]) for text, _ in self._stream(seed, start, count)]

    def demonstrations(self, seed: int, start: int, count: int) -> list[tuple[str, str]]:
        return [(text, self.solve(text, rng)) for text, rng in self._stream(seed, start, count)]

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"demonstrations"})

    @property
    def alphabet(self) -> str:
        return "0123456789" + "".join(sorted(set(self.operators))) + "=;#"
