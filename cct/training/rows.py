"""One row is one response to one prompt, judged. Sampling, judging and evaluation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.evidence import Evidence
from cct.recipe import Recipe
from cct.rollout import Prompt, Response, derive_seed

from .ranks import Ranks
from .strategies import whole_weights


class TrainingStopped(RuntimeError):
    """A run that cannot go on; the message names the component and the iteration."""


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


def judge(
    evidence: Sequence[Evidence], prompts: Sequence[Prompt], responses: Sequence[Response]
) -> tuple[list[list[float]], list[bool], Counter[str]]:
    """Weighted rewards per token of each response, whether to keep it, and how often which evidence raised.

    A score counts at the last token. Raises TrainingStopped where evidence raises under `on_error: fail`,
    or returns something that is neither a finite number nor one finite number per token.
    """
    rewards, keep, errors = [], [], Counter[str]()
    for prompt, response in zip(prompts, responses, strict=True):
        row, kept = [0.0] * len(response.tokens), bool(response.tokens)
        for part in evidence:
            try:
                verdict = part(prompt, response)
                per_token = (
                    [0.0] * (len(row) - 1) + [float(verdict)]
                    if isinstance(verdict, int | float)
                    else [float(x) for x in verdict]
                )
                if len(per_token) != len(row) or not all(map(math.isfinite, per_token)):
                    raise ValueError(
                        f"returned {verdict!r} for {len(row)} tokens: expected a finite number, or one for each token"
                    )
            except Exception as error:
                if part.on_error == "fail":
                    raise TrainingStopped(
                        f"evidence '{part.use}' raised {type(error).__name__}: {error}, judging {response.text!r} "
                        f"(prompt {prompt.text!r}); `on_error: zero` or `drop` would go on"
                    ) from error
                errors[part.use] += 1
                kept = kept and part.on_error != "drop"
                continue
            row = [total + part.weight * x for total, x in zip(row, per_token, strict=True)]
        rewards.append(row)
        keep.append(kept)
    return rewards, keep, errors


def respond(
    recipe: Recipe,
    actor: PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    seeds: list[int] | None,
) -> list[Response]:
    """One response per prompt (token ids) from the recipe's engine, each from its own seed; greedy where seeds is None."""
    with whole_weights(actor):
        completions = recipe.generation.generate(actor, tokenizer, prompts, seeds)
    texts = tokenizer.batch_decode([list(completion.tokens) for completion in completions], skip_special_tokens=True)
    return [Response(text, c.tokens, c.finished) for text, c in zip(texts, completions, strict=True)]


def encode(recipe: Recipe, actor: PreTrainedModel, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Token ids of the prompts. Raises TrainingStopped where the model has no positions for one and its response."""
    tokens = [tuple(recipe.policy.encode(tokenizer, prompt.text)) for prompt in prompts]
    positions = getattr(actor.config.get_text_config(), "max_position_embeddings", None)
    room = recipe.generation.max_new_tokens
    for prompt, ids in zip(prompts, tokens, strict=True):
        if positions is not None and len(ids) + room > positions:
            raise TrainingStopped(
                f"the prompt {prompt.text[:60]!r} has {len(ids)} tokens; with generation.max_new_tokens ({room}) that is more "
                f"than the {positions} positions of the model. Leave it out of the task, or lower max_new_tokens"
            )
    return tokens


def sample_rows(
    recipe: Recipe,
    actor: PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    seed: int,
    ranks: Ranks,
) -> tuple[list[Row], Counter[str]]:
    """`responses_per_prompt` judged responses to each prompt, and how often which evidence raised.

    Every rank samples and judges a share of equal size and gets all rows, in the order of the prompts. A
    response depends on the seed and its number only, not on the ranks or the batch it was sampled in.
    """
    each = recipe.training.responses_per_prompt
    numbers = ranks.share(len(prompts) * each)
    tokens = encode(recipe, actor, tokenizer, prompts)
    seeds = [derive_seed(seed, number) for number in numbers]
    responses = respond(recipe, actor, tokenizer, [tokens[number // each] for number in numbers], seeds)
    rewards, keep, errors = judge(recipe.evidence, [prompts[number // each] for number in numbers], responses)
    rows = [
        Row(prompts[number // each], tokens[number // each], response, tuple(reward), kept, number // each)
        for number, response, reward, kept in zip(numbers, responses, rewards, keep, strict=True)
    ]
    gathered = ranks.gather((rows, errors))
    return [row for part, _ in gathered for row in part], sum((counts for _, counts in gathered), Counter())


def evaluate(recipe: Recipe, actor: PreTrainedModel, tokenizer: Tokenizer, ranks: Ranks) -> dict[str, float]:
    """Greedy decoding of the held-out prompts; `eval/accuracy` is the first evidence's mean, `eval/reward` the sum's."""
    prompts = recipe.task.held_out()
    mine = [prompts[number] for number in ranks.share(len(prompts))]
    responses = respond(recipe, actor, tokenizer, encode(recipe, actor, tokenizer, mine), None)
    first = recipe.evidence[0].model_copy(update={"weight": 1.0})
    names = ("eval/accuracy", "eval/reward", "eval/length", "eval/truncated")
    sums = (
        sum(map(sum, judge([first], mine, responses)[0])),
        sum(map(sum, judge(recipe.evidence, mine, responses)[0])),
        float(sum(len(response.tokens) for response in responses)),
        float(sum(not response.finished for response in responses)),
    )
    return {name: sum(values) / len(prompts) for name, values in zip(names, zip(*ranks.gather(sums), strict=True), strict=True)}
