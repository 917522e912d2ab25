"""One row is one response to one prompt, judged. Sampling, judging and evaluation."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.evidence import Evidence, Failure, Verdict, plain, verdicts
from cct.policy.sampling import Engine
from cct.recipe import Recipe
from cct.rollout import Prompt, Response, derive_seed

from .failures import Failures
from .prompts import encode, fitting
from .ranks import Ranks
from .stopped import TrainingStopped

State = tuple[int, tuple[int, ...]]  # the number of a prompt within the iteration, and the tokens emitted after it


@dataclass(frozen=True)
class Row:
    """A judged response."""

    prompt: Prompt
    prompt_tokens: tuple[int, ...]
    response: Response
    rewards: tuple[float, ...]
    """One per emitted token."""
    keep: bool
    """False where evidence raised under `on_error: drop`, all evidence abstained, or nothing was emitted."""
    group: int
    """Number of its prompt within the iteration."""
    iteration: int = 0
    """In which it was sampled; 0 and below are the critic's warm-up."""


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
                        f"(prompt {prompt.text!r}); `on_error: zero` or `drop` would go on"
                    ) from checked.cause
                failures.add(f"{'timeouts' if checked.timed_out else 'errors'}/{part.use}", checked.reason)
            elif not checked:
                failures.add(f"abstained/{part.use}", "")
            scored[number] = None if isinstance(checked, Failure) else checked
    for prompt, meta in zip(distinct, before, strict=True):
        if meta is not None and _pickled(prompt.meta) != meta:
            raise TrainingStopped(
                f"evidence '{part.use}' changed the meta of the prompt {prompt.text[:60]!r} in place, which other evidence and "
                "later iterations read; it must work on a copy"
            )
    return scored


def _pickled(meta: dict[str, Any]) -> bytes | None:
    """What a prompt's meta holds; None where it is empty, or cannot be pickled."""
    try:
        return pickle.dumps(meta) if meta else None
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


def judge(
    evidence: Sequence[Evidence], prompts: Sequence[Prompt], responses: Sequence[Response], iteration: int = 0
) -> tuple[list[list[float]], list[bool], Failures]:
    """Weighted rewards per token of each response, whether to keep it, and what failed or abstained how often."""
    failures = Failures()
    scored = [scores(part, prompts, responses, failures, iteration) for part in evidence]
    rewards, keep = weigh(evidence, scored, responses)
    return rewards, keep, failures


