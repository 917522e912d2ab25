"""The true advantage at positions of fresh rollouts, and the credit of transports at the same positions."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
from cct.training.credit import Estimator, random_order
from cct.training.metrics import rollout_metrics
from cct.training.rows import Row
from cct.training.sampler import Sampler, State

from .scores import Array, Truth, branched_advantage
from .variants import variants_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIGITS = 6  # after the point: what differs by less is equal, and shares its rank


@dataclass(frozen=True)
class Measured:
    """What was found at each position, and where it was found."""

    source: str
    """The run, or the recipe whose starting policy was looked at."""
    recipe: str
    """Its name."""
    critic: str | None
    iteration: int
    """After which the policy and the critic were as they were here."""
    truth: Truth
    credit: dict[str, Array]
    """transport, under another critic with its name -> [N], the run's own first."""
    critics: dict[str, str | None]
    """Which of them each transport read."""
    explained: dict[str, float]
    """How much of the Monte-Carlo return's variance the values did that it read; NaN where it read none."""
    places: list[tuple[int, int, int]]
    """Iteration, row and token of each position."""
    responses: int
    """That were sampled."""
    trained_tokens: int
    """Of these responses."""
    undecided: int
    """Of these tokens, sampled with a probability below `below`; positions were drawn among them."""
    below: float
    continuations: int
    tokens: int
    """Sampled for the continuations."""
    seconds: float


def measure(
    source: Path,
    written: Sequence[str] = (),
    *,
    critics: Sequence[str] = (),
    plugins: Sequence[str] = (),
    at: int | None = None,
    batches: int = 4,
    positions: int = 512,
    below: float = 0.95,
    continuations: int = 32,
    seed: int | None = None,
    trust: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Measured:
    """Branch from rollouts of a run's checkpoint (`at` an iteration; default: the newest), or of a recipe's starting policy.

    The rollouts are the iterations that the run would have gone on with, `batches` of them: new prompts, as many responses as
    it is used to, whitening and group baselines over as many. written: transports beside the run's own, as YAML. critics: as
    YAML, around what the run's critic learnt; every transport that reads values is computed under each. A run without a critic
    has none of them.
    positions: tokens looked at, drawn from the trainable ones that were sampled with a probability below `below`; a surer token
    decides little, its advantage is at most 1 - below of the range of rewards. continuations: from before each of them and
    from after it, half of them for each half of the truth. seed: of prompts and sampling, in place of the recipe's.
    trust: run plug-ins of a run's recipe without a recorded SHA-256.

    Raises RecipeError where a transport cannot be computed here, TrainingStopped where evidence fails.
    """
    started = time.perf_counter()
    recipe, agent, tokenizer, moments, iteration = _opened(source, at, trust)
    variants = variants_of(source, recipe, written, critics, plugins, seed)
    agent.to(DEVICE)
    base, first = Sampler(next(iter(variants.values())), agent.actor, tokenizer), iteration + 1
    try:
        sampled = _sample(base, variants, agent, moments, range(first, first + batches), on_stage)
        where = derive_seed(base.recipe.seed, "fidelity positions")
        drawn, undecided = _positions(source, sampled, positions, below, where)
        on_stage(f"continuing responses at {len(drawn)} positions")
        truth, tokens = _truth(base, sampled.rows, drawn, first, continuations)
    finally:
        base.close()
        close_workers()
    return Measured(
        str(source),
        recipe.name,
        recipe.critic.use if recipe.critic else None,
        iteration,
        truth,
        sampled.credit_at(drawn),
        {name: variant.critic.use if variant.critic else None for name, variant in variants.items()},
        {name: sum(values) / len(values) for name, values in sampled.explained.items()},
        [(first + b, row, t) for b, row, t in drawn],
        sum(map(len, sampled.rows)),
        sum(int(mask.sum()) for mask in sampled.masks),
        undecided,
        below,
        continuations,
        tokens,
        time.perf_counter() - started,
    )


@dataclass
class _Sampled:
    """Batches of responses, and what each variant of the recipe makes of them."""

    rows: list[list[Row]] = field(default_factory=list)
    masks: list[torch.Tensor] = field(default_factory=list)
    credit: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    explained: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def credit_at(self, places: Sequence[tuple[int, int, int]]) -> dict[str, Array]:
        """[N] by variant."""
        return {
            name: np.array([float(parts[b][row, t]) for b, row, t in places]).round(DIGITS)
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
        sampled = base.sample(number)
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
    base: Sampler, rows: Sequence[Sequence[Row]], drawn: Sequence[tuple[int, int, int]], first: int, continuations: int
) -> tuple[Truth, int]:
    """The true advantage at the positions that were drawn, and the tokens sampled for it. first: the iteration of batch 0."""
    found, tokens = [], 0
    for batch, of_batch in enumerate(rows):
        places = [(row, t) for b, row, t in drawn if b == batch]
        some, cost = advantages_at(
            base, of_batch, places, continuations, derive_seed(base.recipe.seed, "fidelity", first + batch)
        )
        found += some
        tokens += cost
    advantage, half, other, p = np.array(found).round(DIGITS).T
    groups = [(b, rows[b][row].group) for b, row, _ in drawn]
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


def _opened(source: Path, at: int | None, trust: bool) -> Opened:
    """A run as it was after an iteration, or a recipe before its first update."""
    if RunFolder(source).recipe_file.is_file():
        return restore(source, at, trust=trust)
    if at is not None:
        raise RecipeError(f"{source}: a recipe has no checkpoints, so there is none of iteration {at}; name a run folder")
    recipe = load_recipe(source)
    agent, tokenizer, _ = build(recipe)
    return recipe, agent, tokenizer, {}, 0


def _logprob(row: Row, place: int) -> float:
    return row.response.logprobs[row.number(place)]


def _positions(source: Path, sampled: _Sampled, count: int, below: float, seed: int) -> tuple[list[tuple[int, int, int]], int]:
    """(batch, row, token) of so many of the tokens sampled with a probability below `below`, in order; and of how many.

    Drawn without replacement. Raises RecipeError where there are fewer than two.
    """
    least = math.log(below) if below < 1 else math.inf
    every = [
        (b, row, t)
        for b, mask in enumerate(sampled.masks)
        for row, t in mask.nonzero().tolist()
        if _logprob(sampled.rows[b][row], t) < least
    ]
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))[:count]
    if len(order) < 2:
        raise RecipeError(
            f"{source}: of {sum(map(len, sampled.rows))} responses {len(order)} tokens were sampled with a probability below "
            f"{below:g}, so nothing was decided in them; --below 1 looks at all tokens"
        )
    return [every[index] for index in sorted(order.tolist())], len(every)


