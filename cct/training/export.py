"""`cct export`: the policy of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from cct.loading import load_recipe
from cct.policy.weights import add_lora, save
from cct.recipe import RecipeError

from .folder import checkpoints, must_be_run

ACTOR = "agent.actor."


def export(run: Path, folder: Path, iteration: int | None = None, dtype: str | None = None) -> Path:
    """Write the policy that `run` had after an iteration (default: its newest checkpoint); returns the checkpoint.

    Adapters are merged, weights that DeepSpeed split are put together. dtype: of the written weights, float32, bfloat16 or
    float16; None keeps the one that they were trained in. Raises RecipeError where there is no such checkpoint, something
    stands in `folder`, or a weight is beyond float16's range.
    """
    quiet()
    checkpoint = checkpoint_of(run, iteration)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError(f"{folder}: something is there already; name a new folder")
    recipe = load_recipe(run / "recipe.yaml")
    actor, tokenizer = recipe.policy.load(alphabet=recipe.task.alphabet, seed=recipe.seed)
    if recipe.policy.lora:
        add_lora(actor, **recipe.policy.lora.model_dump())
    actor.load_state_dict(actor_weights(checkpoint))
    unfinished = folder.with_name(f".{folder.name}")
    try:
        save(actor, tokenizer, unfinished, dtype=getattr(torch, dtype) if dtype else None)
    except ValueError as error:
        raise RecipeError(f"{folder}: {error}") from error
    unfinished.rename(folder)  # whole or not at all
    return checkpoint


def checkpoint_of(run: Path, iteration: int | None = None) -> Path:
    """The checkpoint after an iteration, the newest where None. Raises RecipeError where there is none that can be read."""
    must_be_run(run)
    saved = {int(path.stem): path for path in checkpoints(run)}
    if not saved or iteration not in {None, *saved}:
        there = f"there are those of iterations {', '.join(map(str, saved))}" if saved else "none was taken yet"
        raise RecipeError(f"{run}: no checkpoint of iteration {iteration}; {there}")
    chosen = saved[max(saved) if iteration is None else iteration]
    if (why := unreadable(chosen)) is not None:
        others = ", ".join(str(number) for number, path in saved.items() if path != chosen) or "none"
        raise RecipeError(f"{chosen}: cannot be read ({why}); other iterations with a checkpoint: {others}")
    return chosen


def newest_readable(run: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint of a run that can be read, and a line on each newer one. Raises RecipeError where there is none."""
    skipped: list[str] = []
    for checkpoint in reversed(checkpoints(run)):
        why = unreadable(checkpoint)
        if why is None:
            return checkpoint, skipped
        skipped.append(f"{checkpoint}: skipped, it cannot be read ({why})")
    raise RecipeError(*skipped, f"{run}: no checkpoint can be read; start the recipe again")


def unreadable(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be read; None where it can. Weights are mapped, not loaded."""
    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.rglob("*.pt"))
    for file in files:
        try:
            torch.load(file, map_location="cpu", weights_only=False, mmap=True)
        except (OSError, RuntimeError, ValueError, EOFError, ImportError, AttributeError, pickle.UnpicklingError) as error:
            return " ".join(str(error).split("\n")[0].split()) or type(error).__name__
    return None if files else "an empty folder"


def actor_weights(checkpoint: Path) -> dict[str, Any]:
    """The actor's part of a checkpoint: a file of Lightning's, or a folder of DeepSpeed's."""
    if checkpoint.is_dir():
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    else:
        weights = torch.load(checkpoint, map_location="cpu", weights_only=False)["state_dict"]
    return {name[name.index(ACTOR) + len(ACTOR) :]: weight for name, weight in weights.items() if ACTOR in name}


def quiet() -> None:
    """Lightning's and transformers' chatter that has no meaning for a run made of rollouts."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="lightning")
