"""The processes of a run: `Ranks`, and how Lightning divides the weights among them, by a strategy's name in the recipe.

Every rank samples, judges and reads its share, then all ranks hold the whole rollout (a few numbers per token), so that group
baselines, whitening and every denominator are global by construction. With one process all of `Ranks` is the identity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, distributed

from cct.policy.checkpoints import tensors_only
from cct.recipe import Recipe, Training


@dataclass(frozen=True)
class Ranks:
    """This process among the others."""

    rank: int = 0
    world: int = 1
    group: distributed.ProcessGroup | None = None
    """Among which it speaks; None for the default one."""

    @classmethod
    def current(cls) -> Ranks:
        if distributed.is_available() and distributed.is_initialized():
            return cls(distributed.get_rank(), distributed.get_world_size())
        return cls()

    def apart(self) -> Ranks:
        """The same processes over a group of its own, for a thread: two threads must not share one. All processes call it."""
        return self if self.world == 1 else replace(self, group=distributed.new_group(backend="gloo"))

    def share(self, count: int) -> range:
        """This rank's contiguous part of range(count); parts differ by one at most, and may be empty."""
        return range(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def gather_rows(self, mine: Tensor, index: list[Tensor]) -> Tensor:
        """Rows of all ranks, placed by each rank's row numbers; every rank has equally many."""
        parts = [mine] if self.world == 1 else [torch.empty_like(mine) for _ in index]
        if self.world > 1:
            distributed.all_gather(parts, mine.contiguous())
        whole = mine.new_empty(sum(map(len, index)), *mine.shape[1:])
        for rows, part in zip(index, parts, strict=True):
            whole[rows] = part
        return whole


class OneFile(TorchCheckpointIO):
    """Checkpoints that are one file, written to their place; Lightning's own go through memory and the system's /tmp."""

    refused: Exception | None = None
    """Why the last checkpoint could not be written; read once every process has passed the barrier after it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            self.refused = error


def strategy_of(recipe: Recipe) -> Strategy | str:
    """The Lightning strategy of a recipe."""
    training = recipe.training
    name = training.strategy
    on_gpu = torch.cuda.is_available()
    if name == "auto":
        name = "ddp" if training.processes > 1 else "auto"
    if name == "ddp":
        # A pass of the critic leaves the actor without gradient, and the other way round.
        return DDPStrategy(find_unused_parameters=recipe.critic is not None, process_group_backend="nccl" if on_gpu else "gloo")
    if name == "fsdp":  # one file per checkpoint, as without it; `Updates.configure_model` says what is split
        return ModelParallelStrategy(
            data_parallel_size=training.processes, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    if name.startswith("deepspeed"):
        return _deepspeed(training, on_gpu)
    return name


def _deepspeed(training: Training, on_gpu: bool) -> Strategy:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    class OnlyTensors(DeepSpeedStrategy):
        """DeepSpeed with checkpoints that run no code when they are loaded."""

        def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            with tensors_only():
                return super().load_checkpoint(*args, **kwargs)

    class OnCPU(OnlyTensors):
        """DeepSpeed between CPU processes over gloo; Lightning's own refuses CPUs, DeepSpeed does not."""

        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu", 0)

        def setup_environment(self) -> None:
            DDPStrategy.setup_environment(self)  # type: ignore[arg-type]

        def setup_distributed(self) -> None:
            from lightning.fabric.utilities.seed import reset_seed

            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    knobs: dict[str, Any] = {
        "stage": int(training.strategy[-1]),
        "offload_optimizer": training.offload != "none",
        "offload_parameters": training.offload == "parameters",
        # Said here, or Lightning asks for an iteration's minibatches before training to find out.
        "logging_batch_size_per_gpu": 1,
    }
    strategy = OnlyTensors(**knobs) if on_gpu else OnCPU(**knobs, process_group_backend="gloo")
    assert strategy.config is not None
    strategy.config["gradient_clipping"] = training.gradient_clip
    return strategy
