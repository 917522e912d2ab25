"""Lightning strategies by their recipe name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import nn

from cct.recipe import RecipeError, Training


def strategy_of(training: Training) -> Strategy | str:
    """The Lightning strategy of a recipe. Raises RecipeError where DeepSpeed is asked for and not installed."""
    name = training.strategy
    on_gpu = torch.cuda.is_available()
    if name == "auto":
        name = "ddp" if training.processes > 1 else "auto"
    if name == "ddp":
        # A pass of the critic leaves the actor without gradient, and the other way round.
        return DDPStrategy(find_unused_parameters=True, process_group_backend="nccl" if on_gpu else "gloo")
    if name.startswith("deepspeed"):
        return _deepspeed(int(name[-1]), on_gpu, training.rows_per_forward)
    return name


def _deepspeed(stage: int, on_gpu: bool, rows: int) -> Strategy:
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        raise RecipeError(
            f"training.strategy: deepspeed_{stage} needs DeepSpeed, which is not installed: pip install 'cct[deepspeed]'"
        ) from None
    from lightning.pytorch.strategies import DeepSpeedStrategy

    class OnCPU(DeepSpeedStrategy):
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

    # Said here, or Lightning asks for an iteration's minibatches before training to find out.
    if on_gpu:
        return DeepSpeedStrategy(stage=stage, logging_batch_size_per_gpu=rows)
    return OnCPU(stage=stage, logging_batch_size_per_gpu=rows, process_group_backend="gloo")


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """While open, every process holds all weights of a model that ZeRO-3 has split; otherwise nothing happens."""
    parameters = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if not parameters:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        yield
