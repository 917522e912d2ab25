"""From prompts to minibatches: sample, judge, read, transport. No gradient here.

Every random choice derives from (recipe seed, purpose, iteration), so iteration n is the same whether
a run got there in one go or was resumed.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cct.evidence import Evidence
from cct.geometry.functional import aggregation_weights
from cct.recipe import Recipe
from cct.rollout import Credit, Prompt, Response, Rollout, Trace, derive_seed
from cct.transport.functional import explained_variance, gated_gae, masked_mean_std

from .agent import Agent

# Share of the old running mean and deviation of a statistic kept at each iteration: follows the policy within ~10 iterations.
MOMENTS_DECAY = 0.9


class TrainingStopped(RuntimeError):
    """A run that cannot go on; the message names the component and the iteration."""


@dataclass
class Minibatch:
    """Rows for one forward and backward. Both weights are taken over the whole minibatch, before it is split into these."""

    input_ids: Tensor  # [B, S]
    attention_mask: Tensor  # [B, S]
    mask: Tensor  # [B, T]
    loss_weights: Tensor  # [B, T] of the policy's loss, by the geometry's aggregation
    token_weights: Tensor  # [B, T] 1 / tokens of the minibatch: of the critic's loss and of metrics
    advantages: Tensor  # [B, T]
    logprobs: Tensor  # [B, T] of the behaviour policy
    reference_logprobs: Tensor | None
    value_targets: Tensor | None  # [B, T]
    trace: Trace | None = None  # set: the critic learns from it; None: the policy learns


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

    rollout: Rollout
    credit: Credit
    updates: list[Minibatch]
    samples: list[Sample]
    metrics: dict[str, float]


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


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    return [tokenizer(prompt.text)["input_ids"] for prompt in prompts]


def respond(
    recipe: Recipe, actor: PreTrainedModel, tokenizer, prompts: Sequence[Prompt], *, seed: int, greedy: bool = False
) -> list[Response]:
    """One response per prompt from the recipe's engine."""
    completions = recipe.generation.generate(actor, tokenizer, encode(tokenizer, prompts), seed=seed, greedy=greedy)
    return [Response(tokenizer.decode(c.tokens, skip_special_tokens=True), c.tokens, c.finished) for c in completions]


