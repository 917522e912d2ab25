"""A recipe's models at their starting point."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cct.policy import Shape
from cct.policy.weights import add_lora, without_dropout
from cct.preflight import said, unfit, unready
from cct.recipe import Recipe, RecipeError
from cct.rollout import derive_seed

from .agent import Agent
from .rows import encode
from .warm_start import warm_start

LOOK_AHEAD = 2048  # training prompts, the warm-up's besides, that are measured before the run; others when their turn comes


def build(
    recipe: Recipe,
    report: Callable[[int, int, float], None] = lambda step, steps, loss: None,
    say: Callable[[str], None] = print,
) -> tuple[Agent, PreTrainedTokenizerBase, PreTrainedModel | None]:
    """Agent at its starting point, tokenizer, and the reference model where a part needs one.

    report: of a warm start, called with (step, steps, loss). say: called with a line for the user.
    Raises RecipeError where a part cannot work here, TrainingStopped where one of the first prompts is longer than the model
    can take.
    """
    training = recipe.training
    if training.threads:
        torch.set_num_threads(training.threads)
    if problems := unready(recipe):
        raise RecipeError(*problems)
    try:
        actor, tokenizer = warm_start(recipe.policy, recipe.task, recipe.seed, report, say)
    except (ValueError, OSError) as error:
        raise RecipeError(str(error)) from error
    text = actor.config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if problems := unfit(recipe, Shape(text.num_hidden_layers, text.num_attention_heads, positions)):
        raise RecipeError(*problems)
    last = min(training.iterations, max(1, LOOK_AHEAD // training.prompts_per_iteration))
    encode(recipe, actor, tokenizer, recipe.prompts(1 - training.critic_warmup, last))
    without_dropout(actor).train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(recipe.seed, "critic"))
        try:
            critic = recipe.critic.build(actor, recipe.reward_bounds) if recipe.critic else None
        except Exception as error:  # it may be the user's own
            raise RecipeError(f"critic: {said(error)}") from error
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
    bf16 = training.precision == "bf16"
    agent = Agent(actor, critic, recipe.generation.temperature, bf16=bf16, logits_at_once=training.logits_at_once)
    return agent, tokenizer, reference
