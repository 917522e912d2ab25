"""From prompts to minibatches: sample, judge, read, transport. No gradient here.

Every random choice derives from (recipe seed, purpose, iteration), so iteration n is the same whether
a run got there in one go or was resumed.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cct.geometry.functional import aggregation_weights, correction_weights, kl_estimate
from cct.handover import check, read_only
from cct.policy.sampling import Engine, EngineError
from cct.recipe import Recipe
from cct.registry import described
from cct.rollout import Credit, Rollout, Trace, derive_seed
from cct.tensors import as_mask
from cct.transport.functional import explained_variance, explained_variance_within, gated_gae, masked_mean_std

from .agent import Agent
from .batching import Minibatch, micro_batches, trimmed
from .lessons import Lesson
from .ranks import Ranks
from .rows import Row, branch, greedy_scores, sample_rows
from .stopped import TrainingStopped, blamed_on

# Share of the old running mean and deviation of a statistic kept at each iteration: follows the policy within ~10 iterations.
MOMENTS_DECAY = 0.9


@dataclass
class Sample:
    """A row of samples.jsonl, for people."""

    prompt: str
    response: str
    reward: float
    advantage: float  # mean over the response's tokens
    finished: bool


@dataclass
class Iteration:
    """What one round of sampling gave."""

    started: float  # time.perf_counter() when it began
    rollout: Rollout  # as the transport saw it
    rows: list[Row]  # the responses, in the rollout's order
    credit: Credit
    updates: list[Minibatch]
    micro_batches: int  # of them in an optimizer step
    samples: list[Sample]
    metrics: dict[str, float]


def _of_one_kind(other: object, rollout: Rollout, name: str) -> None:
    """Raises TrainingStopped where what a critic's `baseline` returned cannot stand for the rollout."""
    values = other.values if isinstance(other, Rollout) else None
    if values is None or values.shape != rollout.mask.shape or not values.is_floating_point():
        found = f"a rollout with {described(values)} as values" if isinstance(other, Rollout) else described(other)
        raise TrainingStopped(
            f"critic '{name}' returned {found} as its baseline; expected the rollout with values of shape "
            f"{tuple(rollout.mask.shape)}, or None"
        )