def evaluate(recipe: Recipe, actor: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """Greedy decoding of the held-out prompts; `eval/accuracy` is the first evidence's mean, `eval/reward` the sum's."""
    prompts = recipe.task.held_out()
    responses = respond(recipe, actor, tokenizer, prompts, seed=0, greedy=True)
    first = recipe.evidence[0].model_copy(update={"weight": 1.0})
    total = lambda parts: sum(map(sum, judge(parts, prompts, responses)[0])) / len(prompts)  # noqa: E731
    return {
        "eval/accuracy": total([first]),
        "eval/reward": total(recipe.evidence),
        "eval/length": sum(len(r.tokens) for r in responses) / len(responses),
        "eval/truncated": sum(not r.finished for r in responses) / len(responses),
    }


class Collector:
    """Makes the iterations of a run. Its only state is the running moments of the gates' statistics."""

    def __init__(self, recipe: Recipe, agent: Agent, tokenizer: PreTrainedTokenizerBase, reference: PreTrainedModel | None):
        self.recipe, self.agent, self.tokenizer = recipe, agent, tokenizer
        self.reference = Agent(reference, None, agent.temperature) if reference is not None else None
        self.moments: dict[str, tuple[float, float]] = {}
        self.on_stage: Callable[[str], None] = lambda stage: None

    def collect(self, iteration: int) -> Iteration:
        """Iteration number 1, 2, ...; 0 and below are the critic's warm-up."""
        recipe, started = self.recipe, time.perf_counter()
        training = recipe.training
        seed = lambda purpose: derive_seed(recipe.seed, purpose, iteration)  # noqa: E731
        self.on_stage("generate")
        drawn = recipe.task.prompts(recipe.seed, self._start(iteration), training.prompts_per_iteration)
        prompts = [prompt for prompt in drawn for _ in range(training.responses_per_prompt)]
        responses = respond(recipe, self.agent.actor, self.tokenizer, prompts, seed=seed("sample"))
        generated = time.perf_counter()
        self.on_stage("evidence")
        rewards, keep, errors = judge(recipe.evidence, prompts, responses)
        judged = time.perf_counter()
        self.on_stage("behaviour")

        # Rows in random order from here on: the behaviour forward's chunks are the minibatches.
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed("order"))).tolist()
        rollout = self._tensors(
            [prompts[i] for i in order],
            [responses[i] for i in order],
            [rewards[i] for i in order],
            [keep[i] for i in order],
            [i // training.responses_per_prompt for i in order],
            seed("transport"),
        )
        rollout, traces = self._read(rollout)
        read = time.perf_counter()
        self.on_stage("transport")
        credit = recipe.transport(rollout)
        self._check(rollout, credit, iteration)
        updates = self._updates(rollout, credit, traces, iteration, seed("minibatches"))
        metrics = self._metrics(rollout, credit)
        metrics |= {f"evidence/errors/{name}": float(count) for name, count in errors.items()}
        metrics |= {
            "time/generate": generated - started,
            "time/evidence": judged - generated,
            "time/behaviour": read - judged,
            "time/transport": time.perf_counter() - read,
        }
        per_response = (credit.advantages.sum(1) / rollout.mask.sum(1).clamp(min=1)).tolist()
        place = {row: index for index, row in enumerate(order)}
        samples = [
            Sample(prompts[i].text, responses[i].text, sum(rewards[i]), per_response[place[i]], responses[i].finished)
            for i in range(min(recipe.logging.samples, len(prompts)))
        ]
        return Iteration(rollout, credit, updates, samples, metrics)

    def _start(self, iteration: int) -> int:
        """Position in the task's stream; the warm-up draws from the same stream, before the first iteration."""
        return (iteration - 1 + self.recipe.training.critic_warmup) * self.recipe.training.prompts_per_iteration

    def _tensors(self, prompts, responses, rewards, keep, groups, seed: int) -> Rollout:
        ids = encode(self.tokenizer, prompts)
        left, right = max(map(len, ids)), max(1, max(len(r.tokens) for r in responses))
        rows, device = len(prompts), self.agent.actor.device
        input_ids = torch.full((rows, left + right), self.tokenizer.pad_token_id)
        attention_mask, reward = torch.zeros_like(input_ids), torch.zeros(rows, right)
        for row, (prompt, response) in enumerate(zip(ids, responses, strict=True)):
            n = len(response.tokens)
            input_ids[row, left - len(prompt) : left + n] = torch.tensor([*prompt, *response.tokens])
            attention_mask[row, left - len(prompt) : left + n] = 1
            reward[row, :n] = torch.tensor(rewards[row])
        mask = attention_mask[:, left:].bool() & torch.tensor(keep).unsqueeze(1)
        return Rollout(
            input_ids.to(device),
            attention_mask.to(device),
            mask.to(device),
            reward.to(device),
            torch.tensor(groups, device=device),
            torch.tensor([not r.finished for r in responses], device=device),
            reward.new_zeros(reward.shape).to(device),
            moments=dict(self.moments),
            seed=seed,
        )

    @torch.no_grad()
    def _read(self, rollout: Rollout) -> tuple[Rollout, list[Trace]]:
        """The behaviour forward: log-probabilities, values, statistics, and the traces that the critic learns from."""
        width, readings, reference = rollout.mask.shape[1], [], []
        rows = self.recipe.training.rows_per_forward
        for ids, attention_mask in zip(rollout.input_ids.split(rows), rollout.attention_mask.split(rows), strict=True):
            readings.append(
                self.agent(ids, attention_mask, width, statistics=self.recipe.transport.statistics, with_critic=True)
            )
            if self.reference is not None:
                reference.append(self.reference(ids, attention_mask, width).logprobs)
        join = lambda get: torch.cat([get(r) for r in readings])  # noqa: E731
        stats = {name: join(lambda r, name=name: r.stats[name]) for name in readings[0].stats}
        read = rollout.replace(
            logprobs=join(lambda r: r.logprobs),
            stats={**stats, "entropy": join(lambda r: r.entropy)},
            reference_logprobs=torch.cat(reference) if reference else None,
        )
        if self.agent.critic is not None:
            values = join(lambda r: r.values)
            after = values.gather(1, rollout.attention_mask[:, -width:].sum(1, keepdim=True)).squeeze(1)
            read = read.replace(values=values[:, :-1], bootstrap=after * rollout.truncated)
        return read, [r.trace for r in readings if r.trace is not None]

    def _check(self, rollout: Rollout, credit: Credit, iteration: int) -> None:
        where, transport = f"in iteration {iteration}", f"transport '{self.recipe.transport.use}'"
        if credit.advantages.shape != rollout.mask.shape:
            found, expected = tuple(credit.advantages.shape), tuple(rollout.mask.shape)
            raise TrainingStopped(f"{transport} returned advantages of shape {found} {where}; expected {expected}")
        if self.agent.critic is not None and credit.value_targets is None:
            raise TrainingStopped(f"{transport} gives no value targets, so the critic cannot learn; set `critic: null`")
        for name, tensor in {
            "policy (log-probabilities)": rollout.logprobs,
            f"critic '{self.recipe.critic.use if self.recipe.critic else ''}' (values)": rollout.values,
            f"{transport} (advantages)": credit.advantages,
            f"{transport} (value targets)": credit.value_targets,
        }.items():
            if tensor is not None and not bool(tensor.masked_fill(~rollout.mask, 0.0).isfinite().all()):
                raise TrainingStopped(f"NaN or infinity from {name} {where}")

    def _updates(self, rollout: Rollout, credit: Credit, traces: list[Trace], iteration: int, seed: int) -> list[Minibatch]:
        """The critic's passes, then the policy's; minibatches in random order, their micro-batches together."""
        training, geometry = self.recipe.training, self.recipe.geometry
        masks = rollout.mask.split(training.minibatch_size)
        loss_weights = torch.cat([aggregation_weights(m, geometry.aggregation, constant=geometry.constant) for m in masks])
        token_weights = torch.cat([aggregation_weights(m) for m in masks])

        def micro(index: int, trace: Trace | None) -> Minibatch:
            rows = slice(index * training.rows_per_forward, (index + 1) * training.rows_per_forward)
            take = lambda x: None if x is None else x[rows]  # noqa: E731
            return Minibatch(
                rollout.input_ids[rows],
                rollout.attention_mask[rows],
                rollout.mask[rows],
                loss_weights[rows],
                token_weights[rows],
                credit.advantages[rows],
                rollout.logprobs[rows],
                take(rollout.reference_logprobs),
                take(credit.value_targets),
                trace,
            )

        each = training.minibatch_size // training.rows_per_forward
        generator, updates = torch.Generator().manual_seed(seed), []
        passes = [True] * (training.critic_epochs if traces else 0) + [False] * (training.epochs if iteration > 0 else 0)
        for critic in passes:
            for start in torch.randperm(len(rollout.mask) // training.minibatch_size, generator=generator).tolist():
                updates += [micro(i, traces[i] if critic else None) for i in range(start * each, (start + 1) * each)]
        return updates

    def _metrics(self, rollout: Rollout, credit: Credit) -> dict[str, float]:
        mask, tokens = rollout.mask, rollout.attention_mask[:, rollout.prompt_width :].sum(1).float()
        mean = lambda x: float(masked_mean_std(x, mask)[0])  # noqa: E731
        kept = rollout.valid
        metrics = {
            "train/reward": float(rollout.scores[kept].mean()) if bool(kept.any()) else 0.0,
            "train/length": float(tokens.mean()),
            "train/tokens": float(tokens.sum()),
            "train/truncated": float(rollout.truncated.float().mean()),
            "train/dropped": float((~kept).float().mean()),
            "train/entropy": mean(rollout.stats["entropy"]),
            "advantage/mean": mean(credit.advantages),
            "advantage/std": float(masked_mean_std(credit.advantages, mask)[1]),
        }
        if credit.gate is not None:
            gate_mean, gate_std = masked_mean_std(credit.gate, mask)
            metrics |= {"gate/mean": float(gate_mean), "gate/std": float(gate_std)}
        if rollout.values is not None and credit.value_targets is not None:
            monte_carlo = gated_gae(rollout.rewards, torch.zeros_like(rollout.rewards), mask, gamma=1.0, lam=1.0)[0]
            metrics |= {
                "critic/explained_variance": explained_variance(rollout.values, monte_carlo, mask),
                "critic/explained_variance_of_target": explained_variance(rollout.values, credit.value_targets, mask),
                "critic/value": mean(rollout.values),
            }
        return metrics

    def update_moments(self, rollout: Rollout) -> None:
        """Let an iteration that is over count in the running moments of later ones."""
        for name in self.recipe.transport.statistics:
            new = tuple(float(x) for x in masked_mean_std(rollout.stats[name], rollout.mask))
            old = self.moments.get(name, new)
            self.moments[name] = tuple(MOMENTS_DECAY * o + (1 - MOMENTS_DECAY) * n for o, n in zip(old, new, strict=True))  # type: ignore[assignment]
