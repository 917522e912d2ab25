"""The two Lightning objects: a module that turns minibatches into losses, and a data module that makes them."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from collections import defaultdict
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers.modeling_layers import GradientCheckpointingLayer

from cct.critic.functional import prompt_numbers
from cct.recipe import Recipe
from cct.registry import described

from .agent import Agent
from .batching import Minibatch
from .collect import Collector, Iteration
from .lessons import Lesson
from .ranks import Ranks
from .stopped import TrainingStopped, blamed_on

FINAL_LEARNING_RATE = 0.1  # share of the actor's learning rate that linear and cosine schedules end with


def iteration_of(recipe: Recipe, epoch: int) -> int:
    """Iteration number of a Lightning epoch: the critic's warm-up ends at 0, the first policy update is 1."""
    return epoch + 1 - recipe.training.critic_warmup


class RolloutData(LightningDataModule):
    """An epoch is an iteration, its one batch nothing."""

    def __init__(self, recipe, collector):
        super().__init__()
        self.recipe, self.collector = recipe, collector
        self.current = None
        self.done = None

    def train_dataloader(self):
        return DataLoader([0], batch_size=None)

    def finish(self, iteration):
        ended, self.current, self.done = self.current, None, iteration
        self.collector.remember(ended)
        return ended

    def state_dict(self):
        lessons = [lesson.saved for lesson in self.collector.past]
        return {"moments": self.collector.moments, "done": self.done, "lessons": lessons}

    def load_state_dict(self, state_dict):
        self.collector.moments, self.done = state_dict["moments"], state_dict["done"]
        device = self.collector.agent.actor.device
        lessons = state_dict.get("lessons", [])
        self.collector.past = [Lesson(**{name: x.to(device) for name, x in saved.items()}) for saved in lessons]


