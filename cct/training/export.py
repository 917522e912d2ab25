"""`cct export`: the policy of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cct.loading import load_recipe
from cct.policy.weights import add_lora, save
from cct.recipe import RecipeError

from .callbacks import checkpoints

ACTOR = "agent.actor."


def export(run: Path, folder: Path, iteration: int | None = None) -> Path:
    """Write the policy that `run` had after an iteration (default: its newest checkpoint); returns the checkpoint.

    Adapters are merged, weights that DeepSpeed split are put together. Raises RecipeError where there is no such
    checkpoint, or something stands in `folder`.
    """
    checkpoint = checkpoint_of(run, iteration)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError(f"{folder}: something is there already; name a new folder")
    recipe = load_recipe(run / "recipe.yaml")
    actor, tokenizer = recipe.policy.load(alphabet=recipe.task.alphabet, seed=recipe.seed)
    if recipe.policy.lora:
        add_lora(actor, **recipe.policy.lora.model_dump())
    actor.load_state_dict(actor_weights(checkpoint))
    unfinished = folder.with_name(f".{folder.name}")
    save(actor, tokenizer, unfinished)
    unfinished.rename(folder)  # whole or not at all
    return checkpoint


def checkpoint_of(run: Path, iteration: int | None = None) -> Path:
    """The checkpoint after an iteration, the newest where None. Raises RecipeError where there is none."""
    if not (run / "recipe.yaml").is_file():
        raise RecipeError(f"{run}: not a run folder (no recipe.yaml)")
    saved = {int(path.stem): path for path in checkpoints(run)}
    if not saved or iteration not in {None, *saved}:
        there = f"there are those of iterations {', '.join(map(str, saved))}" if saved else "none was taken yet"
        raise RecipeError(f"{run}: no checkpoint of iteration {iteration}; {there}")
    return saved[max(saved) if iteration is None else iteration]


def actor_weights(checkpoint: Path) -> dict[str, Any]:
    """The actor's part of a checkpoint: a file of Lightning's, or a folder of DeepSpeed's."""
    if checkpoint.is_dir():
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    else:
        weights = torch.load(checkpoint, map_location="cpu", weights_only=False)["state_dict"]
    return {name[name.index(ACTOR) + len(ACTOR) :]: weight for name, weight in weights.items() if ACTOR in name}
