"""Evaluation: greedy decoding of held-out prompts, and pass@k and avg@n of sampled responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb

from cct.rollout import Prompt, derive_seed

from .judge import scores, weigh
from .sampler import Sampler


def evaluate(sampler: Sampler) -> dict[str, float]:
    """Greedy decoding of the held-out prompts; `eval/accuracy` is the first evidence's mean, `eval/reward` the sum's."""
    return {f"eval/{name}": value for name, value in _greedy(sampler, sampler.recipe.task.held_out()).items()}


def evaluate_frozen(sampler: Sampler) -> dict[str, float]:
    """The same of each frozen set, `frozen/NAME/accuracy` and so on, and the mean accuracy over the sets, `frozen/accuracy`."""
    found = {name: _greedy(sampler, task.held_out()) for name, task in sampler.recipe.evaluation.frozen.items()}
    metrics = {f"frozen/{name}/{key}": value for name, values in found.items() for key, value in values.items()}
    if found:
        metrics["frozen/accuracy"] = sum(values["accuracy"] for values in found.values()) / len(found)
    return metrics


def _greedy(sampler: Sampler, prompts: Sequence[Prompt]) -> dict[str, float]:
    ranks, evidence = sampler.ranks, sampler.recipe.evidence
    mine = [prompts[number] for number in ranks.share(len(prompts))]
    responses = sampler.respond(sampler.encode(mine), None)
    scored = [scores(part, mine, responses, Counter()) for part in evidence]
    names = ("accuracy", "reward", "length", "truncated")
    sums = (
        sum(sum(row) for row in scored[0] if row is not None),
        sum(map(sum, weigh(evidence, scored, responses)[0])),
        float(sum(len(response.tokens) for response in responses)),
        float(sum(not response.finished for response in responses)),
    )
    return {name: sum(values) / len(prompts) for name, values in zip(names, zip(*ranks.gather(sums), strict=True), strict=True)}


def pass_at_k(right: int, samples: int, k: int) -> float:
    """Unbiased estimate that one at least of k responses is right, from `samples` of which `right` were.

    1 - C(samples - right, k) / C(samples, k) (Chen et al. 2021, arXiv 2107.03374). Raises ValueError for k > samples.
    """
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples, {right} of them right")
    return 1 - comb(samples - right, k) / comb(samples, k)


def evaluate_sampled(sampler: Sampler, samples: int, ks: Sequence[int]) -> dict[str, float]:
    """avg@n and pass@k on the held-out problems and on each frozen set; `frozen/avg@n` and so on are means over the sets.

    Sampled at the temperature of training, from the recipe's seed. avg@n is the mean score of the first evidence; a response
    is right where that score is the greatest there can be.
    """
    recipe = sampler.recipe
    sets = {"eval": recipe.task} | {f"frozen/{name}": task for name, task in recipe.evaluation.frozen.items()}
    found = {
        name: _sampled(sampler, task.held_out(), derive_seed(recipe.seed, "pass@k", name), samples, ks)
        for name, task in sets.items()
    }
    metrics = {f"{name}/{key}": value for name, values in found.items() for key, value in values.items()}
    if frozen := [values for name, values in found.items() if name != "eval"]:
        metrics |= {f"frozen/{key}": sum(values[key] for values in frozen) / len(frozen) for key in frozen[0]}
    return metrics


def _sampled(sampler: Sampler, prompts: Sequence[Prompt], seed: int, samples: int, ks: Sequence[int]) -> dict[str, float]:
    many = [prompt for prompt in prompts for _ in range(samples)]
    tokens = [row for row in sampler.encode(prompts) for _ in range(samples)]
    responses = sampler.respond(tokens, [derive_seed(seed, number) for number in range(len(many))])
    first = sampler.recipe.evidence[0]
    best = first.bounds[1]
    totals = [sum(row) if row is not None else 0.0 for row in scores(first, many, responses, Counter())]
    right = [sum(x >= best for x in totals[start : start + samples]) for start in range(0, len(many), samples)]
    passed = {f"pass@{k}": sum(pass_at_k(count, samples, k) for count in right) / len(right) for k in ks}
    return {f"avg@{samples}": sum(totals) / len(totals), **passed}
