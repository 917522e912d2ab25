"""One row is one response to one prompt, judged. Sampling, judging and evaluation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.evidence import Evidence, Failure, Verdict, plain, verdicts
from cct.policy.sampling import Engine
from cct.recipe import Recipe
from cct.rollout import Prompt, Response, derive_seed

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
    """False where evidence raised under `on_error: drop`, or nothing was emitted."""
    group: int
    """Number of its prompt within the iteration."""


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


def respond(
    engine: Engine, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None
) -> list[Response]:
    """One response per prompt (token ids), each from its own seed; greedy where seeds is None."""
    completions = engine.generate(prompts, seeds)
    decode = lambda completion: str(tokenizer.decode(list(completion.tokens), skip_special_tokens=True))  # noqa: E731
    return [Response(decode(c), c.tokens, c.finished, c.logprobs) for c in completions]


def encode(recipe: Recipe, actor: PreTrainedModel, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Token ids of the prompts.

    Raises TrainingStopped where the model has no positions for one and its response, or no embedding for one of its tokens.
    """
    tokens = [tuple(recipe.policy.encode(tokenizer, prompt.text)) for prompt in prompts]
    config = actor.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    room = recipe.generation.max_new_tokens
    for prompt, ids in zip(prompts, tokens, strict=True):
        if not ids:
            raise TrainingStopped(f"the prompt {prompt.text[:60]!r} has no tokens; leave it out of the task")
        if max(ids) >= config.vocab_size:
            raise TrainingStopped(
                f"the prompt {prompt.text[:60]!r} has the token {tokenizer.decode([max(ids)])!r} ({max(ids)}), and the model "
                f"knows tokens up to {config.vocab_size - 1}. Leave it out of the task, or use the model's own tokenizer"
            )
        if positions is not None and len(ids) + room > positions:
            raise TrainingStopped(
                f"the prompt {prompt.text[:60]!r} has {len(ids)} tokens; with generation.max_new_tokens ({room}) that is more "
                f"than the {positions} positions of the model. Leave it out of the task, or lower max_new_tokens"
            )
    return tokens


def sample_rows(
    recipe: Recipe,
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    seed: int,
    ranks: Ranks,
    stage: Callable[[str], None] = lambda name: None,
) -> tuple[list[Row], Counter[str]]:
    """`responses_per_prompt` judged responses to each prompt, and how often which evidence raised. stage: told what begins.

    Every rank samples and judges a share of equal size and gets all rows, in the order of the prompts. A
    response depends on the seed and its number only, not on the ranks or the batch it was sampled in.
    """
    each = recipe.training.responses_per_prompt
    numbers = ranks.share(len(prompts) * each)
    tokens = encode(recipe, engine.actor, tokenizer, prompts)
    seeds = [derive_seed(seed, number) for number in numbers]
    stage("generate")
    responses = respond(engine, tokenizer, [tokens[number // each] for number in numbers], seeds)
    stage("evidence")
    rewards, keep, errors = judge(recipe.evidence, [prompts[number // each] for number in numbers], responses)
    rows = [
        Row(prompts[number // each], tokens[number // each], response, tuple(reward), kept, number // each)
        for number, response, reward, kept in zip(numbers, responses, rewards, keep, strict=True)
    ]
    gathered = ranks.gather((rows, errors))
    return [row for part, _ in gathered for row in part], sum((counts for _, counts in gathered), Counter())


def greedy_scores(
    recipe: Recipe, engine: Engine, tokenizer: Tokenizer, prompts: Sequence[Prompt], ranks: Ranks
) -> tuple[list[float], Counter[str]]:
    """The score of one greedy response to each prompt, NaN where it is not to be kept, and how often which evidence raised.

    Every rank answers and judges its share and gets all scores.
    """
    mine = [prompts[number] for number in ranks.share(len(prompts))]
    responses = respond(engine, tokenizer, encode(recipe, engine.actor, tokenizer, mine), None)
    rewards, keep, errors = judge(recipe.evidence, mine, responses)
    scored = [sum(reward) if kept else math.nan for reward, kept in zip(rewards, keep, strict=True)]
    gathered = ranks.gather((scored, errors))
    return [score for part, _ in gathered for score in part], sum((counts for _, counts in gathered), Counter())


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
) -> tuple[list[list[Continuation]], dict[str, float], Counter[str]]:
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
        responses.append(Response(str(tokenizer.decode(list(tokens), skip_special_tokens=True)), tokens, completion.finished))
    rewards, keep, errors = judge(recipe.evidence, [of_group[group].prompt for _, group, _ in mine], responses)
    found = [
        Continuation(completion.tokens[0], sum(reward[len(prefix) :])) if kept else None
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
    return of_state, cost, sum((counts for _, _, counts in gathered), Counter())


def branch(
    recipe: Recipe,
    engine: Engine,
    tokenizer: Tokenizer,
    rows: Sequence[Row],
    starts: Sequence[Sequence[int]],
    seed: int,
    ranks: Ranks,
) -> tuple[list[list[float]], dict[str, float], Counter[str]]:
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


def evaluate(recipe: Recipe, engine: Engine, tokenizer: Tokenizer, ranks: Ranks) -> dict[str, float]:
    """Greedy decoding of the held-out prompts; `eval/accuracy` is the first evidence's mean, `eval/reward` the sum's."""
    return {f"eval/{name}": value for name, value in _greedy(recipe, engine, tokenizer, recipe.task.held_out(), ranks).items()}


def evaluate_frozen(recipe: Recipe, engine: Engine, tokenizer: Tokenizer, ranks: Ranks) -> dict[str, float]:
    """The same of each frozen set, `frozen/NAME/accuracy` and so on, and the mean accuracy over the sets, `frozen/accuracy`."""
    frozen = recipe.evaluation.frozen
    found = {name: _greedy(recipe, engine, tokenizer, task.held_out(), ranks) for name, task in frozen.items()}
    metrics = {f"frozen/{name}/{key}": value for name, values in found.items() for key, value in values.items()}
    if found:
        metrics["frozen/accuracy"] = sum(values["accuracy"] for values in found.values()) / len(found)
    return metrics


def _greedy(recipe: Recipe, engine: Engine, tokenizer: Tokenizer, prompts: Sequence[Prompt], ranks: Ranks) -> dict[str, float]:
    mine = [prompts[number] for number in ranks.share(len(prompts))]
    responses = respond(engine, tokenizer, encode(recipe, engine.actor, tokenizer, mine), None)
    scored = [scores(part, mine, responses, Counter()) for part in recipe.evidence]
    names = ("accuracy", "reward", "length", "truncated")
    sums = (
        sum(sum(row) for row in scored[0] if row is not None),
        sum(map(sum, weigh(recipe.evidence, scored, responses)[0])),
        float(sum(len(response.tokens) for response in responses)),
        float(sum(not response.finished for response in responses)),
    )
    return {name: sum(values) / len(prompts) for name, values in zip(names, zip(*ranks.gather(sums), strict=True), strict=True)}
