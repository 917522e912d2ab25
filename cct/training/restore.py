"""A run as it was at a checkpoint, to go on sampling from it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.loading import load_recipe
from cct.recipe import Recipe, RecipeError

from .agent import Agent
from .building import build
from .export import checkpoint_of
from .loop import STATE


def restore(run: Path, iteration: int | None = None) -> tuple[Recipe, Agent, Tokenizer, dict[str, tuple[float, float]], int]:
    """A run as it was after an iteration (default: its newest checkpoint): its recipe, policy and critic, tokenizer, running
    moments, and the iteration. Raises RecipeError where there is no such checkpoint, or it is a folder of DeepSpeed's.
    """
    checkpoint = checkpoint_of(run, iteration)
    if checkpoint.is_dir():
        raise RecipeError(f"{checkpoint}: a critic cannot be read from a checkpoint of DeepSpeed's yet")
    recipe = load_recipe(run / "recipe.yaml")
    # The weights are replaced, so no warm start is made for them, unless a reference model is to start from it.
    bare = recipe.policy if recipe.needs("reference") else recipe.policy.model_copy(update={"warm_start": None})
    agent, tokenizer, _ = build(recipe.model_copy(update={"policy": bare}))
    saved = torch.load(checkpoint, map_location="cpu", weights_only=False)
    agent.load_state_dict({name.removeprefix("agent."): weight for name, weight in saved["state_dict"].items()})
    return recipe, agent, tokenizer, saved[STATE]["moments"], int(checkpoint.stem)
