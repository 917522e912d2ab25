"""Rewards of responses: what each evidence says of them, weighted and summed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing

from cct.evidence import Evidence, Failure, Verdict, plain, verdicts
from cct.rollout import Prompt, Response

from .stopped import TrainingStopped


def scores(
    part: Evidence, prompts: Sequence[Prompt], responses: Sequence[Response], failures: Counter[str]
) -> list[list[float] | None]:
    """One evidence's rewards per token of each response, unweighted; None where judging failed, which is counted.

    A score counts at the last token. Raises TrainingStopped where judging fails under `on_error: fail`, for a verdict
    that is neither a finite number nor one finite number per token too.
    """
    scored: list[list[float] | None] = []
    with closing(verdicts(part, prompts, responses)) as found:
        for prompt, response, verdict in zip(prompts, responses, found, strict=True):
            checked = verdict if isinstance(verdict, Failure) else _per_token(verdict, len(response.tokens))
            if isinstance(checked, Failure):
                if part.on_error == "fail":
                    said = "" if checked.timed_out else "failed: "
                    raise TrainingStopped(
                        f"evidence '{part.use}' {said}{checked.reason}, judging {response.text!r} "
                        f"(prompt {prompt.text!r}); `on_error: zero` or `drop` would go on"
                    ) from checked.cause
                failures[f"{'timeouts' if checked.timed_out else 'errors'}/{part.use}"] += 1
            scored.append(None if isinstance(checked, Failure) else checked)
    return scored


def _per_token(verdict: Verdict, tokens: int) -> list[float] | Failure:
    try:
        numbers = plain(verdict)
    except ValueError as error:
        return Failure(str(error))
    rewards = numbers if isinstance(numbers, list) else [0.0] * (tokens - 1) + [numbers]
    if len(rewards) != tokens:
        return Failure(f"it returned {len(rewards)} numbers for {tokens} tokens; expected one for each, or one in all")
    return rewards


def weigh(
    evidence: Sequence[Evidence], scored: Sequence[Sequence[list[float] | None]], responses: Sequence[Response]
) -> tuple[list[list[float]], list[bool]]:
    """Weighted rewards per token of each response, and whether to keep it; `scored` by each evidence."""
    rewards, keep = [[0.0] * len(response.tokens) for response in responses], [bool(response.tokens) for response in responses]
    for part, rows in zip(evidence, scored, strict=True):
        for number, row in enumerate(rows):
            if row is not None:
                rewards[number] = [total + part.weight * x for total, x in zip(rewards[number], row, strict=True)]
            elif part.on_error == "drop":
                keep[number] = False
    return rewards, keep


def judge(
    evidence: Sequence[Evidence], prompts: Sequence[Prompt], responses: Sequence[Response]
) -> tuple[list[list[float]], list[bool], Counter[str]]:
    """Weighted rewards per token of each response, whether to keep it, and counts of `errors/NAME` and `timeouts/NAME`."""
    failures = Counter[str]()
    rewards, keep = weigh(evidence, [scores(part, prompts, responses, failures) for part in evidence], responses)
    return rewards, keep, failures
