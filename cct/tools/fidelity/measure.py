"""The true advantage at positions of fresh rollouts, and the credit of transports at the same positions."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.agent.agent import Agent
from cct.agent.building import build, restore
from cct.evidence import close_workers
from cct.loading import load_recipe
from cct.metrics import EXPLAINED
from cct.recipe import Recipe, RecipeError
from cct.rollout import Credit, Rollout, derive_seed
from cct.run_folder import RunFolder
from cct.training.credit import Estimator
from cct.training.metrics import rollout_metrics
from cct.training.minibatches import random_order
from cct.training.rows import Row
from cct.training.sampler import Sampler

from .branching import advantages_at
from .scores import Array, Truth
from .variants import sampled_under, variants_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
At = Literal["tokens", "turns"]  # what the action is whose advantage is looked at
Place = tuple[int, int, int, int]  # batch, row, first token of an action in the row, and its number of tokens
DIGITS = 6  # after the point: what differs by less is equal, and shares its rank


@dataclass(frozen=True)
class Measured:
    """Credit and true advantage at each position, and the positions."""

    source: str
    """The run, or the recipe whose starting policy was measured."""
    recipe: str
    """Its name."""
    critic: str | None
    iteration: int
    """The iteration of the policy and the critic."""
    truth: Truth
    credit: dict[str, Array]
    """transport, under another critic with its name -> [N], the run's own first."""
    critics: dict[str, str | None]
    """The critic that each transport read."""
    explained: dict[str, float]
    """Explained variance of the Monte-Carlo return by the values that each transport read; NaN if it read none."""
    at: At
    """Whether a position is a token or a whole turn."""
    places: list[tuple[int, int, int]]
    """Iteration, row and first token of each position."""
    responses: int
    """That were sampled; episodes, where there is an environment."""
    trained: int
    """Tokens of these responses that are trained on, or turns."""
    undecided: int
    """Those that were sampled with a probability below `below`; positions were drawn from them."""
    below: float
    continuations: int
    tokens: int
    """Tokens sampled for the continuations."""
    seconds: float


