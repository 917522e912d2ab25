"""Rewards of responses: the scores of all evidence, weighted and summed, and what could not be judged."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from cct.errors import TrainingStopped
from cct.evidence import Evidence, Failure, Verdict, plain, verdicts
from cct.rollout import Prompt, Response

from .rows import names

# From this share of failures on, people are shown a line about it; below it is in the metrics only.
LARGE_SHARE = 0.1


class Failures(Counter[str]):
    """How often evidence failed or abstained, by `errors/NAME`, `timeouts/NAME`, `abstained/NAME`; and the first reasons."""

    def __init__(self, counts: dict[str, int] | None = None, reasons: dict[str, str] | None = None):
        super().__init__(counts or {})
        self.reasons = reasons or {}

    def __reduce__(self):
        return type(self), (dict(self), self.reasons)

    def add(self, kind: str, reason: str) -> None:
        self[kind] += 1
        self.reasons.setdefault(kind, reason)

    @classmethod
    def joined(cls, parts: Iterable[Failures]) -> Failures:
        """Combine the failures of several processes or steps; earlier reasons come first."""
        whole = cls()
        for part in parts:
            whole.update(part)
            whole.reasons = {**part.reasons, **whole.reasons}
        return whole

    def lines(self, judged: int, where: str) -> list[str]:
        """Warnings to print: evidence that failed for a large share of the responses, or abstained on all of them."""
        found = []
        for kind, count in self.items():
            what, _, name = kind.partition("/")
            if count < (judged if what == "abstained" else LARGE_SHARE * judged):
                continue
            did = {"errors": "failed", "timeouts": "took too long"}.get(what, "abstained")
            reason = f", first: {self.reasons[kind][:300]}" if self.reasons.get(kind) else ""
            found.append(f"warning: {where}: evidence '{name}' {did} for {count} of {judged} responses{reason}")
        return found


class Judged(NamedTuple):
    """Responses judged by all evidence."""

    rewards: list[list[float]]  # per token, weighted and summed
    keep: list[bool]
    failures: Failures
    scored: list[list[list[float] | None]]  # by each evidence, unweighted, as `scores` gives them

    @property
    def totals(self) -> list[float | None]:
        """Each response's total by the first evidence: 0 where judging failed, None where it gave no number."""
        return [0.0 if row is None else math.fsum(row) if row else None for row in self.scored[0]]


def scores(
    part: Evidence, prompts: Sequence[Prompt], responses: Sequence[Response], failures: Failures, iteration: int
) -> list[list[float] | None]:
    """One evidence's rewards per token of each response, unweighted; None where judging failed, which is counted.

    A score counts at the last token. No number where the evidence abstained, or nothing was emitted: that is not judged.
    Raises TrainingStopped where judging fails under `on_error: fail`, for a verdict that is neither a finite number nor one
    finite number per token too.
    """
    scored: list[list[float] | None] = [[] for _ in responses]
    emitted = [number for number, response in enumerate(responses) if response.tokens]
    asked = [prompts[number] for number in emitted], [responses[number] for number in emitted]
    distinct = list({id(prompt): prompt for prompt in prompts}.values())
    before = [_pickled(prompt.meta) for prompt in distinct]
    with closing(verdicts(part, *asked, iteration)) as found:
        for number, prompt, response, verdict in zip(emitted, *asked, found, strict=True):
            checked = verdict if isinstance(verdict, Failure) else _per_token(part, verdict, len(response.tokens))
            if isinstance(checked, Failure):
                if part.on_error == "fail":
                    said = "" if checked.timed_out else "failed: "
                    raise TrainingStopped(
                        f"evidence '{part.use}' {said}{checked.reason}, judging {response.text!r} "
                        f"(prompt {prompt.text!r}); with `on_error: zero` or `drop` the run would continue"
                    ) from checked.cause
                failures.add(f"{'timeouts' if checked.timed_out else 'errors'}/{part.use}", checked.reason)
            elif not checked:
                failures.add(f"abstained/{part.use}", "")
            scored[number] = None if isinstance(checked, Failure) else checked
    for prompt, meta in zip(distinct, before, strict=True):
        if meta is not None and _pickled(prompt.meta) != meta:
            raise TrainingStopped(
                f"evidence '{part.use}' changed the meta of the prompt {prompt.text[:60]!r} in place, but other evidence and "
                "later iterations read it; change a copy instead"
            )
    return scored


