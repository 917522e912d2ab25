"""Rules for combining the parts of a recipe. A rule yields problems, each with its place in the recipe; RULES lists them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from cct.evidence.environment import FromEnvironment
from cct.geometry import geometries
from cct.metrics import METRICS
from cct.registry import REGISTRIES, Component, did_you_mean
from cct.transport import Transport, Wrapper

Problems = Iterator[tuple[str, str]]  # place and message
Parts = Any  # a Recipe; `recipe` imports this module, so it cannot be named here


def problems(recipe: Parts) -> list[tuple[str, str]]:
    """Everything that does not fit, with its place."""
    return [problem for rule in RULES for problem in rule(recipe)]


# --- what cannot run --------------------------------------------------------------------------
def needs_are_met(recipe: Parts) -> Problems:
    for place, part in recipe.parts.items():
        for need in sorted(part.needs):
            if not recipe.providers(need):
                yield place, _unmet(part, need)


def _unmet(part: Component, need: str) -> str:
    if need == "groups":
        return f"'{part.use}' compares responses to one prompt: set training.responses_per_prompt to 2 or more"
    if need == "teacher":
        return f"'{part.use}' learns from a teacher: set `teacher` to a policy with the same vocabulary"
    able = [
        f"{axis}: {name}"
        for axis, registry in REGISTRIES.items()
        for name in registry.names()
        if need in _provided(registry[name])
    ]
    what = f"these parts do: {', '.join(able)}" if able else "no registered part does"
    what += "; or set policy.warm_start: null" if need == "demonstrations" else ""
    return f"'{part.use}' needs {need}, and nothing in this recipe provides it; {what}"


def _provided(cls: type[Component]) -> frozenset[str]:
    try:
        return cls.model_construct().provides
    except AttributeError:  # depends on a knob without a default
        return frozenset()


def environment_is_read_right(recipe: Parts) -> Problems:
    environment = recipe.environment
    for index, part in enumerate(recipe.evidence if environment is not None else ()):
        if not isinstance(part, FromEnvironment):
            continue
        place, named = f"evidence.{index}", environment.components
        if part.component is not None and part.component not in named:
            yield f"{place}.component", f"environment '{environment.use}': {did_you_mean('reward', part.component, named)}"
        low, high = environment.bounds
        if part.component is None and not (part.low <= low and high <= part.high):
            yield (
                place,
                f"an episode of '{environment.use}' can earn from {low:g} to {high:g}, and 'environment' takes "
                f"{part.low:g} to {part.high:g}; set low to {low:g} and high to {high:g}",
            )


def groups_are_large_enough(recipe: Parts) -> Problems:
    each = recipe.training.responses_per_prompt
    for place, part in recipe.parts.items():
        if isinstance(part, Transport) and not isinstance(part, Wrapper) and 2 <= each < part.least_responses:
            yield (
                place,
                f"'{part.use}' needs at least {part.least_responses} responses per prompt; "
                f"training.responses_per_prompt is {each}",
            )


def truncated_sampling_is_corrected(recipe: Parts) -> Problems:
    generation, geometry = recipe.generation, recipe.geometry
    if generation.truncates and "own" not in geometry.engine_ratio | recipe.transport.engine_ratio:
        other = ", or geometry.ratio_to to engine" if geometry.weighs else ""
        yield (
            "generation",
            f"top_p ({generation.top_p}) or top_k ({generation.top_k}) leaves tokens out, so the trainer's "
            f"ratios do not refer to the sampled distribution; set geometry.correction to truncate or mask{other}",
        )


def lag_is_corrected(recipe: Parts) -> Problems:
    generation, geometry = recipe.generation, recipe.geometry
    if not generation.lag:
        return
    if "own" not in geometry.engine_ratio | recipe.transport.engine_ratio:
        other = ", geometry.ratio_to to engine" if geometry.weighs else ""
        yield (
            "generation.lag",
            "responses are sampled from the weights before the last update, and without a correction the loss takes them for "
            f"the policy's own; set geometry.correction to truncate or mask{other}, or lag to 0",
        )
    if (share := generation.processes_per_engine) > 1:
        yield (
            "generation.lag",
            f"{share} processes share an engine, and it would communicate between them during the update, whose own "
            "communication it could block; set tensor_parallel to 1, or lag to 0",
        )


def refills_can_find_contrast(recipe: Parts) -> Problems:
    training = recipe.training
    if training.refill and training.responses_per_prompt < 2:
        yield (
            "training.refill",
            "one response to a prompt never has contrast, so every prompt would be replaced in every round; set "
            "training.responses_per_prompt to 2 or more, or refill to 0",
        )
    low, high = recipe.evidence[0].bounds
    if training.refill and low >= high:
        yield (
            "training.refill",
            f"the first evidence, '{recipe.evidence[0].use}', always gives {low:g}, so nothing has contrast",
        )


def engines_divide_processes(recipe: Parts) -> Problems:
    share = recipe.generation.processes_per_engine
    if recipe.training.processes % share:
        yield (
            "generation.tensor_parallel",
            f"{share} processes share an engine; this must divide the number of processes, "
            f"{recipe.training.processes} (training.devices x training.nodes)",
        )


def engines_reach_processes(recipe: Parts) -> Problems:
    if recipe.generation.one_machine and recipe.training.nodes > 1:
        yield (
            "generation",
            f"servers that cct starts serve the processes of one machine, and training.nodes is {recipe.training.nodes}; start "
            "servers yourself and set urls to them",
        )


# --- what would run but silently mean something else ------------------------------------------
def token_credit_reaches_tokens(recipe: Parts) -> Problems:
    geometry = recipe.geometry
    if recipe.transport.grain == "token" and geometry.grain == "sequence":
        able = [name for name in geometries.names() if geometries[name].grain == "token" and name != geometry.token_form]
        form = [f"{geometry.token_form}, its token form"] if geometry.token_form else []
        yield (
            "geometry",
            f"'{geometry.use}' averages advantages over each response, which would erase the credit per token of transport "
            f"'{recipe.transport.use}'; these losses keep it: {', '.join([*form, *able])}",
        )


def responses_are_whitened_as_responses(recipe: Parts) -> Problems:
    for place, part in recipe.parts.items():
        if isinstance(part, Transport) and part.grain == "sequence" and part.whitens == "token":
            yield (
                place,
                f"'{part.use}' gives one number per response but whitens over tokens, so long responses count more; "
                "whiten over responses, or not at all",
            )


def kl_counts_once(recipe: Parts) -> Problems:
    geometry = recipe.geometry
    if geometry.kl_coef and geometry.kl_in_reward:
        yield (
            "geometry.kl_in_reward",
            f"the KL to the starting policy would count twice, in rewards ({geometry.kl_in_reward}) and in the loss "
            f"(kl_coef {geometry.kl_coef}); set one of them to 0",
        )


def kl_stays_in_the_critics_range(recipe: Parts) -> Problems:
    critic = recipe.critic
    if recipe.geometry.kl_in_reward and critic is not None and critic.bounded:
        yield (
            "geometry.kl_in_reward",
            f"moves returns outside the range of the evidence, to which critic '{critic.use}' is bounded; set the critic's "
            "output to scalar, or use kl_coef, the KL in the loss",
        )


def kl_reaches_every_reward(recipe: Parts) -> Problems:
    if recipe.geometry.kl_in_reward and recipe.needs("components"):
        yield (
            "geometry.kl_in_reward",
            f"transport '{recipe.transport.use}' reads the rewards of each evidence, and the KL is in none; use kl_coef",
        )


def engine_ratio_counts_once(recipe: Parts) -> Problems:
    geometry = recipe.geometry
    twice = geometry.engine_ratio & recipe.transport.engine_ratio
    if twice:
        knob = "ratio_to" if geometry.correction == "none" else "correction"
        whose = "the token's own" if "own" in twice else "that of later tokens"
        instead = "correction_level to token" if twice == {"later"} and knob == "correction" else "correction to none"
        yield (
            f"geometry.{knob}",
            f"'{getattr(geometry, knob)}' weights by the ratio of trainer to engine, but the advantages of transport "
            f"'{recipe.transport.use}' already contain it ({whose}); it would count twice; set "
            + (instead if knob == "correction" else "ratio_to to trainer"),
        )
    if geometry.correction != "none" and geometry.ratio_to == "engine" and geometry.weighs:
        yield (
            "geometry.correction",
            f"'{geometry.correction}' weights by the ratio of trainer to engine, but `ratio_to: engine` already contains it; "
            "it would count twice; set ratio_to to trainer, which keeps the correction, or correction to none",
        )


# --- what would have no effect ----------------------------------------------------------------
def rewards_differ(recipe: Parts) -> Problems:
    least, greatest = recipe.reward_bounds
    if least >= greatest:
        yield "evidence", "all evidence has weight 0, so every reward is the same; give at least one a weight"


def critic_is_used(recipe: Parts) -> Problems:
    training = recipe.training
    if recipe.critic is not None and not recipe.needs("values"):
        yield "critic", f"transport '{recipe.transport.use}' has no use for a critic; set `critic: null`"
    if recipe.critic is None and training.critic_warmup:
        yield "training.critic_warmup", "there is no critic to warm up; set it to 0"
    if recipe.critic is None and training.critic_window > 1:
        yield "training.critic_window", "there is no critic to keep batches for; set it to 1"


def best_is_measured(recipe: Parts) -> Problems:
    best, sets = recipe.evaluation.best, recipe.evaluation.sets
    if best is None:
        return
    if found := re.match(r"sets/([^/]+)/(.+)", best):
        if found[1] not in sets:
            yield "evaluation.best", did_you_mean("set under evaluation.sets", found[1], sets)
            return
        samples = sets[found[1]].samples
        known = ["accuracy", "reward", "length", "truncated", *([f"avg@{samples}", f"pass@{samples}"] if samples else [])]
        if found[2] not in known:
            yield "evaluation.best", did_you_mean(f"metric of sets/{found[1]}", found[2], known)
    elif not any(metric.covers(best) for metric in METRICS):
        known = [name for metric in METRICS for name in metric.names.split(", ") if "NAME" not in name]
        yield "evaluation.best", did_you_mean("metric", best, known)


def teacher_is_used(recipe: Parts) -> Problems:
    if recipe.teacher is not None and not recipe.needs("teacher"):
        yield "teacher", f"transport '{recipe.transport.use}' has no use for a teacher; `distill` has, or set `teacher: null`"
    if recipe.teacher is not None and recipe.teacher.lora is not None:
        yield "teacher.lora", "a teacher does not learn; set it to null"


RULES: tuple[Callable[[Parts], Problems], ...] = (
    needs_are_met,
    environment_is_read_right,
    groups_are_large_enough,
    truncated_sampling_is_corrected,
    lag_is_corrected,
    refills_can_find_contrast,
    engines_divide_processes,
    engines_reach_processes,
    token_credit_reaches_tokens,
    responses_are_whitened_as_responses,
    kl_counts_once,
    kl_stays_in_the_critics_range,
    kl_reaches_every_reward,
    engine_ratio_counts_once,
    rewards_differ,
    critic_is_used,
    best_is_measured,
    teacher_is_used,
)