def measure(
    source: Path,
    written: Sequence[str] = (),
    *,
    critics: Sequence[str] = (),
    plugins: Sequence[str] = (),
    iteration: int | None = None,
    at: At = "tokens",
    batches: int = 4,
    positions: int = 512,
    below: float = 0.95,
    continuations: int = 32,
    seed: int | None = None,
    trust: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Measured:
    """Branch from rollouts of a run's checkpoint (after `iteration`; default: the newest), or of a recipe's starting policy.

    The rollouts are the iterations that the run would have gone on with, `batches` of them: new prompts, as many responses as
    it is used to, whitening and group baselines over as many. written: transports beside the run's own, as YAML. critics: as
    YAML, around what the run's critic learnt; every transport that reads values is computed under each. A run without a critic
    has none of them. positions: actions looked at, drawn from the trainable ones that were sampled with a probability below
    `below`; a surer one decides little, its advantage is at most 1 - below of the range of rewards. at: what an action is, a
    token or a whole turn of an episode; the credit of a turn is the mean over its tokens. continuations: from before each of
    them and from after it, half of them for each half of the truth. seed: of prompts and sampling, in place of the recipe's.
    trust: run plug-ins of a run's recipe without a recorded SHA-256. Raises RecipeError where a transport cannot be computed
    here, TrainingStopped where evidence fails.
    """
    started = time.perf_counter()
    recipe, agent, tokenizer, moments, reached = _opened(source, iteration, at, trust)
    variants = variants_of(source, recipe, written, critics, plugins, seed)
    agent.to(DEVICE)
    base, first = Sampler(sampled_under(variants), agent.actor, tokenizer), reached + 1
    try:
        sampled = _sample(base, variants, agent, moments, range(first, first + batches), on_stage)
        drawn, undecided, trained = _positions(source, sampled, at, positions, below, base.recipe.seed)
        on_stage(f"continuing responses at {len(drawn)} positions")
        truth, tokens = _truth(base, sampled.rows, drawn, first, continuations)
    finally:
        base.close()
        close_workers()
    return Measured(
        str(source),
        recipe.name,
        recipe.critic.use if recipe.critic else None,
        reached,
        truth,
        sampled.credit_at(drawn),
        {name: variant.critic.use if variant.critic else None for name, variant in variants.items()},
        {name: sum(values) / len(values) for name, values in sampled.explained.items()},
        at,
        [(first + b, row, t) for b, row, t, _ in drawn],
        sampled.responses,
        trained,
        undecided,
        below,
        continuations,
        tokens,
        time.perf_counter() - started,
    )


@dataclass
class _Sampled:
    """Batches of responses, and their credit under each variant of the recipe."""

    rows: list[list[Row]] = field(default_factory=list)
    masks: list[torch.Tensor] = field(default_factory=list)
    credit: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    explained: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def responses(self) -> int:
        """An episode of several rows is one."""
        return sum(row.order == 0 for rows in self.rows for row in rows)

    def actions(self, at: At) -> list[Place]:
        """All that are trained on."""
        found = []
        for b, (rows, mask) in enumerate(zip(self.rows, self.masks, strict=True)):
            for number, (row, trained) in enumerate(zip(rows, mask, strict=True)):
                places = trained.nonzero().flatten().tolist()
                of_turn = [list(one) for _, one in groupby(places, key=row.turns.__getitem__)]
                actions = [[place] for place in places] if at == "tokens" else of_turn
                found += [(b, number, action[0], len(action)) for action in actions]
        return found

    def credit_at(self, places: Sequence[Place]) -> dict[str, Array]:
        """[N] by variant: the mean over the tokens of each place."""
        return {
            name: np.array([float(parts[b][row, t : t + n].mean()) for b, row, t, n in places]).round(DIGITS)
            for name, parts in self.credit.items()
        }


def _sample(
    base: Sampler,
    variants: dict[str, Recipe],
    agent: Agent,
    moments: dict[str, tuple[float, float]],
    iterations: Sequence[int],
    on_stage: Callable[[str], None],
) -> _Sampled:
    """The responses of iterations, and their credit under each variant."""
    found, blind = _Sampled(), agent.like(agent.actor)
    for number in iterations:
        on_stage(f"sampling iteration {number}")
        sampled = base.sample(number).rows
        sampled = [sampled[index] for part in random_order(base.recipe, number, sampled) for index in part]
        for name, variant in variants.items():
            estimator = Estimator(variant, agent if variant.critic is not None else blind)
            estimator.moments = moments
            here = Sampler(variant, agent.actor, base.tokenizer, base.engine)
            estimated, rollout, metrics = _estimate(estimator, here, sampled, number)
            found.credit[name].append(estimated.advantages.cpu())
            found.explained[name].append(next((metrics[metric] for metric in EXPLAINED if metric in metrics), math.nan))
        found.rows.append(sampled)
        found.masks.append(rollout.mask.cpu())
    return found


def _truth(
    base: Sampler, rows: Sequence[Sequence[Row]], drawn: Sequence[Place], first: int, continuations: int
) -> tuple[Truth, int]:
    """The true advantage at the positions that were drawn, and the tokens sampled for it. first: the iteration of batch 0."""
    found, tokens = [], 0
    for batch, of_batch in enumerate(rows):
        places = [(row, t, n) for b, row, t, n in drawn if b == batch]
        some, cost = advantages_at(
            base, of_batch, places, continuations, derive_seed(base.recipe.seed, "fidelity", first + batch)
        )
        found += some
        tokens += cost
    advantage, half, other, p = np.array(found).round(DIGITS).T
    groups = [(b, rows[b][row].group) for b, row, _, _ in drawn]
    numbers = {group: number for number, group in enumerate(sorted(set(groups)))}
    return Truth(advantage, (half, other), p, np.array([numbers[group] for group in groups])), tokens


def _estimate(
    estimator: Estimator, sampler: Sampler, rows: Sequence[Row], iteration: int
) -> tuple[Credit, Rollout, dict[str, float]]:
    """The credit of responses under a recipe, the rollout that it was computed from, and their metrics."""
    recipe = estimator.recipe
    rollout = estimator.rollout(rows, sampler.tokenizer, iteration)
    if recipe.needs("greedy"):
        rollout, _ = estimator.greedy(sampler, rollout, rows, iteration)
    if recipe.transport.branches:
        rollout, _ = estimator.branch(sampler, rollout, rows, iteration)
    rollout, _ = estimator.read(rollout, iteration)
    credit, seen = estimator.credit(rollout, iteration)
    return credit, rollout, rollout_metrics(rollout, seen, credit, rollout.scores, recipe.geometry)


Opened = tuple[Recipe, Agent, Tokenizer, dict[str, tuple[float, float]], int]  # as `restore` returns it


def _opened(source: Path, iteration: int | None, at: At, trust: bool) -> Opened:
    """A run as it was after an iteration, or a recipe before its first update. Raises RecipeError where it has no turns."""
    if RunFolder(source).recipe_file.is_file():
        found = restore(source, iteration, trust=trust)
        _must_have_turns(source, found[0], at)
        return found
    if iteration is not None:
        raise RecipeError(f"{source}: a recipe has no checkpoint of iteration {iteration}; name a run folder")
    recipe = load_recipe(source)
    _must_have_turns(source, recipe, at)  # before a warm start, which takes minutes
    agent, tokenizer, _ = build(recipe)
    return recipe, agent, tokenizer, {}, 0


def _must_have_turns(source: Path, recipe: Recipe, at: At) -> None:
    if at == "turns" and recipe.environment is None:
        raise RecipeError(f"{source}: --at turns needs episodes, and the recipe has no environment; --at tokens does not")


def _logprob(row: Row, place: int, count: int) -> float:
    first = row.number(place)
    return sum(row.response.logprobs[first : first + count])


def _positions(source: Path, sampled: _Sampled, at: At, count: int, below: float, seed: int) -> tuple[list[Place], int, int]:
    """So many of the actions sampled with a probability below `below`, in order; of how many, and how many there are at all.

    Drawn without replacement. Raises RecipeError where there are fewer than two.
    """
    least, every = math.log(below) if below < 1 else math.inf, sampled.actions(at)
    unsure = [(b, row, t, n) for b, row, t, n in every if _logprob(sampled.rows[b][row], t, n) < least]
    draws = torch.Generator().manual_seed(derive_seed(seed, "fidelity positions"))
    order = torch.randperm(len(unsure), generator=draws)[:count]
    if len(order) < 2:
        raise RecipeError(
            f"{source}: of {sampled.responses} responses {len(order)} {at} were sampled with a probability below "
            f"{below:g}, so nothing was decided in them; --below 1 looks at all {at}"
        )
    return [unsure[index] for index in sorted(order.tolist())], len(unsure), len(every)