def advantages_at(
    sampler: Sampler, rows: Sequence[Row], places: Sequence[tuple[int, int]], each: int, seed: int
) -> tuple[list[tuple[float, float, float, float]], int]:
    """Q(s, a) - V(s) at (row, token) of each place: the estimate, those of its two halves, and the p-value of 0.

    each: continuations from before and from after every token. Returns as well the tokens that were sampled. Raises RecipeError
    where fewer than four continuations of a state could be judged.
    """

    def state(row: Row, t: int) -> State:
        return sampler.key(row), row.response.tokens[:t]

    here = [(rows[number], rows[number].number(t)) for number, t in places]
    ends = [t + 1 == len(row.response.tokens) for row, t in here]  # nothing follows: what the token is worth is known
    wanted = [state(row, t + k) for (row, t), ended in zip(here, ends, strict=True) for k in ((0,) if ended else (0, 1))]
    states = list(dict.fromkeys(wanted))
    continued, cost = sampler.continue_from(rows, states, each, seed)
    of_state = dict(zip(states, continued, strict=True))
    if (fewest := min(map(len, continued), default=each)) < 4:
        raise RecipeError(f"{fewest} of {each} continuations of a state could be judged, and at least 4 are needed")
    found = []
    for (row, t), ended in zip(here, ends, strict=True):
        reward = row.rewards[t]
        after = [reward] * each if ended else [reward + one.value for one in of_state[state(row, t + 1)]]
        before = of_state[state(row, t)]
        returns, chose = [one.value for one in before], [one.first == row.response.tokens[t] for one in before]
        whole, p = branched_advantage(after, returns, chose)
        half, other = (branched_advantage(after[k::2], returns[k::2], chose[k::2])[0] for k in (0, 1))
        found.append((whole, half, other, p))
    return found, int(cost["branch/tokens"])
