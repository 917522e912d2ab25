"""A run as it was at a checkpoint, to go on sampling from it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.recipe import Recipe, RecipeError

from .agent import Agent
from .building import build
from .export import checkpoint_of
from .folder import load_run
from .loop import STATE


def restore(
    run: Path, iteration: int | None = None, *, trust: bool = False
) -> tuple[Recipe, Agent, Tokenizer, dict[str, tuple[float, float]], int]:
    """A run as it was after an iteration (default: its newest checkpoint): its recipe, policy and critic, tokenizer, running
    moments, and the iteration. trust: run plug-ins without a recorded SHA-256. Raises RecipeError where there is no such
    checkpoint, or it is a folder of DeepSpeed's.
    """
    checkpoint = checkpoint_of(run, iteration)
    if checkpoint.is_dir():
        raise RecipeError(f"{checkpoint}: a critic cannot be read from a checkpoint of DeepSpeed's yet")
    recipe = load_run(run, trust=trust)
    agent, tokenizer, _ = build(without_warm_start(recipe))
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    agent.load_state_dict({name.removeprefix("agent."): weight for name, weight in saved["state_dict"].items()})
    return recipe, agent, tokenizer, saved[STATE]["moments"], int(checkpoint.stem)


def without_warm_start(recipe: Recipe) -> Recipe:
    """To build a policy whose weights a checkpoint replaces; a reference model still starts from the warm start."""
    if recipe.needs("reference"):
        return recipe
    return recipe.model_copy(update={"policy": recipe.policy.model_copy(update={"warm_start": None})})
