"""Properties of evidence: a verdict on any text."""

from __future__ import annotations

import itertools
import math
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from cct.evidence import Evidence, Failure
from cct.registry import RAISED
from cct.rollout import Prompt, Response

from .base import Broken, Malformed, Property, hypothesis
from .watch import alone, later, unchanged

CALLS = itertools.count()  # makes texts that no call before has seen
SLACK = 1e-6


@dataclass(frozen=True)
class Texts:
    """Responses to one prompt; a `#` stands for the gold answer."""

    texts: tuple[str, ...]
    finished: bool

    def responses(self, prompt: Prompt) -> list[Response]:
        return [
            Response(text.replace("#", prompt.answer), tuple(range(3, 4 + len(text))), self.finished) for text in self.texts
        ]


def cases() -> Any:
    st = hypothesis().strategies
    piece = st.sampled_from(["#", "# ", "\n", "12", "-", "a", "\\boxed{#}", "$", "}", "é", "<answer>", "0.5"])
    text = st.lists(piece, max_size=6).map("".join)
    return st.builds(Texts, st.lists(text, min_size=1, max_size=3).map(tuple), st.booleans())


def verdict_of(evidence: Evidence, prompt: Prompt, response: Response) -> float:
    """The total that it gives. Raises Broken where it is neither a finite number nor one for each token."""
    try:
        verdict = evidence(prompt, response)
        if verdict is None:  # it abstains
            return 0.0
        rewards = [float(verdict)] if isinstance(verdict, int | float) else [float(x) for x in verdict]
    except RAISED as error:
        raise Malformed(f"it raised {type(error).__name__}: {error}, judging {response.text!r}") from error
    if not isinstance(verdict, int | float) and len(rewards) != len(response.tokens):
        raise Malformed(f"it gave {len(rewards)} rewards for {len(response.tokens)} tokens: {verdict!r}")
    if not all(map(math.isfinite, rewards)):
        raise Malformed(f"it gave {verdict!r} for {response.text!r}; expected finite numbers")
    return math.fsum(rewards)


def _verdict(evidence: Evidence, prompt: Prompt, response: Response) -> float | str:
    """The total, or what is wrong with it, which `form` says."""
    try:
        return verdict_of(evidence, prompt, response)
    except Broken as error:
        return str(error)


def form(evidence: Evidence, case: Texts) -> None:
    low, high = evidence.bounds
    prompt = evidence.example
    for response in case.responses(prompt):
        total = verdict_of(evidence, prompt, response)
        if not low - SLACK <= total <= high + SLACK:
            raise Broken(f"it gave {total:g} for {response.text!r}, outside its bounds [{low:g}, {high:g}]")


def short(evidence: Evidence, case: None) -> None:
    for text in ("", " ", "\x00", "(" * 500, "9" * 2000):
        verdict_of(evidence, evidence.example, Response(text, tuple(range(len(text) or 1)), True))


def determinism(evidence: Evidence, case: Texts) -> None:
    """Judged, judged again in the reverse order, and a day later; texts that no call before has seen."""
    prompt, untouched = evidence.example, deepcopy(evidence.example)
    once = replace(case, texts=tuple(f"{text} {next(CALLS)}" for text in case.texts)).responses(prompt)
    again = [*case.responses(prompt), *once]
    with alone(0):
        first = {response: _verdict(evidence, prompt, response) for response in again}
    with later(), alone(1):
        second = {response: _verdict(evidence, prompt, response) for response in reversed(again)}
    for response, verdict in first.items():
        if verdict != second[response]:
            raise Broken(
                f"judged again, in the reverse order and a day later, {response.text!r} gets {second[response]} instead of "
                f"{verdict}"
            )
    unchanged("prompt", untouched, prompt)


def batch(evidence: Evidence, case: Texts) -> None:
    prompt = evidence.example
    responses = case.responses(prompt)
    responses += responses[:1]  # a policy that repeats itself
    try:
        together = evidence.judge_batch([prompt] * len(responses), responses)
    except Exception as error:
        raise Broken(f"judge_batch raised {type(error).__name__}: {error}; a failure is an entry of its list") from error
    alone = [verdict_of(evidence, prompt, response) for response in responses]
    if len(together) != len(alone):
        raise Broken(f"judge_batch gave {len(together)} verdicts on {len(alone)} responses")
    for response, one, other in zip(responses, alone, together, strict=True):
        other = 0.0 if other is None else other
        total = math.nan if isinstance(other, Failure) else other if isinstance(other, int | float) else math.fsum(other)
        if not math.isclose(one, total, rel_tol=1e-4, abs_tol=1e-5):
            raise Broken(f"in a batch {response.text!r} gets {other}, alone {one:g}")


EVIDENCE = [
    Property(
        "determinism", "a response always gets the same score, without global randomness; its prompt is unchanged", determinism
    ),
    Property("form", "a finite number within its bounds, or one reward for each token that adds up to one", form),
    Property("short", "it also judges empty, garbled and long responses", short, cases=0, waivable=True),
    Property("batch", "a batch gets the same scores as its responses one by one", batch),
]


def show(evidence: Evidence, case: Texts) -> str:
    lines = [f"prompt = {evidence.example!r}"]
    return "\n".join([*lines, *(f"response = {response!r}" for response in case.responses(evidence.example))])
