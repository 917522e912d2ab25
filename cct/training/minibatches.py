"""Minibatches: what one forward and backward reads, for the policy or for the critic."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from cct.agent.agent import Agent
from cct.critic.functional import prompt_numbers, rank_in_group
from cct.errors import attributed_to
from cct.geometry import Geometry
from cct.geometry.functional import aggregation_weights, correction_weights
from cct.handover import read_only
from cct.recipe import Recipe
from cct.rollout import Credit, Rollout, Trace, derive_seed
from cct.tensors import as_mask
from cct.transport.functional import join

from .plans import or_any, trimmed
from .rows import Row


def random_order(recipe: Recipe, iteration: int, rows: Sequence[Row]) -> list[list[int]]:
    """Minibatches of an iteration's rows, as numbers in sampling order: random episodes, each with all its rows."""
    of_episode: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        of_episode.setdefault(row.episode, []).append(number)
    generator = torch.Generator().manual_seed(derive_seed(recipe.seed, "order", iteration))
    episodes, size = list(of_episode.values()), recipe.training.minibatch_size
    order = [episodes[number] for number in torch.randperm(len(episodes), generator=generator).tolist()]
    return [[number for rows in order[start : start + size] for number in rows] for start in range(0, len(order), size)]


@dataclass
class PolicyBatch:
    """Rows for one forward and backward of the policy. Weights were taken over the whole minibatch, before it was split."""

    input_ids: Tensor  # [B, S]
    attention_mask: Tensor  # [B, S]
    mask: Tensor  # [B, T]
    token_weights: Tensor  # [B, T] 1 / tokens of the minibatch: of metrics
    loss_weights: Tensor  # [B, T] of the loss, by the geometry's aggregation
    advantages: Tensor  # [B, T]
    logprobs: Tensor | None  # [B, T] of the behaviour policy, which the ratio is to; None: it is the one that learns
    correction: Tensor | None  # [B, T] of the surrogate alone, by the geometry's correction
    marked: Tensor | None  # [B, T] tokens that the geometry chose from the whole minibatch
    reference_logprobs: Tensor | None  # [B, T]
    with_entropy: bool  # there was no behaviour forward, so this one has to measure the entropy


@dataclass
class CriticBatch:
    """Rows for one forward and backward of the critic, over the traces of the actor's forward."""

    trace: Trace
    mask: Tensor  # [B, T]
    token_weights: Tensor  # [B, T] 1 / tokens of the minibatch
    value_targets: Tensor  # [B, T]
    ranks: Tensor  # [B] of each response among those to its prompt in its iteration

    @property
    def prompt_keys(self) -> Tensor:
        """[B] a number per prompt, by which an ensemble splits its data."""
        width = self.mask.shape[1]
        return prompt_numbers(self.trace.input_ids[:, :-width], self.trace.attention_mask[:, :-width])


Batch = PolicyBatch | CriticBatch


def policy_batches(
    rollout: Rollout,
    credit: Credit,
    geometry: Geometry,
    cuts: Sequence[int],
    mine: Sequence[list[int]],
    iteration: int,
    seed: int,
    *,
    read: bool,
) -> list[PolicyBatch]:
    """A process's part of each of the policy's minibatches, those of one minibatch together.

    cuts: rows of each minibatch. mine: the rows of each of its forwards. seed: of what the geometry chooses. read: there was a
    behaviour forward.
    """
    old = rollout.rollout_logprobs if geometry.ratio_to == "engine" else rollout.logprobs
    assert old is not None
    on_policy = not read and geometry.ratio_to == "trainer"
    masks = rollout.mask.split(list(cuts))
    episodes = [None] * len(masks) if rollout.episodes is None else rollout.episodes.split(list(cuts))
    loss_weights = torch.cat(
        [
            aggregation_weights(m, geometry.aggregation, constant=geometry.constant, episodes=e)
            for m, e in zip(masks, episodes, strict=True)
        ]
    )
    weights = None if geometry.correction == "none" else correction(rollout, geometry)[1]
    token_weights = torch.cat([aggregation_weights(m) for m in masks])
    marked = _marked(rollout, old, credit, geometry, cuts, iteration, seed)
    batches = []
    for rows, counts in map(or_any, mine):
        columns, width = trimmed(rollout, rows)
        here = (rows, slice(width))
        reference = rollout.reference_logprobs
        batches.append(
            PolicyBatch(
                rollout.input_ids[rows, columns],
                rollout.attention_mask[rows, columns],
                rollout.mask[here],
                token_weights[here] * counts,
                loss_weights[here] * counts,
                credit.advantages[here],
                logprobs=None if on_policy else old[here],
                correction=None if weights is None else weights[here],
                marked=None if marked is None else marked[here],
                reference_logprobs=None if reference is None else reference[here],
                with_entropy=not read,
            )
        )
    return batches