class Collector:
    """Makes the iterations of a run.

    Its state is the running moments of the gates' statistics, what the critic goes on learning from, and the open engine.
    """

    def __init__(
        self,
        recipe: Recipe,
        agent: Agent,
        tokenizer: PreTrainedTokenizerBase,
        reference: PreTrainedModel | None,
        engine: Engine | None = None,  # of the agent's actor, where one is open already
    ):
        self.recipe, self.agent, self.tokenizer = recipe, agent, tokenizer
        self.reference = (
            Agent(reference, None, agent.temperature, bf16=agent.bf16, logits_at_once=agent.logits_at_once)
            if reference is not None
            else None
        )
        self.moments: dict[str, tuple[float, float]] = {}
        self.past: list[Lesson] = []  # of the iterations before, the newest first
        self.on_stage: Callable[[str], None] = lambda stage: None
        self._engine = engine

    @property
    def engine(self) -> Engine:
        """Opened when it is first needed: the processes know each other, and weights are restored, by then."""
        if self._engine is None:
            try:
                self._engine = self.recipe.generation.open(self.agent.actor, self.tokenizer)
            except EngineError as error:
                raise TrainingStopped(str(error)) from error
        return self._engine

    def sync(self) -> dict[str, float]:
        """The policy was updated: so must be the engine. Returns metrics; raises TrainingStopped where it is not the same."""
        started = time.perf_counter()
        try:
            return self.engine.sync() | {"time/sync": time.perf_counter() - started}
        except EngineError as error:
            raise TrainingStopped(str(error)) from error

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def sample(self, iteration: int, on_stage: Callable[[str], None] = lambda stage: None) -> tuple[list[Row], Counter[str]]:
        """The judged responses of an iteration, in the order of the prompts, and how often which evidence raised."""
        seed = derive_seed(self.recipe.seed, "sample", iteration)
        with blamed_on(f"task '{self.recipe.task.use}'", iteration):
            prompts = self.recipe.prompts(iteration, iteration)
        return sample_rows(self.recipe, self.engine, self.tokenizer, prompts, seed, Ranks.current(), on_stage)

    def collect(self, iteration: int, sampled: tuple[list[Row], Counter[str]] | None = None) -> Iteration:
        """Iteration number 1, 2, ...; 0 and below are the critic's warm-up. sampled: what `sample` gave, where it was asked."""
        recipe, ranks, size = self.recipe, Ranks.current(), self.recipe.training.minibatch_size
        clock, started = list[tuple[str, float]](), time.perf_counter()

        def stage(name: str) -> None:
            self.on_stage(name)
            clock.append((name, time.perf_counter()))

        seed = lambda purpose: derive_seed(recipe.seed, purpose, iteration)  # noqa: E731
        rows, errors = sampled or self.sample(iteration, stage)
        baselines: list[float] | None = None
        if recipe.needs("greedy"):
            stage("greedy")
            baselines, greedy_errors = greedy_scores(
                recipe, self.engine, self.tokenizer, recipe.prompts(iteration, iteration), ranks
            )
            errors = errors + greedy_errors
        # Rows in random order from here on: the behaviour forward's chunks are the minibatches.
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed("order"))).tolist()
        ordered = [rows[index] for index in order]
        plan, *plans = self._plans(ordered, ranks.world)
        rollout, branched = self._tensors(ordered, seed("transport")), dict[str, float]()
        if baselines is not None:
            rollout = rollout.replace(greedy_scores=rollout.rewards.new_tensor(baselines)[rollout.groups])
        if recipe.transport.branches:
            stage("branch")
            rollout, branched, more_errors = self._branch(rollout, ordered, seed("branch"), ranks)
            errors = errors + more_errors
        self.engine.rest()
        traces: list[Trace] = []
        if self._reads_before:
            stage("behaviour")
            rollout, traces = self._read(rollout, plan, ranks)
        self._check_reading(rollout, iteration)
        repeated = [
            batch
            for lesson, each in zip(self.past, plans, strict=True)
            for batch in lesson.minibatches(each[ranks.rank], lesson.read_by(self.agent, each[ranks.rank]), size)
        ]
        scores = rollout.scores  # of the evidence alone
        rollout, cost = self._kl_in_reward(rollout)
        stage("transport")
        credit, seen = self._credit(rollout, iteration), rollout
        if recipe.critic is not None and credit.value_targets is not None:
            name = f"critic '{recipe.critic.use}' (baseline)"
            with blamed_on(name, iteration):
                with read_only(name, vars(rollout) | vars(credit), contents=iteration <= 1):
                    other = recipe.critic.baseline(rollout, credit.value_targets, recipe.reward_bounds)
                if other is not None:
                    _of_one_kind(other, rollout, recipe.critic.use)
                    assert other.values is not None
                    check(name, other.values, rollout.mask)
                    if other.bootstrap is not None:
                        check(name, other.bootstrap, rollout.valid)
            if other is not None:
                credit, seen = self._credit(other, iteration), other
        lessons: list[Minibatch] = []
        if traces and credit.value_targets is not None:
            lessons = Lesson.of(rollout, credit.value_targets).minibatches(plan[ranks.rank], traces, size) + repeated
        updates = self._updates(rollout, credit, lessons, plan[ranks.rank], iteration, seed("minibatches"))
        metrics = self._metrics(rollout, credit, scores, seen) | cost
        stage("update")
        metrics |= branched | {f"evidence/{name}": float(count) for name, count in errors.items()}
        metrics |= {f"time/{name}": after - before for (name, before), (_, after) in pairwise(clock)}
        if judged := [score for score in baselines or [] if math.isfinite(score)]:
            metrics["train/greedy_reward"] = sum(judged) / len(judged)
        per_response = (credit.advantages.masked_fill(~rollout.mask, 0.0).sum(1) / rollout.mask.sum(1).clamp(min=1)).tolist()
        advantage = dict(zip(order, per_response, strict=True))
        samples = [
            Sample(row.prompt.text, row.response.text, sum(row.rewards), advantage[number], row.response.finished)
            for number, row in enumerate(rows[: recipe.logging.samples])
        ]
        return Iteration(started, seen, ordered, credit, updates, len(plan[0]) // (len(rows) // size), samples, metrics)

    @property
    def _reads_before(self) -> bool:
        """Whether the behaviour forward says something that neither the update's own forward nor the engine does."""
        recipe, geometry = self.recipe, self.recipe.geometry
        if recipe.transport.reads_policy or recipe.critic is not None or self.reference is not None:
            return True
        return geometry.correction != "none" or not (geometry.ratio_to == "engine" or self._single_step)

    @property
    def _single_step(self) -> bool:
        """Whether the old policy of every ratio is the one that learns, and nothing is chosen by it beforehand."""
        training = self.recipe.training
        steps = training.epochs * training.prompts_per_iteration * training.responses_per_prompt // training.minibatch_size
        return steps == 1 and not self.recipe.geometry.marks

    def _plans(self, rows: Sequence[Row], world: int) -> list[list[list[list[int]]]]:
        """For these rows and each lesson of the past, for each rank the rows of its forwards; all minibatches have as many."""
        training, sizes = self.recipe.training, [(len(row.response.tokens), len(row.prompt_tokens)) for row in rows]
        sizes += [size for lesson in self.past for size in lesson.sizes]
        each = training.micro_batch_size or training.minibatch_size // world
        whole = micro_batches(sizes, training.minibatch_size, world, rows=each, tokens=training.micro_batch_tokens)
        count = len(whole[0]) // (1 + len(self.past))
        return [
            [[[row - number * len(rows) for row in part] for part in of_rank[start : start + count]] for of_rank in whole]
            for number, start in enumerate(range(0, len(whole[0]), count))
        ]

    def _tensors(self, rows: Sequence[Row], seed: int) -> Rollout:
        left, right = max(len(row.prompt_tokens) for row in rows), max(1, max(len(row.response.tokens) for row in rows))
        input_ids = torch.full((len(rows), left + right), self.tokenizer.pad_token_id)
        attention_mask, rewards = torch.zeros_like(input_ids), torch.zeros(len(rows), right)
        rollout_logprobs = torch.zeros_like(rewards)
        for number, row in enumerate(rows):
            first, n = left - len(row.prompt_tokens), len(row.response.tokens)
            input_ids[number, first : left + n] = torch.tensor([*row.prompt_tokens, *row.response.tokens])
            attention_mask[number, first : left + n] = 1
            rewards[number, :n] = torch.tensor(row.rewards)
            rollout_logprobs[number, :n] = torch.tensor(row.response.logprobs)
        mask = attention_mask[:, left:].bool() & torch.tensor([row.keep for row in rows]).unsqueeze(1)
        device = self.agent.actor.device
        sampled = rollout_logprobs.to(device)
        return Rollout(
            input_ids.to(device),
            attention_mask.to(device),
            mask.to(device),
            rewards.to(device),
            torch.tensor([row.group for row in rows], device=device),
            torch.tensor([not row.response.finished for row in rows], device=device),
            sampled,
            sampled.clone(),  # by the trainer, which may still say it itself
            moments=dict(self.moments),
            seed=seed,
        )

    def _branch(
        self, rollout: Rollout, rows: Sequence[Row], seed: int, ranks: Ranks
    ) -> tuple[Rollout, dict[str, float], Counter[str]]:
        """The rollout with values of the states that its transport asks for, by continuing responses from them."""

        def text_of(token: int) -> str:
            return str(self.tokenizer.decode([token]))

        name = f"transport '{self.recipe.transport.use}' (starts)"
        with blamed_on(name):
            with read_only(name, vars(rollout)):
                starts = as_mask(self.recipe.transport.starts(rollout, text_of), "starts")
            if starts.shape != rollout.mask.shape:
                raise ValueError(f"starts must have shape {tuple(rollout.mask.shape)}; got {tuple(starts.shape)}")
            starts = starts & rollout.mask
        places = [row.nonzero().flatten().tolist() for row in starts]
        found, cost, errors = branch(self.recipe, self.engine, self.tokenizer, rows, places, seed, ranks)
        values = torch.zeros_like(rollout.rewards)
        for number, (here, some) in enumerate(zip(places, found, strict=True)):
            values[number, here] = torch.tensor(some, dtype=values.dtype, device=values.device)
        return rollout.replace(starts=starts, branch_values=values), cost, errors

    @torch.no_grad()
    def _read(self, rollout: Rollout, plan: list[list[list[int]]], ranks: Ranks) -> tuple[Rollout, list[Trace]]:
        """The behaviour forward: log-probabilities, values, statistics, and the traces that the critic learns from."""
        width, readings, reference = rollout.mask.shape[1], [], []
        for rows in plan[ranks.rank]:
            columns, narrow = trimmed(rollout, rows)
            ids, attention_mask = rollout.input_ids[rows, columns], rollout.attention_mask[rows, columns]
            readings.append(
                self.agent(ids, attention_mask, narrow, statistics=self.recipe.transport.statistics, with_critic=True)
            )
            if self.reference is not None:
                reference.append(self.reference(ids, attention_mask, narrow, with_entropy=False).logprobs)
        shares = [torch.tensor([row for rows in of_rank for row in rows]) for of_rank in plan]

        def join(parts: Iterable[Tensor], width: int = width) -> Tensor:
            whole = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]
            return ranks.gather_rows(torch.cat(whole), shares)

        stats = {name: join(reading.stats[name] for reading in readings) for name in readings[0].stats}
        read = rollout.replace(
            logprobs=join(reading.logprobs for reading in readings),
            stats={**stats, "entropy": join(reading.entropy for reading in readings)},
            reference_logprobs=join(reference) if reference else None,
        )
        if self.agent.critic is not None:
            values = join((reading.values for reading in readings), width + 1)
            after = values.gather(1, rollout.attention_mask[:, -width:].sum(1, keepdim=True)).squeeze(1)
            cut = after * rollout.truncated if self.recipe.training.bootstrap_truncated else None
            read = read.replace(values=values[:, :-1], bootstrap=cut)
        return read, [reading.trace for reading in readings if reading.trace is not None]

    def _check_reading(self, rollout: Rollout, iteration: int) -> None:
        """Names who gave NaN or infinity, before a transport makes something of it."""
        mask, recipe = rollout.mask, self.recipe
        policy = "policy" if self._reads_before else f"policy, by engine '{recipe.generation.use}'"
        given = {
            f"{policy} (log-probabilities)": rollout.logprobs,
            f"engine '{recipe.generation.use}' (log-probabilities)": rollout.rollout_logprobs,
            "policy (entropy)": rollout.stats.get("entropy"),
            "reference policy (log-probabilities)": rollout.reference_logprobs,
        }
        given |= {
            f"statistic '{name}' ({type(x).__name__})": rollout.stats[name] for name, x in recipe.transport.statistics.items()
        }
        with blamed_on("policy", iteration):
            for part, numbers in given.items():
                if numbers is not None:
                    check(part, numbers, mask)
            if recipe.critic is not None and rollout.values is not None:
                check(recipe.critic, rollout.values, mask, output="values")
                if rollout.bootstrap is not None:
                    check(recipe.critic, rollout.bootstrap, rollout.valid, output="value after the last token")

    def _kl_in_reward(self, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
        """Each token pays its KL to the reference policy, with `geometry.kl_in_reward`; and the mean of what was estimated."""
        geometry, reference = self.recipe.geometry, rollout.reference_logprobs
        if not geometry.kl_in_reward or reference is None:
            return rollout, {}
        kl = kl_estimate(rollout.logprobs, reference, rollout.mask, geometry.kl_estimator or "k1")
        mean = float(masked_mean_std(kl, rollout.mask)[0])
        return rollout.replace(rewards=rollout.rewards - geometry.kl_in_reward * kl), {"train/reference_kl": mean}

    def _credit(self, rollout: Rollout, iteration: int) -> Credit:
        """What the transport makes of it. Raises TrainingStopped where that is no credit, naming the part that is to blame."""
        transport = self.recipe.transport
        with (
            blamed_on(f"transport '{transport.use}'", iteration, self.recipe),
            read_only(transport, {f"rollout.{name}": x for name, x in vars(rollout).items()}, contents=iteration <= 1),
        ):
            credit = transport.checked(rollout)
        if self.agent.critic is not None and credit.value_targets is None:
            raise TrainingStopped(
                f"transport '{transport.use}' gives no value targets, so the critic cannot learn; set `critic: null`"
            )
        return credit

    def _updates(
        self, rollout: Rollout, credit: Credit, lessons: list[Minibatch], mine: list[list[int]], iteration: int, seed: int
    ) -> list[Minibatch]:
        """The critic's passes over its lessons, then the policy's; minibatches in random order, each one's parts together."""
        training, geometry = self.recipe.training, self.recipe.geometry
        masks = rollout.mask.split(training.minibatch_size)
        loss_weights = torch.cat([aggregation_weights(m, geometry.aggregation, constant=geometry.constant) for m in masks])
        correction = None if geometry.correction == "none" else self._correction(rollout)[1]
        token_weights = torch.cat([aggregation_weights(m) for m in masks])
        old = rollout.rollout_logprobs if geometry.ratio_to == "engine" else rollout.logprobs
        assert old is not None
        read_before = self._reads_before
        on_policy = not read_before and geometry.ratio_to == "trainer"
        minibatches = zip(*(x.split(training.minibatch_size) for x in (old, credit.advantages, rollout.mask)), strict=True)
        name = f"geometry '{geometry.use}' (mark)"
        given = {"the log-probabilities": old, "the advantages": credit.advantages, "the mask": rollout.mask}
        with blamed_on(name, iteration), read_only(name, given, contents=iteration <= 1):
            chosen = [geometry.mark(o, a, m, derive_seed(seed, "mark", number)) for number, (o, a, m) in enumerate(minibatches)]
            marked = None if None in chosen else torch.cat([as_mask(part, "marked") for part in chosen])
            if marked is not None and marked.shape != rollout.mask.shape:
                raise ValueError(f"marked must have shape {tuple(rollout.mask.shape)}; got {tuple(marked.shape)}")

        def policy(rows: list[int]) -> Minibatch:
            columns, width = trimmed(rollout, rows)

            def take(x: Tensor) -> Tensor:
                return x[rows, :width]

            return Minibatch(
                rollout.input_ids[rows, columns],
                rollout.attention_mask[rows, columns],
                take(rollout.mask),
                take(token_weights),
                loss_weights=take(loss_weights),
                correction=None if correction is None else take(correction),
                advantages=take(credit.advantages),
                logprobs=None if on_policy else take(old),
                marked=None if marked is None else take(marked),
                reference_logprobs=None if rollout.reference_logprobs is None else take(rollout.reference_logprobs),
                read_before=read_before,
            )

        each = len(mine) // len(masks)
        generator, updates = torch.Generator().manual_seed(seed), list[Minibatch]()
        for _ in range(training.critic_epochs if lessons else 0):
            for start in torch.randperm(len(lessons) // each, generator=generator).tolist():
                updates += lessons[start * each : (start + 1) * each]
        for _ in range(training.epochs if iteration > 0 else 0):
            for start in torch.randperm(len(masks), generator=generator).tolist():
                updates += [policy(rows) for rows in mine[start * each : (start + 1) * each]]
        return updates

    def _correction(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        assert rollout.rollout_logprobs is not None
        g = self.recipe.geometry
        return correction_weights(
            rollout.logprobs, rollout.rollout_logprobs, rollout.mask, g.correction, g.correction_level, g.correction_bound
        )

    def _metrics(self, rollout: Rollout, credit: Credit, scores: Tensor, seen: Rollout) -> dict[str, float]:
        """seen: the rollout as the transport saw it, with another baseline than the critic's values where it is another."""
        mask, tokens = rollout.mask, rollout.attention_mask[:, rollout.prompt_width :].sum(1).float()
        mean = lambda x: float(masked_mean_std(x, mask)[0])  # noqa: E731
        kept = rollout.valid
        metrics = {
            "train/reward": float(scores[kept].mean()) if bool(kept.any()) else 0.0,
            "train/length": float(tokens.mean()),
            "train/tokens": float(tokens.sum()),
            "train/truncated": float(rollout.truncated.float().mean()),
            "train/dropped": float((~kept).float().mean()),
            "advantage/mean": mean(credit.advantages),
            "advantage/std": float(masked_mean_std(credit.advantages, mask)[1]),
        }
        if "entropy" in rollout.stats:
            assert rollout.rollout_logprobs is not None
            metrics["train/entropy"] = mean(rollout.stats["entropy"])
            gap = (rollout.logprobs - rollout.rollout_logprobs).abs().masked_fill(~mask, 0.0)
            metrics |= {"engine/logprob_gap": mean(gap), "engine/logprob_gap_max": float(gap.max())}
        if self.recipe.geometry.correction != "none":
            raw, used = self._correction(rollout)
            metrics |= {
                "correction/raw": mean(raw),
                "correction/raw_max": float(raw.masked_fill(~mask, 0.0).max()),
                "correction/used": mean(used),
                "correction/changed": mean((raw != used).float()),
            }
        if credit.gate is not None:
            gate_mean, gate_std = masked_mean_std(credit.gate, mask)
            metrics |= {"gate/mean": float(gate_mean), "gate/std": float(gate_std)}
        if rollout.values is not None and credit.value_targets is not None:
            monte_carlo = gated_gae(rollout.rewards, torch.zeros_like(rollout.rewards), mask, gamma=1.0, lam=1.0)[0]
            metrics |= {
                "critic/explained_variance": explained_variance(rollout.values, monte_carlo, mask),
                "critic/explained_variance_within": explained_variance_within(
                    rollout.values, monte_carlo, mask, rollout.groups
                ),
                "critic/explained_variance_of_target": explained_variance(rollout.values, credit.value_targets, mask),
                "critic/value": mean(rollout.values),
            }
            if seen is not rollout and seen.values is not None:
                metrics["baseline/explained_variance"] = explained_variance(seen.values, monte_carlo, mask)
        if "value_disagreement" in rollout.stats:
            metrics["critic/disagreement"] = mean(rollout.stats["value_disagreement"])
        return metrics

    def remember(self, iteration: Iteration) -> None:
        """Let an iteration that is over count in the running moments, and in the critic's lessons, of later ones."""
        rollout, credit, window = iteration.rollout, iteration.credit, self.recipe.training.critic_window
        if credit.value_targets is not None and window > 1:
            self.past = [Lesson.of(rollout, credit.value_targets), *self.past][: window - 1]
        for name in self.recipe.transport.statistics:
            new = tuple(float(x) for x in masked_mean_std(rollout.stats[name], rollout.mask))
            old = self.moments.get(name, new)
            self.moments[name] = tuple(MOMENTS_DECAY * o + (1 - MOMENTS_DECAY) * n for o, n in zip(old, new, strict=True))  # type: ignore[assignment]
