"""Lightning strategies by their recipe name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

from cct.recipe import Recipe, Training

from .export import tensors_only


class OneFile(TorchCheckpointIO):
    """Checkpoints that are one file, written to their place; Lightning's own go through memory and the system's /tmp."""

    refused: Exception | None = None
    """Why the last one could not be written; for when every process has passed the barrier behind it."""

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
    if name == "fsdp":  # one file per checkpoint, as without it; `CreditModule.configure_model` says what is split
        return ModelParallelStrategy(
            data_parallel_size=training.processes, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    if name.startswith("deepspeed"):
        return _deepspeed(training, on_gpu)
    return name


def _deepspeed(training: Training, on_gpu: bool) -> Strategy:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    class OnlyTensors(DeepSpeedStrategy):
        """DeepSpeed whose checkpoints run no code when they are read."""

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
