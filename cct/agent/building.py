"""A recipe's models: at their starting point, and as they were at a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.errors import attributed_to, of_recipe
from cct.policy import Shape
from cct.policy.checkpoints import STATE
from cct.policy.sharing import sharing_of
from cct.policy.weights import add_lora, without_dropout
from cct.preflight import message_of, unfit, unready
from cct.prompts import drawn, encode, fitting, positions_of
from cct.recipe import Recipe, RecipeError
from cct.registry import RAISED
from cct.rollout import derive_seed
from cct.run_folder import RunFolder

from .agent import Agent
from .warm_start import warm_start


def build(
    recipe: Recipe,
    report: Callable[[int, int, float], None] = lambda step, steps, loss: None,
    say: Callable[[str], None] = print,
) -> tuple[Agent, Tokenizer, PreTrainedModel | None]:
    """Agent at its starting point, tokenizer, and the reference model where a part needs one.

    report: of a warm start, called with (step, steps, loss). say: called with a line for the user.
    Raises RecipeError where a part cannot work here, TrainingStopped where prompts are too long, of a list of problems any that
    the run draws, of an endless stream one of the first.
    """
    training = recipe.training
    if training.threads:
        torch.set_num_threads(training.threads)
    if problems := unready(recipe):
        raise RecipeError(*problems)
    with of_recipe():
        actor, tokenizer = warm_start(recipe.policy, recipe.task, recipe.seed, report, say, recipe.environment)
    text = actor.config.get_text_config()
    shape = Shape(text.num_hidden_layers, text.num_attention_heads, positions_of(actor))
    if problems := unfit(recipe, shape):
        raise RecipeError(*problems)
    _measure(recipe, actor, tokenizer, say)
    without_dropout(actor).train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(recipe.seed, "critic"))
        try:
            critic = recipe.critic.build(actor, recipe.reward_bounds) if recipe.critic else None
        except RAISED as error:  # it may be the user's own
            raise RecipeError(f"critic: {message_of(error)}") from error
    reference = None
    if recipe.needs("reference"):
        reference = copy.deepcopy(actor).requires_grad_(False).eval()
    if recipe.policy.lora:
        try:
            add_lora(actor, **recipe.policy.lora.model_dump(), seed=derive_seed(recipe.seed, "lora"))
        except ValueError as error:
            raise RecipeError(f"policy.lora.{error}") from error
    if training.gradient_checkpointing:
        actor.gradient_checkpointing_enable({"use_reentrant": False})
    share, window = sharing(recipe, actor, say)
    agent = Agent(
        actor,
        critic,
        recipe.generation.temperature,
        bf16=training.precision == "bf16",
        logits_at_once=training.logits_at_once,
        share=share,
        window=window,
    )
    return agent, tokenizer, reference


def teacher(
    recipe: Recipe, report: Callable[[int, int, float], None] = lambda *_: None, say: Callable[[str], None] = print
) -> PreTrainedModel | None:
    """The recipe's frozen teacher, None where it has none. report, say: as of `build`, which has compared the vocabularies."""
    if recipe.teacher is None:
        return None
    with of_recipe():
        model, _ = warm_start(recipe.teacher, recipe.task, recipe.seed, report, say, recipe.environment)
    without_dropout(model).requires_grad_(False).eval()
    return model


def sharing(recipe: Recipe, actor: PreTrainedModel, say: Callable[[str], None]) -> tuple[bool | Literal["auto"], int | None]:
    """Whether prompts are shared, and within sequences of what length. Raises RecipeError where they cannot be and must.

    say: called with the reason where they cannot be and need not.
    """
    wanted = recipe.training.share_prefix
    refused, window = sharing_of(actor) if wanted else ("", None)
    if not refused:
        return wanted, window
    problem = f"training.share_prefix: {type(actor).__name__} cannot share prompts: {refused}"
    if wanted is True:
        raise RecipeError(f"{problem}; set it to auto or false")
    say(f"{problem}; the prompt is computed again for each response")
    return False, None


def _measure(recipe: Recipe, actor: PreTrainedModel, tokenizer: Tokenizer, say: Callable[[str], None]) -> None:
    """Find prompts that are too long before the run. Raises TrainingStopped where it cannot go on with them.

    Of an environment's no one knows before it is asked.
    """
    if recipe.environment is not None:
        return
    with attributed_to(f"task '{recipe.task.use}'"):
        sets = {"training": drawn(recipe), "held-out": recipe.task.held_out()}
    for name, prompts in sets.items():
        kept = fitting(recipe, actor, tokenizer, prompts)
        encode(recipe, actor, tokenizer, kept or prompts)  # says why where none fits
        if len(kept) < len(prompts):
            say(f"{len(prompts) - len(kept)} of {len(prompts)} {name} prompts are too long and left out (overlong: drop)")


def restore(
    run: Path, iteration: int | None = None, *, trust: bool = False
) -> tuple[Recipe, Agent, Tokenizer, dict[str, tuple[float, float]], int]:
    """A run as it was after an iteration (default: its newest checkpoint): its recipe, policy and critic, tokenizer, running
    moments, and the iteration. trust: run plug-ins without a recorded SHA-256. Raises RecipeError where there is no such
    checkpoint, or it is a folder of DeepSpeed's.
    """
    folder = RunFolder(run)
    checkpoint = folder.checkpoint(iteration)
    if checkpoint.is_dir():
        raise RecipeError(f"{checkpoint}: reading a critic from a DeepSpeed checkpoint is not supported yet")
    recipe = folder.load_recipe(trust=trust)
    agent, tokenizer, _ = build(without_warm_start(recipe))
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    agent.load_state_dict({name.removeprefix("agent."): weight for name, weight in saved["state_dict"].items()})
    return recipe, agent, tokenizer, saved[STATE]["moments"], int(checkpoint.stem)


def without_warm_start(recipe: Recipe) -> Recipe:
    """To build a policy whose weights a checkpoint replaces; a reference model still starts from the warm start."""
    if recipe.needs("reference"):
        return recipe
    return recipe.model_copy(update={"policy": recipe.policy.model_copy(update={"warm_start": None})})
