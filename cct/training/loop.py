"""The training loop: one iteration of reinforcement learning, from prompts to an updated policy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cct.agent.agent import Agent
from cct.policy.checkpoints import STATE
from cct.recipe import Recipe
from cct.rollout import Credit, Rollout, Trace, derive_seed

from .credit import Estimator
from .evaluation import evaluate
from .metrics import Clock, lag_metrics, rollout_metrics, statistic_metrics
from .minibatches import Batch, CriticBatch, CriticData, origin_of, passes, policy_batches, random_order
from .plans import Plan, forward_plans
from .processes import Ranks
from .rows import Row, Samples, episode_metrics
from .sampler import Sampler
from .updates import Updates


@dataclass
class Iteration:
    """The results of an iteration, for observers of the run."""

    number: int
    rows: list[Row]  # the responses, in the rollout's order
    order: list[int]  # of each, its number among those sampled, which are in the order of the prompts
    rollout: Rollout  # as the transport saw it
    credit: Credit
    metrics: dict[str, float]


class Loop(Updates):
    """Lightning's module: an epoch is an iteration, and its one training step is the algorithm.

    Every random choice derives from (recipe seed, purpose, iteration), so iteration n is the same whether a run got there in
    one go or was resumed.
    """

    def __init__(
        self,
        recipe: Recipe,
        agent: Agent,
        tokenizer: PreTrainedTokenizerBase,
        reference: PreTrainedModel | None,
        say: Callable[[str], None] = lambda line: None,  # called with what a person should see
        teacher: PreTrainedModel | None = None,
    ):
        super().__init__(recipe, agent)
        self.say, self.sampler = say, Sampler(recipe, agent.actor, tokenizer, say=say)
        self.estimator = Estimator(recipe, agent, reference, teacher)
        self.ahead = Ahead(self.sampler)
        self.past: list[CriticData] = []  # what the critic goes on learning from, the newest iteration first
        self.on_stage: Callable[[str], None] = lambda stage: None
        self.before_update: Callable[[Sequence[Sequence[Batch]]], None] = lambda minibatches: None
        self.ended: Iteration | None = None
        self.evaluated: dict[str, float] = {}  # the newest evaluation

    def iterate(self, iteration: int) -> Iteration:
        """One iteration: sample, judge, read, transport; passes of the critic and of the policy; sync, evaluate."""
        recipe, training, sampler, estimator = self.recipe, self.recipe.training, self.sampler, self.estimator
        ranks, clock, metrics = Ranks.current(), Clock(self.on_stage), dict[str, float]()

        # What happened. Rows are in random order from here on: minibatches are cut from them.
        samples = self.ahead.take(iteration, clock.begin)
        sampled, minibatches = samples.rows, random_order(recipe, iteration, samples.rows)
        cuts, order = [len(part) for part in minibatches], [index for part in minibatches for index in part]
        rows = [sampled[index] for index in order]
        rollout = estimator.rollout(rows, sampler.tokenizer, iteration)
        if recipe.needs("greedy"):
            clock.begin("greedy")
            rollout, cost = estimator.greedy(sampler, rollout, rows, iteration)
            metrics |= cost
        if recipe.transport.branches:
            clock.begin("branch")
            rollout, cost = estimator.branch(sampler, rollout, rows, iteration)
            metrics |= cost
        counts = sampler.counts(samples.counts)
        self.ahead.begin(iteration + 1)  # with a lag, the next rows are sampled beside what follows

        # What the policy and the critic make of it.
        past = [(data, data.cuts.tolist()) for data in self.past]
        plan, *plans = forward_plans([(rollout, cuts), *past], training, ranks.world, self.agent.share)
        if estimator.reads:
            clock.begin("behaviour")
        rollout, traces = estimator.read(rollout, iteration, plan)
        scores = rollout.scores  # of the evidence alone
        rollout, cost = estimator.charge_kl(rollout)
        metrics |= cost

        # What it was worth.
        clock.begin("transport")
        credit, seen = estimator.credit(rollout, iteration)
        metrics |= rollout_metrics(rollout, seen, credit, scores, recipe.geometry) | episode_metrics(rows)
        metrics |= statistic_metrics(rollout, recipe.logging.statistics)
        metrics |= lag_metrics(rollout, iteration) if recipe.generation.lag else {}

        # The critic learns from it, and from iterations before it; then the policy.
        each, seed = len(plan[0]) // len(cuts), derive_seed(recipe.seed, "minibatches", iteration)
        generator = torch.Generator().manual_seed(seed)
        critic = self._critic_batches(rollout, credit, traces, cuts, plan, plans)
        mine, geometry = plan[ranks.rank], recipe.geometry
        policy = policy_batches(rollout, credit, geometry, cuts, mine, iteration, seed, read=estimator.reads)
        steps = [
            *passes(critic, each, training.critic_epochs, generator),
            *passes(policy, each, training.epochs if iteration > 0 else 0, generator),
        ]
        self.before_update(steps)
        clock.begin("update")
        for minibatch in steps:
            self.update(minibatch)
        self.remember(seen, rows, credit, cuts)
        metrics |= self.update_metrics() | counts | self.ahead.finish(clock.begin)

        # The engine gets the new weights.
        if iteration > 0:
            clock.begin("sync")
            metrics |= sampler.sync()
        metrics |= clock.stop(metrics["train/tokens"])
        if iteration > 0:
            metrics |= self.evaluate(iteration)
        return Iteration(iteration, rows, order, seen, credit, metrics)

    def _critic_batches(
        self,
        rollout: Rollout,
        credit: Credit,
        traces: list[Trace],
        cuts: Sequence[int],
        plan: Plan,
        plans: Sequence[Plan],
    ) -> list[CriticBatch]:
        """The critic's training data: this iteration, and earlier ones as the current policy reads them."""
        if not traces or credit.value_targets is None:
            return []
        rank = Ranks.current().rank
        batches = CriticData.of(rollout, credit.value_targets, cuts).batches(plan[rank], traces)
        for data, its_plan in zip(self.past, plans, strict=True):
            batches += data.batches(its_plan[rank], data.traces(self.agent, its_plan[rank]))
        return batches

    def remember(self, rollout: Rollout, rows: Sequence[Row], credit: Credit, cuts: Sequence[int]) -> None:
        """Add a finished iteration to the estimator's state and to the critic's window."""
        self.estimator.remember(rollout, rows)
        window = self.recipe.training.critic_window
        if credit.value_targets is not None and window > 1:
            self.past = [CriticData.of(rollout, credit.value_targets, cuts), *self.past][: window - 1]

    def evaluate(self, iteration: int) -> dict[str, float]:
        """Greedy evaluation of the current policy on the sets that are due after an iteration."""
        self.on_stage("evaluate")
        started = time.perf_counter()
        found = evaluate(self.sampler, iteration, only_due=True)
        self.evaluated |= found
        return found | {"time/evaluate": time.perf_counter() - started} if found else {}

    # --- Lightning ----------------------------------------------------------------------------
    def training_step(self, *_: Any) -> None:
        with torch.autocast(self.device.type, enabled=False):  # the agent's forwards say themselves what is in bfloat16
            self.agent.iteration = self.iteration
            self.ended = self.iterate(self.iteration)
        self.lr_schedulers().step()  # type: ignore[union-attr]
        metrics = self.evaluated | self.ended.metrics
        self.log_dict(metrics, logger=False, on_step=False, on_epoch=True, batch_size=1)  # for callbacks, the user's own too

    def train_dataloader(self) -> DataLoader:
        """One empty batch per epoch: the training step samples its data."""
        return DataLoader([0], batch_size=None)  # type: ignore[arg-type]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        past = [{name: x.cpu() for name, x in data.tensors.items()} for data in self.past]
        checkpoint[STATE] = {
            "moments": self.estimator.moments,
            "history": self.estimator.history,
            "lessons": past,
            "lessons_of": origin_of(self.recipe),
            "extra": self.sampler.extra,
            "evaluated": self.evaluated,
            "ahead": None if self.ahead.samples is None else self.ahead.samples.as_json(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state, device = checkpoint[STATE], self.agent.actor.device
        self.estimator.moments, past = state["moments"], state.get("lessons", [])
        self.evaluated, other = state.get("evaluated", {}), state.get("lessons_of") != origin_of(self.recipe)
        self.estimator.history = {} if other else state.get("history", {})
        if other and state.get("history"):
            self.say("values of prompts start empty: those of the checkpoint are from another recipe")
        if past and other:
            self.say(f"the critic's window starts empty: its {len(past)} earlier iterations are from another recipe")
            past = []
        self.sampler.extra = state.get("extra", 0)
        if (saved_ahead := state.get("ahead")) is not None:
            self.ahead.restore(saved_ahead, again=other)
        size = self.recipe.training.minibatch_size
        for saved in past:  # of a run from before episodes
            saved.setdefault("cuts", torch.full((len(saved["mask"]) // size,), size))
        self.past = [CriticData(**saved).to(device) for saved in past[: self.recipe.training.critic_window - 1]]


class Ahead:
    """The next iteration's rows. With `generation.lag: 1` a thread samples them beside the update, else it is done when due."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler
        self.samples: Samples | None = None  # sampled ahead, and not taken yet
        self._running: Future[tuple[Samples, float]] | None = None
        self._failed: BaseException | None = None

    def take(self, iteration: int, on_stage: Callable[[str], None]) -> Samples:
        """An iteration's rows, sampled now where they were not sampled ahead. on_stage: called with what begins.

        Raises what sampling them ahead raised, now that the iteration before is complete.
        """
        if self._failed is not None:
            raise self._failed
        samples, self.samples = self.samples, None
        if samples is not None and samples.iteration == iteration:
            return samples
        return self.sampler.sample(iteration, on_stage)

    def begin(self, iteration: int) -> None:
        """Begin to sample an iteration from the weights that the engine has now. Without a lag the engine rests instead."""
        engine, _ = self.sampler.engine, self.sampler.ranks  # opened here, not in the thread
        if not self.sampler.recipe.generation.lag:
            engine.rest()
            return
        running, device, extra = Future[tuple[Samples, float]](), self.sampler.actor.device, self.sampler.extra
        self._running = running

        def sample() -> None:
            started = time.perf_counter()
            try:
                if device.type == "cuda":  # the current one is a thread's own
                    torch.cuda.set_device(device)
                samples = self.sampler.sample(iteration, version=max(0, iteration - 2))
                running.set_result((samples, time.perf_counter() - started))
            except BaseException as error:
                self.sampler.extra = extra
                running.set_exception(error)

        threading.Thread(target=sample, name=f"sampling iteration {iteration}", daemon=True).start()

    def finish(self, on_stage: Callable[[str], None]) -> dict[str, float]:
        """Wait until the next rows are there. Returns the time that they took."""
        if self._running is None:
            return {}
        on_stage("wait")
        running, self._running = self._running, None
        self._failed = running.exception()
        if self._failed is not None:
            return {}
        self.samples, seconds = running.result()
        return {"time/ahead": seconds}

    def restore(self, saved: str, *, again: bool) -> None:
        """Take up the rows of a checkpoint. again: they are from another recipe, so their prompts are sampled again."""
        samples = Samples.from_json(saved)
        if again:
            self.sampler.say(
                f"iteration {samples.iteration} is sampled again: its rows in the checkpoint are from another recipe"
            )
            self.sampler.extra = samples.extra
        else:
            self.samples = samples.of(self.sampler.prompts(samples.iteration, samples.extra, samples.replaced)[0])

    def close(self) -> None:
        """Wait for the thread, whatever comes of it, and close what it used."""
        if self._running is not None:
            wait([self._running])
        self.sampler.close()