def _pickled(meta: dict[str, Any]) -> bytes | None:
    """The content of a prompt's meta; None if it cannot be pickled."""
    try:
        return pickle.dumps(meta)
    except Exception:
        return None


def _per_token(part: Evidence, verdict: Verdict, tokens: int) -> list[float] | Failure:
    try:
        numbers = plain(verdict)
    except ValueError as error:
        return Failure(str(error))
    if numbers is None:
        return []
    rewards = numbers if isinstance(numbers, list) else [0.0] * (tokens - 1) + [numbers]
    if len(rewards) != tokens:
        return Failure(f"it returned {len(rewards)} numbers for {tokens} tokens; expected one for each, or one in all")
    outside = part.outside(rewards)
    return Failure(outside) if outside else rewards


def score_all(
    evidence: Sequence[Evidence], prompts: Sequence[Prompt], responses: Sequence[Response], failures: Failures, iteration: int
) -> list[list[list[float] | None]]:
    """`scores` by each evidence."""
    return [scores(part, prompts, responses, failures, iteration) for part in evidence]


def weigh(
    evidence: Sequence[Evidence], scored: Sequence[Sequence[list[float] | None]], responses: Sequence[Response]
) -> tuple[list[list[float]], list[bool]]:
    """Weighted rewards per token of each response, and whether to keep it; `scored` by each evidence.

    Evidence without a number is left out of the sum; a response of which none has one is not kept.
    """
    rewards = [[0.0] * len(response.tokens) for response in responses]
    keep = [any(row is None or row for row in rows) for rows in zip(*scored, strict=True)]
    for part, rows in zip(evidence, scored, strict=True):
        for number, row in enumerate(rows):
            if row:
                rewards[number] = [total + part.weight * x for total, x in zip(rewards[number], row, strict=True)]
            elif row is None and part.on_error == "drop":
                keep[number] = False
    return rewards, keep


def apart(
    evidence: Sequence[Evidence], scored: Sequence[Sequence[list[float] | None]], responses: Sequence[Response]
) -> list[dict[str, list[float]]]:
    """Of each response its rewards per token by each evidence, unweighted: NaN where it abstained, 0 where judging failed."""
    found: list[dict[str, list[float]]] = [{} for _ in responses]
    for name, rows in zip(names(evidence), scored, strict=True):
        for number, row in enumerate(rows):
            filler = 0.0 if row is None else math.nan
            found[number][name] = row or [filler] * len(responses[number].tokens)
    return found


def without_contrast(groups: Sequence[int], totals: Sequence[float | None]) -> list[int]:
    """Groups in which no two responses have different totals, in the order of their first responses. None is no total."""
    found: dict[int, set[float]] = {group: set() for group in groups}
    for group, total in zip(groups, totals, strict=True):
        found[group] |= set() if total is None else {total}
    return [group for group, different in found.items() if len(different) < 2]


def judged(evidence: Sequence[Evidence], prompts: Sequence[Prompt], responses: Sequence[Response], iteration: int) -> Judged:
    """Judge responses to prompts, one each."""
    failures = Failures()
    scored = score_all(evidence, prompts, responses, failures, iteration)
    return Judged(*weigh(evidence, scored, responses), failures, scored)


def judge(
    evidence: Sequence[Evidence], prompts: Sequence[Prompt], responses: Sequence[Response], iteration: int = 0
) -> tuple[list[list[float]], list[bool], Failures]:
    """Weighted rewards per token of each response, whether to keep it, and what failed or abstained how often."""
    return judged(evidence, prompts, responses, iteration)[:3]
