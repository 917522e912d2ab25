"""The laboratory's tasks: each isolates one property of credit, and its exact value is known in every state.

All are sums of two digits modulo 10, restated and answered one after the other. The expert that demonstrates is mostly wrong
for some operands (it writes the result plus one), so a policy that copies it has something to discover at these.
"""

from __future__ import annotations

import random
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cct.laboratory import Layout, Step
from cct.rollout import Prompt

from .base import Task, tasks

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class LabTask(Task):
    """What the laboratory's tasks share: problems, the noisy expert, and held-out problems that are never trained on."""

    reward: ClassVar[Literal["share", "all"]] = "share"

    decisions: int = Field(8, ge=1, le=64)
    """Sums in a response."""
    noisy_operands: tuple[Annotated[int, Field(ge=0, le=9)], ...] = (1, 3, 5, 7, 9)
    """Right operands for which the expert errs."""
    noise: float = Field(0.9, ge=0, le=1)
    """How often the expert's digit is wrong (result + 1) at a noisy operand."""
    held_out_size: int = Field(100, ge=1, le=10_000)
    """Problems kept for evaluation and never trained on."""

    def _problem(self, rng: random.Random) -> tuple[str, list[Step]]:
        """A prompt's text and its steps."""
        raise NotImplementedError

    @property
    def dense_reward(self) -> bool:
        """Whether each part of the reward is paid at its digit."""
        return False

    @property
    def longest_answer(self) -> int:
        """Characters of the longest right response; one more token ends it."""
        return 6 * self.decisions - 1

    def _prompt(self, rng: random.Random) -> Prompt:
        text, steps = self._problem(rng)
        layout = Layout(tuple(steps), self.reward, self.dense_reward)
        return Prompt(text, self._answer(layout), {"layout": layout})

    def _answer(self, layout: Layout, rng: random.Random | None = None) -> str:
        """The right response; with `rng`, the noisy expert's."""
        text, digits = "", list[int]()
        for step in layout.steps:
            digit = ((digits[step.of] if step.left is None else step.left) + step.right) % 10
            if rng and not step.copies and step.right in self.noisy_operands and rng.random() < self.noise:
                digit = (digit + 1) % 10
            digits.append(digit)
            text += f"{step.routine}{digit}"
        return text

    def held_out(self) -> list[Prompt]:
        rng, found = random.Random(f"{self.use} held out"), dict[str, Prompt]()
        while len(found) < min(self.held_out_size, 10 ** (self.decisions + 1) // 2):
            prompt = self._prompt(rng)
            found.setdefault(prompt.text, prompt)
        return list(found.values())

    def _stream(self, seed: int, start: int, count: int) -> list[tuple[Prompt, random.Random]]:
        kept_out, drawn = {prompt.text for prompt in self.held_out()}, []
        for index in range(start, start + count):
            rng = random.Random(f"{seed}:{index}")
            prompt = self._prompt(rng)
            while prompt.text in kept_out:
                prompt = self._prompt(rng)
            drawn.append((prompt, rng))
        return drawn

    def prompts(self, seed: int, start: int, count: int) -> list[Prompt]:
        return [prompt for prompt, _ in self._stream(seed, start, count)]

    def demonstrations(self, seed: int, start: int, count: int) -> list[tuple[str, str]]:
        drawn = self._stream(seed, start, count)
        return [(prompt.text, self._answer(prompt.meta["layout"], rng)) for prompt, rng in drawn]

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"demonstrations", "exact_values"})

    @property
    def alphabet(self) -> str:
        return "0123456789+;="


def _digits(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(10), rng.randrange(10)


class _Shared(LabTask):
    """Independent parts, of which the share that is right is the reward."""

    dense: bool = False
    """Pay each part at its digit; else the whole reward comes after the last token."""

    @property
    def dense_reward(self) -> bool:
        return self.dense


@tasks.register("parts")
class Parts(_Shared):
    """Independent sums in one response, rewarded by the share that is right: credit must not mix them.

    `3+5;2+7=` is answered `3+5=8;2+7=9`.
    """

    def _problem(self, rng: random.Random) -> tuple[str, list[Step]]:
        sums = [_digits(rng) for _ in range(self.decisions)]
        steps = [Step(f"{';' * (n > 0)}{a}+{b}=", b, a) for n, (a, b) in enumerate(sums)]
        return ";".join(f"{a}+{b}" for a, b in sums) + "=", steps


@tasks.register("filler")
class Filler(_Shared):
    """`parts` with stretches of routine letters before the answers: credit by decision against credit by token.

    `3+5c;2+7=` is answered `3+5cba=8;2+7=9`: a letter counts down to `a`.
    """

    decisions: int = Field(4, ge=1, le=64)
    """Sums in a response."""
    longest: int = Field(12, ge=1, le=26)
    """Letters in a stretch, at most; each length from 0 on is as frequent."""

    def _problem(self, rng: random.Random) -> tuple[str, list[Step]]:
        sums = [(*_digits(rng), rng.randint(0, self.longest)) for _ in range(self.decisions)]
        steps = [Step(f"{';' * (n > 0)}{a}+{b}{LETTERS[:k][::-1]}=", b, a) for n, (a, b, k) in enumerate(sums)]
        return ";".join(f"{a}+{b}{LETTERS[:k][-1:]}" for a, b, k in sums) + "=", steps

    @property
    def alphabet(self) -> str:
        return super().alphabet + LETTERS[: self.longest]

    @property
    def longest_answer(self) -> int:
        return (6 + self.longest) * self.decisions - 1


@tasks.register("chain")
class Chain(LabTask):
    """A sum continued step by step, rewarded where every step is right: one bit for all decisions.

    `3+5+7=` is answered `3+5=8;+7=5`.
    """

    reward = "all"
    decisions: int = Field(4, ge=1, le=64)
    """Sums in a response."""

    def _problem(self, rng: random.Random) -> tuple[str, list[Step]]:
        start, operands = rng.randrange(10), [rng.randrange(10) for _ in range(self.decisions)]
        steps = [Step(f";+{b}=", b, of=n - 1) if n else Step(f"{start}+{b}=", b, start) for n, b in enumerate(operands)]
        return str(start) + "".join(f"+{b}" for b in operands) + "=", steps

    @property
    def longest_answer(self) -> int:
        return 5 * self.decisions


@tasks.register("recall")
class Recall(LabTask):
    """A first sum that is repeated at the end, and sums between that count for nothing: an early choice decides.

    `3+5;2+7=` is answered `3+5=8;2+7=9;=8`. The reward is 1 where the first sum is right and its answer is repeated.
    """

    reward = "all"
    decisions: int = Field(6, ge=1, le=64)
    """Sums in a response, the first one included."""

    def _problem(self, rng: random.Random) -> tuple[str, list[Step]]:
        sums = [_digits(rng) for _ in range(self.decisions)]
        steps = [Step(f"{';' * (n > 0)}{a}+{b}=", b, a, counts=n == 0) for n, (a, b) in enumerate(sums)]
        return ";".join(f"{a}+{b}" for a, b in sums) + "=", [*steps, Step(";=", 0, of=0, copies=True)]

    @property
    def longest_answer(self) -> int:
        return super().longest_answer + 3