class PassAdamW(torch.optim.AdamW):
    """AdamW that leaves groups marked inactive alone, moments included.

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


class CreditModule(LightningModule):
    """Actor, critic and geometry: one loss per minibatch, for the critic or for the policy."""

    def __init__(self, recipe: Recipe, agent: Agent):
        super().__init__()
        self.automatic_optimization = False
        self.recipe, self.agent = recipe, agent
        self.sums: dict[str, float] = defaultdict(float)  # over this process's micro-batches
        self.norms: dict[str, list[float]] = defaultdict(list)  # of each optimizer step, the same on every process
        self.update_started = 0.0
        self.learns = "actor"  # or the critic: who the present minibatch is for
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
        """A checkpoint brings rates and decay of the recipe it was taken under; those of this one count."""
        schedule = self.lr_schedulers()
        assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
        groups = self.optimizers().param_groups  # type: ignore[union-attr]
        schedule.base_lrs = [self._rate(group["name"]) for group in groups]
        for group, rate, pace in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            group["lr"], group["initial_lr"] = rate * pace(schedule.last_epoch), rate
            group["weight_decay"] = self.recipe.training.weight_decay

    def training_step(self, batch, batch_index):
        with torch.autocast(self.device.type, enabled=False):
            data = self.trainer.datamodule
            data.current = data.collector.collect(self.iteration)
            self.sums.clear()
            self.norms.clear()
            self.update_started = time.perf_counter()
            each = self.each = data.current.micro_batches
            for start in range(0, len(data.current.updates), each):
                self._step(data.current.updates[start : start + each])

    def _step(self, parts):
        optimizer = self.optimizers()
        learns = self.learns = "actor" if parts[0].trace is None else "critic"
        for group in optimizer.param_groups:
            group["active"] = group["name"] == learns
        for name, parameters in self.parameters_of.items():
            for parameter in parameters:
                parameter.requires_grad_(name == learns)
        engine = self._deepspeed
        optimizer.zero_grad()
        for number, part in enumerate(parts, 1):
            if engine is not None:
                engine.set_gradient_accumulation_boundary(number == len(parts))
            loss = self._policy_loss(part) if learns == "actor" else self._critic_loss(part)
            last = number == len(parts)
            with nullcontext() if last or engine is not None or not hasattr(self.trainer.strategy, "block_backward_sync") else self.trainer.strategy.block_backward_sync():
                self.manual_backward(loss * Ranks.current().world)
            if engine is not None and not last:
                optimizer.step()
        if engine is None:
            self.configure_gradient_clipping(optimizer)
        optimizer.step()
        if engine is not None:
            norm = torch.as_tensor(engine.get_global_grad_norm())
            self._finite(norm, f"{self.learns} (gradient)")
            self.norms[f"{self.learns}/gradient_norm"].append(float(norm))

    @property
    def _deepspeed(self) -> Any:
        """DeepSpeed's engine, which is told where a step ends, and left to count micro-batches of one; None without it."""
        return getattr(self.trainer.strategy, "deepspeed_engine", None)

    def _critic_loss(self, batch: Minibatch) -> torch.Tensor:
        assert (
            batch.trace is not None
            and batch.value_targets is not None
            and batch.numbers is not None
            and self.recipe.critic is not None
            and self.agent.critic is not None
        )
        mask, width = batch.mask, batch.mask.shape[1]
        raw = self.agent.values(batch.trace, width)[0][:, :-1]
        raw = raw.masked_fill(~mask.view(*mask.shape, *[1] * (raw.dim() - 2)), 0.0)
        old = batch.trace.values[:, :-1] if batch.trace.values is not None else None
        dealt = prompt_numbers(batch.input_ids[:, :-width], batch.attention_mask[:, :-width])
        if self.agent.critic.head.split == "responses":  # not always the same critic first, as they may not divide evenly
            dealt = dealt + batch.numbers
        targets = batch.value_targets.masked_fill(~mask, 0.0)
        with blamed_on(f"critic '{self.recipe.critic.use}' (loss)", self.iteration):
            per_token = self.agent.critic.head.loss(raw, targets, old, dealt).masked_fill(~mask, 0.0)
        loss = (batch.token_weights * per_token).sum()
        self._finite(loss, f"critic '{self.recipe.critic.use}' (loss)")
        self._count(**{"critic/loss": loss.detach(), "critic/batches": torch.ones(())})
        return loss

    def _policy_loss(self, batch: Minibatch) -> torch.Tensor:
        assert batch.loss_weights is not None and batch.advantages is not None
        reading = self.agent(batch.input_ids, batch.attention_mask, batch.mask.shape[1], with_entropy=not batch.read_before)
        old_logprobs = reading.logprobs.detach() if batch.logprobs is None else batch.logprobs
        chosen = () if batch.marked is None else (batch.marked,)
        geometry = f"geometry '{self.recipe.geometry.use}'"
        with blamed_on(geometry, self.iteration):
            per_token, metrics = self.recipe.geometry(
                reading.logprobs, old_logprobs, batch.advantages, batch.mask, batch.reference_logprobs, *chosen
            )
        for name, value in {"the loss": per_token, **metrics}.items():
            if not isinstance(value, torch.Tensor) or value.shape != batch.mask.shape:
                raise TrainingStopped(
                    f"{geometry} returned {described(value)} as {name} in iteration {self.iteration}; expected a tensor of "
                    f"shape {tuple(batch.mask.shape)}"
                )
        if not batch.read_before:
            metrics["entropy"] = reading.entropy.masked_fill(~batch.mask, 0.0)
        loss = (batch.loss_weights * per_token).sum()
        self._finite(loss, f"{geometry} (loss)")
        means = {f"policy/{name}": (batch.token_weights * value).sum() for name, value in metrics.items()}
        self._count(**means, **{"policy/loss": loss.detach(), "policy/batches": torch.ones(())})
        return loss

    def _finite(self, value: torch.Tensor, name: str) -> None:
        if not bool(value.isfinite()):
            raise TrainingStopped(f"NaN or infinity from {name} in iteration {self.iteration}")

    def _count(self, **metrics: torch.Tensor) -> None:
        for name, value in metrics.items():
            self.sums[name] += float(value)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        """Actor and critic are clipped each by its own norm, so that a loud critic does not shrink the policy's step."""
        for group in optimizer.param_groups:
            touched = [p for p in group["params"] if p.grad is not None]
            if touched:
                norm = torch.nn.utils.clip_grad_norm_(touched, self.recipe.training.gradient_clip)
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                self._finite(norm, f"{group['name']} (gradient)")
                self.norms[f"{group['name']}/gradient_norm"].append(float(norm))

    def update_metrics(self) -> dict[str, float]:
        """Means over the epoch's optimizer steps, of the critic and of the policy each, over all processes."""
        ranks = Ranks.current()
        everyone = ranks.gather(dict(self.sums))
        sums = {name: sum(part[name] for part in everyone) for name in self.sums}
        each = self.each * ranks.world  # batches in one optimizer step
        means = {
            name: total / (sums[f"{name.split('/')[0]}/batches"] / each)
            for name, total in sums.items()
            if not name.endswith("/batches")
        }
        norms = {name: sum(values) / len(values) for name, values in self.norms.items()}
        return means | norms | {"time/update": time.perf_counter() - self.update_started}
