"""Evaluation: greedy decoding of held-out prompts, and pass@k and avg@n of sampled responses."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

from cct.errors import TrainingStopped
from cct.evidence import Evidence
from cct.rollout import Prompt, derive_seed

from .judge import Failures, score_all, scores, weigh
from .sampler import Sampler


def evaluate(sampler: Sampler, iteration: int | None = None, *, only_due: bool = False) -> dict[str, float]:
    """Greedy decoding of the task's held-out prompts, `eval/accuracy` and so on, and of further sets, under `sets/NAME`.

    Accuracy is the first evidence's mean, reward the sum's.
    iteration: after which it is, the recipe's last one where it is not given. only_due: leave out sets that are not due then.
    """
    recipe, knobs = sampler.recipe, sampler.recipe.evaluation
    last, metrics = recipe.training.iterations, dict[str, float]()
    after = last if iteration is None else iteration

    def due(every: int) -> bool:
        return not only_due or after % every == 0 or after == last

    if due(knobs.every):
        metrics |= _greedy(sampler, "eval", recipe.task.held_out(), iteration)
    for name, one in knobs.sets.items():
        if not due(one.every or knobs.every):
            continue
        evidence, prompts = one.evidence or recipe.evidence, one.task.held_out()
        metrics |= _greedy(sampler, f"sets/{name}", prompts, iteration, evidence)
        if one.samples:
            seed = derive_seed(recipe.seed, "evaluation", name)
            sampled = _sampled(sampler, f"sets/{name}", prompts, seed, one.samples, [one.samples], evidence, iteration)
            metrics |= {f"sets/{name}/{key}": value for key, value in sampled.items()}
    return metrics


def evaluate_frozen(sampler: Sampler) -> dict[str, float]:
    """The same of each frozen set, `frozen/NAME/accuracy` and so on, and the mean accuracy over the sets, `frozen/accuracy`."""
    sets = sampler.recipe.evaluation.frozen
    metrics = dict[str, float]()
    for name, task in sets.items():
        metrics |= _greedy(sampler, f"frozen/{name}", task.held_out(), None)
    if sets:
        metrics["frozen/accuracy"] = sum(metrics[f"frozen/{name}/accuracy"] for name in sets) / len(sets)
    return metrics


def _greedy(
    sampler: Sampler,
    name: str,
    held_out: Sequence[Prompt],
    iteration: int | None,
    evidence: Sequence[Evidence] | None = None,
) -> dict[str, float]:
    """Metrics `NAME/accuracy` and so on of the prompts, without those that are too long where these are dropped.

    evidence: what judges, the recipe's where it is not given.
    """
    recipe, prompts = sampler.recipe, sampler.fitting(held_out)
    evidence = evidence or recipe.evidence
    if not held_out:
        raise TrainingStopped(f"{name}: the task has no held-out prompts")
    if not prompts:
        raise TrainingStopped(
            f"{name}: every prompt is too long; raise the model's or the engine's limit, or use other prompts"
        )
    numbers = list(sampler.ranks.share(len(prompts)))
    sampled = sampler.respond([prompts[number] for number in numbers], None, numbers)
    mine, responses = [one.prompt for one in sampled], [one.response for one in sampled]
    failures, after = Failures(), recipe.training.iterations if iteration is None else iteration
    scored = score_all(evidence, mine, responses, failures, after)
    judged = [row for row, response in zip(scored[0], responses, strict=True) if row is None or row or not response.tokens]
    sums = (
        sum(sum(row) for row in judged if row is not None),
        float(len(judged)),
        sum(map(sum, weigh(evidence, scored, responses)[0])),
        float(sum(len(response.tokens) for response in responses)),
        float(sum(not response.finished for response in responses)),
    )
    gathered = sampler.ranks.gather((sums, failures))
    right, of, *rest = map(sum, zip(*(part for part, _ in gathered), strict=True))
    failures = Failures.joined(part for _, part in gathered)
    for line in failures.lines(len(prompts), name):
        sampler.say(line)
    metrics = {f"{name}/accuracy": right / of if of else 0.0}
    metrics |= {f"{name}/{key}": x / len(prompts) for key, x in zip(("reward", "length", "truncated"), rest, strict=True)}
    metrics |= {f"{name}/{key}": float(count) for key, count in failures.items()}
    metrics |= {f"{name}/{key}": count for key, count in sampler.environment_counts().items()}
    return metrics | ({f"{name}/overlong": float(len(held_out) - len(prompts))} if recipe.generation.overlong == "drop" else {})


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
        name: _sampled(sampler, name, task.held_out(), derive_seed(recipe.seed, "pass@k", name), samples, ks)
        for name, task in sets.items()
    }
    metrics = {f"{name}/{key}": value for name, values in found.items() for key, value in values.items()}
    if frozen := [values for name, values in found.items() if name != "eval"]:
        metrics |= {f"frozen/{key}": sum(values[key] for values in frozen) / len(frozen) for key in frozen[0]}
    return metrics


def _sampled(
    sampler: Sampler,
    name: str,
    prompts: Sequence[Prompt],
    seed: int,
    samples: int,
    ks: Sequence[int],
    evidence: Sequence[Evidence] | None = None,
    iteration: int | None = None,
) -> dict[str, float]:
    """avg@n and pass@k of n = `samples` responses to each prompt, divided among the processes."""
    recipe, ranks, prompts = sampler.recipe, sampler.ranks, sampler.fitting(prompts)
    numbers = list(ranks.share(len(prompts) * samples))
    sampled = sampler.respond([prompts[n // samples] for n in numbers], [derive_seed(seed, n) for n in numbers])
    asked, responses, failures = [one.prompt for one in sampled], [one.response for one in sampled], Failures()
    first, after = (evidence or recipe.evidence)[0], recipe.training.iterations if iteration is None else iteration
    scored = scores(first, asked, responses, failures, after)
    gathered = ranks.gather(([(bool(row), sum(row or [0.0])) for row in scored], failures))
    judged = [one for part, _ in gathered for one in part]
    for line in Failures.joined(part for _, part in gathered).lines(len(judged), f"{name}, sampled"):
        sampler.say(line)
    passes = [scored and total >= first.bounds[1] for scored, total in judged]  # unjudged responses do not pass
    right = [sum(passes[start : start + samples]) for start in range(0, len(passes), samples)]
    passed = {f"pass@{k}": sum(pass_at_k(count, samples, k) for count in right) / len(right) for k in ks}
    return {f"avg@{samples}": sum(total for _, total in judged) / len(judged), **passed}
