"""The files of checkpoints, Lightning's and DeepSpeed's: whether they can be read, and the actor's weights in them."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

STATE = "RolloutData"  # what the training loop remembers beside weights and optimizer
ACTOR = "agent.actor."  # begins the names of the actor's weights
ONLY_TENSORS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def unreadable(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be read; None where it can. Weights are mapped, not loaded."""
    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.rglob("*.pt"))
    try:
        with tensors_only() if checkpoint.is_dir() else nullcontext():
            for file in files:
                torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, ImportError, AttributeError, pickle.UnpicklingError) as error:
        return why_unreadable(error)
    return None if files else "an empty folder"


def why_unreadable(error: BaseException) -> str:
    """In a line; torch's advice to load what may hold code all the same is left out."""
    if found := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it holds {found[1]}, which could run code; only tensors and plain data are loaded"
    told = re.search(r"WeightsUnpickler error: (.+)", str(error))
    return " ".join((told[1] if told else str(error)).split("\n")[0].split()) or type(error).__name__


@contextmanager
def tensors_only() -> Iterator[None]:
    """Within, `torch.load` takes tensors, plain data and DeepSpeed's four classes alone, so that a checkpoint runs no code.

    DeepSpeed's own calls allow anything; the environment overrules them.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = os.environ.get(ONLY_TENSORS)
    os.environ[ONLY_TENSORS] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        os.environ.pop(ONLY_TENSORS)
        if before is not None:
            os.environ[ONLY_TENSORS] = before


def actor_weights(checkpoint: Path) -> dict[str, Any]:
    """The actor's part of a checkpoint: a file of Lightning's, or a folder of DeepSpeed's."""
    if checkpoint.is_dir():
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with tensors_only():
            weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    else:
        weights = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
    return {name[name.index(ACTOR) + len(ACTOR) :]: weight for name, weight in weights.items() if ACTOR in name}
