"""Evaluation by sampling: pass@k and avg@n of several responses to each problem."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.policy.sampling import Engine
from cct.recipe import Recipe
from cct.rollout import Prompt, derive_seed

from .failures import Failures
from .prompts import encode, fitting
from .rows import respond, scores


def pass_at_k(right: int, samples: int, k: int) -> float:
    """Unbiased estimate that one at least of k responses is right, from `samples` of which `right` were.

    1 - C(samples - right, k) / C(samples, k) (Chen et al. 2021, arXiv 2107.03374). Raises ValueError for k > samples.
    """
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples, {right} of them right")
    return 1 - comb(samples - right, k) / comb(samples, k)


def evaluate_sampled(recipe: Recipe, engine: Engine, tokenizer: Tokenizer, samples: int, ks: Sequence[int]) -> dict[str, float]:
    """avg@n and pass@k on the held-out problems and on each frozen set; `frozen/avg@n` and so on are means over the sets.

    Sampled at the temperature of training, from the recipe's seed. avg@n is the mean score of the first evidence; a response
    is right where that score is the greatest there can be.
    """
    sets = {"eval": recipe.task} | {f"frozen/{name}": task for name, task in recipe.evaluation.frozen.items()}
    found = {
        name: _sampled(recipe, engine, tokenizer, task.held_out(), derive_seed(recipe.seed, "pass@k", name), samples, ks)
        for name, task in sets.items()
    }
    metrics = {f"{name}/{key}": value for name, values in found.items() for key, value in values.items()}
    if frozen := [values for name, values in found.items() if name != "eval"]:
        metrics |= {f"frozen/{key}": sum(values[key] for values in frozen) / len(frozen) for key in frozen[0]}
    return metrics


def _sampled(
    recipe: Recipe,
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    seed: int,
    samples: int,
    ks: Sequence[int],
) -> dict[str, float]:
    prompts = fitting(recipe, engine.actor, tokenizer, prompts)
    many = [prompt for prompt in prompts for _ in range(samples)]
    tokens = [row for row in encode(recipe, engine.actor, tokenizer, prompts) for _ in range(samples)]
    responses = respond(recipe, engine, tokenizer, tokens, [derive_seed(seed, number) for number in range(len(many))])
    judge, best = recipe.evidence[0], recipe.evidence[0].bounds[1]
    scored = scores(judge, many, responses, Failures(), recipe.training.iterations)
    totals = [sum(row or [0.0]) for row in scored]
    passes = [bool(row) and total >= best for row, total in zip(scored, totals, strict=True)]  # who was not judged does not
    right = [sum(passes[start : start + samples]) for start in range(0, len(many), samples)]
    passed = {f"pass@{k}": sum(pass_at_k(count, samples, k) for count in right) / len(right) for k in ks}
    return {f"avg@{samples}": sum(totals) / len(totals), **passed}