def text_of(recipe: Recipe, tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """What evidence sees of a response: its tokens, behind what the end of the prompt has opened of it."""
    return recipe.policy.opened + str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def respond(
    recipe: Recipe, engine: Engine, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None
) -> list[Response]:
    """One response per prompt (token ids), each from its own seed; greedy where seeds is None."""
    completions = engine.generate(prompts, seeds)
    return [Response(text_of(recipe, tokenizer, c.tokens), c.tokens, c.finished, c.logprobs) for c in completions]


def sample_rows(
    recipe: Recipe,
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    seed: int,
    ranks: Ranks,
    stage: Callable[[str], None] = lambda name: None,
    iteration: int = 0,
) -> tuple[list[Row], Failures]:
    """`responses_per_prompt` judged responses to each prompt, and what failed how often. stage: called with what begins.

    Every rank samples and judges a share of equal size and gets all rows, in the order of the prompts. A
    response depends on the seed and its number only, not on the ranks or the batch it was sampled in.
    """
    each = recipe.training.responses_per_prompt
    numbers = ranks.share(len(prompts) * each)
    tokens = encode(recipe, engine.actor, tokenizer, prompts)
    seeds = [derive_seed(seed, number) for number in numbers]
    stage("generate")
    responses = respond(recipe, engine, tokenizer, [tokens[number // each] for number in numbers], seeds)
    stage("evidence")
    rewards, keep, errors = judge(recipe.evidence, [prompts[number // each] for number in numbers], responses, iteration)
    rows = [
        Row(prompts[number // each], tokens[number // each], response, tuple(reward), kept, number // each, iteration)
        for number, response, reward, kept in zip(numbers, responses, rewards, keep, strict=True)
    ]
    gathered = ranks.gather((rows, errors))
    return [row for part, _ in gathered for row in part], Failures.joined(counts for _, counts in gathered)


def greedy_scores(
    recipe: Recipe, engine: Engine, tokenizer: Tokenizer, prompts: Sequence[Prompt], ranks: Ranks, iteration: int = 0
) -> tuple[list[float], Failures]:
    """The score of one greedy response to each prompt, NaN where it is not to be kept, and what failed how often.

    Every rank answers and judges its share and gets all scores.
    """
    mine = [prompts[number] for number in ranks.share(len(prompts))]
    responses = respond(recipe, engine, tokenizer, encode(recipe, engine.actor, tokenizer, mine), None)
    rewards, keep, errors = judge(recipe.evidence, mine, responses, iteration)
    scored = [sum(reward) if kept else math.nan for reward, kept in zip(rewards, keep, strict=True)]
    gathered = ranks.gather((scored, errors))
    return [score for part, _ in gathered for score in part], Failures.joined(counts for _, counts in gathered)


@dataclass(frozen=True)
class Continuation:
    """A response continued from within, judged."""

    first: int
    """The token emitted first."""
    value: float
    """Return from there on."""


def continue_from(
    recipe: Recipe,
    engine: Engine,
    tokenizer: Tokenizer,
    rows: Sequence[Row],
    states: Sequence[State],
    each: int,
    seed: int,
    ranks: Ranks,
) -> tuple[list[list[Continuation]], dict[str, float], Failures]:
    """`each` continuations of every state, without those that evidence dropped; the prompts are those of `rows`.

    A continuation may become as long as the response might have. Each rank samples a share; what is drawn depends on the
    seed and on the place in the list of states only. Returns as well the metrics of what it cost, and how often which
    evidence raised.
    """
    room, of_group = recipe.generation.max_new_tokens, {row.group: row for row in rows}
    mine = [(number, *states[number // each]) for number in ranks.share(len(states) * each)]
    completions = engine.generate(
        [(*of_group[group].prompt_tokens, *prefix) for _, group, prefix in mine],
        [derive_seed(seed, number) for number, _, _ in mine],
        [room - len(prefix) for _, _, prefix in mine],
    )
    responses = []
    for (_, _, prefix), completion in zip(mine, completions, strict=True):
        tokens = (*prefix, *completion.tokens)
        responses.append(Response(text_of(recipe, tokenizer, tokens), tokens, completion.finished))
    prompts = [of_group[group].prompt for _, group, _ in mine]
    rewards, keep, errors = judge(recipe.evidence, prompts, responses, rows[0].iteration if rows else 0)
    found = [
        Continuation(completion.tokens[0], sum(reward[len(prefix) :])) if kept and completion.tokens else None
        for (_, _, prefix), completion, reward, kept in zip(mine, completions, rewards, keep, strict=True)
    ]
    gathered = ranks.gather((found, sum(len(completion.tokens) for completion in completions), errors))
    every = [one for part, _, _ in gathered for one in part]
    of_state = [[one for one in every[n * each : (n + 1) * each] if one is not None] for n in range(len(states))]
    cost = {
        "branch/prefixes": float(len(states)),
        "branch/responses": float(len(every)),
        "branch/tokens": float(sum(tokens for _, tokens, _ in gathered)),
    }
    return of_state, cost, Failures.joined(counts for _, _, counts in gathered)


def branch(
    recipe: Recipe,
    engine: Engine,
    tokenizer: Tokenizer,
    rows: Sequence[Row],
    starts: Sequence[Sequence[int]],
    seed: int,
    ranks: Ranks,
) -> tuple[list[list[float]], dict[str, float], Failures]:
    """Monte-Carlo values: the mean return, from its place on, of continuations of each row's response at each of its starts.

    Rows that share a prefix, as all of a prompt do at their first token, share its continuations. A prefix all of whose
    continuations were dropped by evidence takes the row's own return. Returns values as `starts`, and cost and errors as
    `continue_from`.
    """
    prefixes = [[(row.group, row.response.tokens[:t]) for t in places] for row, places in zip(rows, starts, strict=True)]
    distinct = list(dict.fromkeys(prefix for some in prefixes for prefix in some))
    found, cost, errors = continue_from(recipe, engine, tokenizer, rows, distinct, recipe.transport.branches, seed, ranks)
    mean = {state: sum(one.value for one in some) / len(some) for state, some in zip(distinct, found, strict=True) if some}
    values = [
        [mean.get(state, sum(row.rewards[len(state[1]) :])) for state in some] for row, some in zip(rows, prefixes, strict=True)
    ]
    return values, cost, errors


def evaluate(
    recipe: Recipe,
    engine: Engine,
    tokenizer: Tokenizer,
    ranks: Ranks,
    iteration: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, float]:
    """Greedy decoding of the held-out prompts; `eval/accuracy` is the first evidence's mean, `eval/reward` the sum's.

    iteration: after which it is, the recipe's last one where it is not given. say: called with what a person should see.
    """
    return _greedy(recipe, engine, tokenizer, "eval", recipe.task.held_out(), ranks, iteration, say)


def evaluate_frozen(
    recipe: Recipe, engine: Engine, tokenizer: Tokenizer, ranks: Ranks, say: Callable[[str], None] = lambda line: None
) -> dict[str, float]:
    """The same of each frozen set, `frozen/NAME/accuracy` and so on, and the mean accuracy over the sets, `frozen/accuracy`."""
    metrics, names = dict[str, float](), [f"frozen/{name}" for name in recipe.evaluation.frozen]
    for name, task in zip(names, recipe.evaluation.frozen.values(), strict=True):
        metrics |= _greedy(recipe, engine, tokenizer, name, task.held_out(), ranks, None, say)
    if names:
        metrics["frozen/accuracy"] = sum(metrics[f"{name}/accuracy"] for name in names) / len(names)
    return metrics


def _greedy(
    recipe: Recipe,
    engine: Engine,
    tokenizer: Tokenizer,
    name: str,
    every: Sequence[Prompt],
    ranks: Ranks,
    iteration: int | None,
    say: Callable[[str], None],
) -> dict[str, float]:
    """Metrics `NAME/accuracy` and so on of the prompts, without those that are too long where these are dropped."""
    prompts = fitting(recipe, engine.actor, tokenizer, every)
    if not prompts:
        raise TrainingStopped(f"{name}: every prompt is too long; raise the model's or the engine's limit, or take others")
    mine = [prompts[number] for number in ranks.share(len(prompts))]
    responses = respond(recipe, engine, tokenizer, encode(recipe, engine.actor, tokenizer, mine), None)
    failures, after = Failures(), recipe.training.iterations if iteration is None else iteration
    scored = [scores(part, mine, responses, failures, after) for part in recipe.evidence]
    judged = [row for row, response in zip(scored[0], responses, strict=True) if row is None or row or not response.tokens]
    sums = (
        sum(sum(row) for row in judged if row is not None),
        float(len(judged)),
        sum(map(sum, weigh(recipe.evidence, scored, responses)[0])),
        float(sum(len(response.tokens) for response in responses)),
        float(sum(not response.finished for response in responses)),
    )
    gathered = ranks.gather((sums, failures))
    right, of, *rest = map(sum, zip(*(part for part, _ in gathered), strict=True))
    failures = Failures.joined(part for _, part in gathered)
    for line in failures.lines(len(prompts), name):
        say(line)
    metrics = {f"{name}/accuracy": right / of if of else 0.0}
    metrics |= {f"{name}/{key}": x / len(prompts) for key, x in zip(("reward", "length", "truncated"), rest, strict=True)}
    metrics |= {f"{name}/{key}": float(count) for key, count in failures.items()}
    return metrics | ({f"{name}/overlong": float(len(every) - len(prompts))} if recipe.generation.overlong == "drop" else {})