def _marked(
    rollout: Rollout, old: Tensor, credit: Credit, geometry: Geometry, cuts: Sequence[int], iteration: int, seed: int
) -> Tensor | None:
    """[B, T] of the tokens that the geometry chooses from each whole minibatch; None where it chooses none."""
    minibatches = zip(*(x.split(list(cuts)) for x in (old, credit.advantages, rollout.mask)), strict=True)
    name = f"geometry '{geometry.use}' (mark)"
    given = {"the log-probabilities": old, "the advantages": credit.advantages, "the mask": rollout.mask}
    with attributed_to(name, iteration), read_only(name, given, contents=iteration <= 1):
        chosen = [geometry.mark(o, a, m, derive_seed(seed, "mark", number)) for number, (o, a, m) in enumerate(minibatches)]
        marked = None if None in chosen else torch.cat([as_mask(part, "marked") for part in chosen])
        if marked is not None and marked.shape != rollout.mask.shape:
            raise ValueError(f"marked must have shape {tuple(rollout.mask.shape)}; got {tuple(marked.shape)}")
    return marked


def correction(rollout: Rollout, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The ratio of trainer to engine at each token, [B, T], as it is and as it weighs the loss."""
    assert rollout.rollout_logprobs is not None
    return correction_weights(
        rollout.logprobs,
        rollout.rollout_logprobs,
        rollout.mask,
        geometry.correction,
        geometry.correction_level,
        geometry.correction_bound,
        geometry.correction_lower,
    )


@dataclass(frozen=True)
class CriticData:
    """A critic batch: the responses of one iteration and their value targets.

    Traces are not kept: when it is gone over again, the policy of that time makes new ones.
    """

    input_ids: Tensor  # [B, S]
    attention_mask: Tensor  # [B, S]
    mask: Tensor  # [B, T] bool
    numbers: Tensor  # [B] of each response among those to its prompt
    targets: Tensor  # [B, T]
    cuts: Tensor  # rows of each minibatch

    @classmethod
    def of(cls, rollout: Rollout, targets: Tensor, cuts: Sequence[int]) -> CriticData:
        _, split = join(rollout)  # the rows of an episode have one rank
        ranks = rank_in_group(rollout.groups if split is None else rollout.groups[split.first])
        ranks = ranks if split is None else ranks[split.episode]
        return cls(rollout.input_ids, rollout.attention_mask, rollout.mask, ranks, targets, torch.tensor(cuts))

    def to(self, device: torch.device | str) -> CriticData:
        return CriticData(**{name: x.to(device) for name, x in self.tensors.items()})

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def prompt_width(self) -> int:
        return self.input_ids.shape[1] - self.mask.shape[1]

    @torch.no_grad()
    def traces(self, agent: Agent, mine: Sequence[list[int]]) -> list[Trace]:
        """The critic's inputs under the current policy, for the rows of each of a process's forwards."""
        traces = []
        for rows, _ in map(or_any, mine):
            columns, width = trimmed(self, rows)
            trace = agent(self.input_ids[rows, columns], self.attention_mask[rows, columns], width, with_critic=True).trace
            assert trace is not None
            traces.append(trace)
        return traces

    def batches(self, mine: Sequence[list[int]], traces: Sequence[Trace]) -> list[CriticBatch]:
        """A process's part of each minibatch, those of one minibatch together."""
        weights = torch.cat([aggregation_weights(mask) for mask in self.mask.split(self.cuts.tolist())])
        batches = []
        for (rows, counts), trace in zip(map(or_any, mine), traces, strict=True):
            here = (rows, slice(trimmed(self, rows)[1]))
            shared = weights[here] * counts
            batches.append(CriticBatch(trace, self.mask[here], shared, self.targets[here], self.numbers[rows]))
        return batches


def origin_of(recipe: Recipe) -> str:
    """All of a recipe that decides on responses and value targets, as JSON: the critic's window holds iterations under one.

    Another recipe would teach it two targets at once, and have minibatches of another size.
    """
    training = ("prompts_per_iteration", "responses_per_prompt", "bootstrap_truncated")
    generation = ("max_new_tokens", "temperature", "top_p", "top_k", "stop", "overlong")
    content = recipe.model_dump(mode="json", include={"task", "evidence", "transport", "critic"})
    content["generation"] = recipe.generation.model_dump(mode="json", include=set(generation))
    if recipe.environment is not None:
        content["environment"] = recipe.environment.model_dump(mode="json")
    content["geometry"] = {knob: getattr(recipe.geometry, knob) for knob in ("kl_in_reward", "kl_estimator")}
    content["training"] = {knob: getattr(recipe.training, knob) for knob in training}
    return json.dumps(content, sort_keys=True)


def passes(batches: Sequence[Batch], each: int, epochs: int, generator: torch.Generator) -> Iterator[list[Batch]]:
    """Minibatches of `each` consecutive batches, in random order, `epochs` times over."""
    for _ in range(epochs if batches else 0):
        for start in torch.randperm(len(batches) // each, generator=generator).tolist():
            yield list(batches[start * each : (start + 1) * each])
