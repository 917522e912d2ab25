"""The updates: one optimizer step of the policy or of the critic, whatever strategy shares the weights."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from cct.agent.agent import Agent
from cct.errors import TrainingStopped, attributed_to
from cct.handover import read_only
from cct.recipe import Recipe
from cct.registry import described

from .minibatches import Batch, CriticBatch, PolicyBatch
from .processes import Ranks

FINAL_LEARNING_RATE = 0.1  # share of the actor's learning rate that linear and cosine schedules end with


def iteration_of(recipe: Recipe, epoch: int) -> int:
    """Iteration number of a Lightning epoch: the critic's warm-up ends at 0, the first policy update is 1."""
    return epoch + 1 - recipe.training.critic_warmup


class PassAdamW(torch.optim.AdamW):
    """AdamW that does not change inactive groups, moments included.

    The critic's passes and the policy's share one optimizer, because DeepSpeed knows only one; under it a
    group without gradients has zeros, by which AdamW's moments would decay and still move the weights.
    """

    def step(self, closure=None):
        loss = closure() if closure is not None else None  # a training step, which says what is active
        every = self.param_groups
        self.param_groups = [group for group in every if group.get("active", True)]
        try:
            super().step()
        finally:
            self.param_groups = every
        return loss


class Updates(LightningModule):
    """Actor, critic and geometry: a loss per minibatch, for the critic or for the policy, and a step on it."""

    def __init__(self, recipe: Recipe, agent: Agent):
        super().__init__()
        self.automatic_optimization = False  # an iteration takes several steps
        self.recipe, self.agent = recipe, agent
        self.sums: dict[str, float] = defaultdict(float)  # over this process's batches
        self.norms: dict[str, list[float]] = defaultdict(list)  # of each optimizer step, the same on every process
        self.steps = Counter[str]()  # of the optimizer, by who learnt: actor, critic
        self.parameters_of: dict[str, list[torch.nn.Parameter]] = {}

    @property
    def iteration(self) -> int:
        return iteration_of(self.recipe, self.current_epoch)

    def configure_model(self) -> None:
        """Under `fsdp`, split the weights between the processes, layer by layer."""
        if self.device_mesh is None or self.parameters_of:
            return
        mesh = self.device_mesh["data_parallel"]
        for module in self.agent.actor.modules():
            if isinstance(module, GradientCheckpointingLayer):  # what transformers calls one layer
                fully_shard(module, mesh=mesh)
        for part in self._parts.values():
            fully_shard(part, mesh=mesh, reshard_after_forward=True)

    @property
    def _parts(self) -> dict[str, torch.nn.Module]:
        return {"actor": self.agent.actor} | ({"critic": self.agent.critic} if self.agent.critic is not None else {})

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        training = self.recipe.training
        self.parameters_of = {name: [p for p in part.parameters() if p.requires_grad] for name, part in self._parts.items()}
        groups = [{"params": params, "lr": self._rate(name), "name": name} for name, params in self.parameters_of.items()]
        optimizer = PassAdamW(groups, weight_decay=training.weight_decay)

        def actor(epoch: int) -> float:
            done = max(0, iteration_of(self.recipe, epoch) - 1) / max(1, training.iterations - 1)
            shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * min(1.0, done)))}[
                training.schedule
            ]
            return FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * max(0.0, shape)

        paces = [actor, lambda epoch: 1.0][: len(groups)]
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, paces)}

    def _rate(self, name: str) -> float:
        return {"actor": self.recipe.training.learning_rate, "critic": self.recipe.training.critic_learning_rate}[name]

    def on_train_start(self) -> None:
        """Replace learning rates and weight decay of the checkpoint's recipe by those of this one."""
        schedule = self.lr_schedulers()
        assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
        groups = self.optimizers().param_groups  # type: ignore[union-attr]
        schedule.base_lrs = [self._rate(group["name"]) for group in groups]
        for group, rate, pace in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            group["lr"], group["initial_lr"] = rate * pace(schedule.last_epoch), rate
            group["weight_decay"] = self.recipe.training.weight_decay

    # --- one step -----------------------------------------------------------------------------
    def update(self, batches: Sequence[Batch]) -> None:
        """One optimizer step, of the policy or of the critic, on this process's batches of a minibatch."""
        learner = "actor" if isinstance(batches[0], PolicyBatch) else "critic"
        optimizer, deepspeed, strategy = self.optimizers(), self._deepspeed, self.trainer.strategy
        assert not isinstance(optimizer, list)
        for group in optimizer.param_groups:
            group["active"] = group["name"] == learner
        for name, parameters in self.parameters_of.items():  # or ZeRO-3 takes the other's last gradients into the norm
            for parameter in parameters:
                parameter.requires_grad_(name == learner)
        optimizer.zero_grad()
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            if deepspeed is not None:
                deepspeed.set_gradient_accumulation_boundary(last)
                deepspeed.optimizer.clear_backward_seen_flag()  # a new backward begins, as its own forward would say
            loss = self._policy_loss(batch) if isinstance(batch, PolicyBatch) else self._critic_loss(batch)
            # The processes share gradients once a step; DeepSpeed sees to that itself, and ZeRO-2 and 3 have no other way.
            later = isinstance(strategy, ParallelStrategy) and deepspeed is None and not last
            with strategy.block_backward_sync() if later else nullcontext():  # type: ignore[attr-defined]
                # The weights divide by the whole minibatch already; the strategy averages over processes.
                self.manual_backward(loss * Ranks.current().world)
            if deepspeed is not None and not last:
                deepspeed.step()
        if deepspeed is None:
            self._clip(learner)
        optimizer.step()
        if deepspeed is not None:  # which clips by itself
            self._record_norm(learner, torch.as_tensor(deepspeed.get_global_grad_norm()))
        self.steps[learner] += 1

    @property
    def _deepspeed(self) -> Any:
        """DeepSpeed's engine, notified of the end of a step and configured for one micro-batch per step; None without
        DeepSpeed."""
        return getattr(self.trainer.strategy, "deepspeed_engine", None)

    def _clip(self, learner: str) -> None:
        """Clip actor and critic separately, so that large critic gradients do not shrink the policy's step."""
        touched = [p for p in self.parameters_of[learner] if p.grad is not None]
        if touched:
            norm = torch.nn.utils.clip_grad_norm_(touched, self.recipe.training.gradient_clip)
            self._record_norm(learner, norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _record_norm(self, learner: str, norm: torch.Tensor) -> None:
        self._finite(norm, f"{learner} (gradient)")
        self.norms[f"{learner}/gradient_norm"].append(float(norm))

    def _critic_loss(self, batch: CriticBatch) -> torch.Tensor:
        assert self.recipe.critic is not None and self.agent.critic is not None
        mask, width = batch.mask, batch.mask.shape[1]
        raw = self.agent.values(batch.trace, width)[0][:, :-1]
        raw = raw.masked_fill(~mask.view(*mask.shape, *[1] * (raw.dim() - 2)), 0.0)
        old = batch.trace.values[:, :-1] if batch.trace.values is not None else None
        keys = batch.prompt_keys
        if self.agent.critic.head.split == "responses":  # not always the same critic first, as they may not divide evenly
            keys = keys + batch.ranks
        targets = batch.value_targets.masked_fill(~mask, 0.0)
        with attributed_to(f"critic '{self.recipe.critic.use}' (loss)", self.iteration):
            per_token = self.agent.critic.head.loss(raw, targets, old, keys).masked_fill(~mask, 0.0)
        loss = (batch.token_weights * per_token).sum()
        self._finite(loss, f"critic '{self.recipe.critic.use}' (loss)")
        self._count(**{"critic/loss": loss.detach()})
        return loss

    def _policy_loss(self, batch: PolicyBatch) -> torch.Tensor:
        reading = self.agent(batch.input_ids, batch.attention_mask, batch.mask.shape[1], with_entropy=batch.with_entropy)
        old_logprobs = reading.logprobs.detach() if batch.logprobs is None else batch.logprobs
        optional = {name: x for name in ("marked", "correction") if (x := getattr(batch, name)) is not None}
        geometry = f"geometry '{self.recipe.geometry.use}'"
        given = {**vars(batch), "logprobs": reading.logprobs, "old_logprobs": old_logprobs}
        with attributed_to(geometry, self.iteration), read_only(self.recipe.geometry, given, contents=self.iteration <= 1):
            per_token, metrics = self.recipe.geometry(
                reading.logprobs, old_logprobs, batch.advantages, batch.mask, batch.reference_logprobs, **optional
            )
        for name, value in {"the loss": per_token, **metrics}.items():
            if not isinstance(value, torch.Tensor) or value.shape != batch.mask.shape or value.is_complex():
                raise TrainingStopped(
                    f"{geometry} returned {described(value)} as {name} in iteration {self.iteration}; "
                    f"expected a tensor of shape {tuple(batch.mask.shape)} of real numbers"
                )
        if reading.logprobs.requires_grad and not per_token.requires_grad:
            raise TrainingStopped(
                f"{geometry} returned a loss without a gradient in iteration {self.iteration}; compute it from `logprobs`"
            )
        if batch.with_entropy:
            metrics["entropy"] = reading.entropy.masked_fill(~batch.mask, 0.0)
        loss = (batch.loss_weights * per_token).sum()
        self._finite(loss, f"{geometry} (loss)")
        means = {}
        for name, value in metrics.items():
            means[f"policy/{name}"] = (batch.token_weights * value.detach().masked_fill(~batch.mask, 0)).sum()
            self._finite(means[f"policy/{name}"], f"{geometry} (metric '{name}')")
        self._count(**means, **{"policy/loss": loss.detach()})
        return loss

    def _finite(self, value: torch.Tensor, name: str) -> None:
        if not bool(value.isfinite()):
            raise TrainingStopped(f"NaN or infinity from {name} in iteration {self.iteration}")

    def _count(self, **metrics: torch.Tensor) -> None:
        for name, value in metrics.items():
            self.sums[name] += float(value)

    def update_metrics(self) -> dict[str, float]:
        """Means over the iteration's optimizer steps and all processes, for critic and policy separately; then resets."""
        everyone = Ranks.current().gather(dict(self.sums))
        steps = {"policy": self.steps["actor"], "critic": self.steps["critic"]}
        means = {name: sum(part[name] for part in everyone) / steps[name.split("/")[0]] for name in self.sums}
        norms = {name: sum(values) / len(values) for name, values in self.norms.items()}
        for counted in (self.sums, self.norms, self.steps):
            counted.clear()
        return means | norms
