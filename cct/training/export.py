"""`cct export`: the policy of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import logging
import os
import pickle
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

from cct.files import damage, whole
from cct.policy.weights import add_lora, save
from cct.recipe import RecipeError

from .building import of_recipe
from .folder import checkpoints, load_run, must_be_run

ACTOR = "agent.actor."
ONLY_TENSORS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def export(run: Path, folder: Path, iteration: int | None = None, *, dtype: str | None = None, trust: bool = False) -> Path:
    """Write the policy that `run` had after an iteration (default: its newest checkpoint); returns the checkpoint.

    Adapters are merged, weights that DeepSpeed split are put together. dtype: of the written weights, float32, bfloat16 or
    float16; None keeps the one that they were trained in. trust: run plug-ins without a recorded SHA-256. Raises RecipeError
    where there is no such checkpoint, something stands in `folder`, or a weight is beyond float16's range.
    """
    quiet()
    checkpoint = checkpoint_of(run, iteration)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError(f"{folder}: something is there already; name a new folder")
    recipe = load_run(run, trust=trust)
    with of_recipe():
        actor, tokenizer = recipe.policy.load(alphabet=recipe.task.alphabet, seed=recipe.seed)
    if recipe.policy.lora:
        add_lora(actor, **recipe.policy.lora.model_dump())
    actor.load_state_dict(actor_weights(checkpoint))
    try:
        with whole(folder) as unfinished:
            save(actor, tokenizer, unfinished, dtype=getattr(torch, dtype) if dtype else None)
    except ValueError as error:
        raise RecipeError(f"{folder}: {error}") from error
    return checkpoint


def checkpoint_of(run: Path, iteration: int | None = None) -> Path:
    """The checkpoint after an iteration, the newest where None. Raises RecipeError where there is none that can be read."""
    must_be_run(run)
    saved = {int(path.stem): path for path in checkpoints(run)}
    if not saved or iteration not in {None, *saved}:
        there = f"there are those of iterations {', '.join(map(str, saved))}" if saved else "none was taken yet"
        raise RecipeError(f"{run}: no checkpoint of iteration {iteration}; {there}")
    chosen = saved[max(saved) if iteration is None else iteration]
    if (why := damage(run, chosen) or unreadable(chosen)) is not None:
        others = ", ".join(str(number) for number, path in saved.items() if path != chosen) or "none"
        raise RecipeError(f"{chosen}: cannot be read ({why}); other iterations with a checkpoint: {others}")
    return chosen


def newest_readable(run: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint of a run that can be read, and a line on each newer one. Raises RecipeError where there is none."""
    skipped: list[str] = []
    for checkpoint in reversed(checkpoints(run)):
        why = damage(run, checkpoint) or unreadable(checkpoint)
        if why is None:
            return checkpoint, skipped
        skipped.append(f"{checkpoint}: skipped, it cannot be read ({why})")
    raise RecipeError(*skipped, f"{run}: no checkpoint can be read; start the recipe again")


def unreadable(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be read; None where it can. Weights are mapped, not loaded."""
    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.rglob("*.pt"))
    try:
        with tensors_only() if checkpoint.is_dir() else nullcontext():
            for file in files:
                torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, ImportError, AttributeError, pickle.UnpicklingError) as error:
        return _why(error)
    return None if files else "an empty folder"


def _why(error: Exception) -> str:
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


def quiet() -> None:
    """Lightning's, transformers' and DeepSpeed's chatter that has no meaning for a run made of rollouts."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="lightning")
    # transformers imports DeepSpeed, where it is installed, to save any model.
    logging.getLogger("DeepSpeed").addFilter(_no_accelerator)


def _no_accelerator(record: logging.LogRecord) -> bool:
    return "Setting accelerator to CPU" not in record.getMessage()
