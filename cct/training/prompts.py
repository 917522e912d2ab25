"""Prompts as token ids, and what becomes of those that are too long."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.audit import measured
from cct.recipe import Recipe
from cct.rollout import Prompt, derive_seed

from .stopped import TrainingStopped

# Prompts drawn at once in place of those that are too long, and for each of these before it is clear that next to none fits.
AT_ONCE, TRIES = 64, 1000


def positions_of(actor: PreTrainedModel) -> int | None:
    """Tokens that the model has positions for; None where there is no limit."""
    return getattr(actor.config.get_text_config(), "max_position_embeddings", None)


def encode(recipe: Recipe, actor: PreTrainedModel, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Token ids of the prompts.

    Raises TrainingStopped where there is no room for one and its response, or the model has no embedding for a token of one.
    """
    try:
        lengths = measured(recipe, tokenizer, positions_of(actor), prompts)
    except ValueError as error:
        raise TrainingStopped(str(error)) from error
    if lengths.too_long:
        raise TrainingStopped(lengths.problem)
    known = actor.config.get_text_config().vocab_size
    for prompt, ids in zip(prompts, lengths.tokens, strict=True):
        if max(ids) >= known:
            raise TrainingStopped(
                f"the prompt {prompt.text[:60]!r} has the token {tokenizer.decode([max(ids)])!r} ({max(ids)}), and the model "
                f"knows tokens up to {known - 1}. Leave it out of the task, or use the model's own tokenizer"
            )
    return lengths.tokens


def fitting(recipe: Recipe, actor: PreTrainedModel, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts without those that are too long, under `generation.overlong: drop`; else all of them."""
    if recipe.generation.overlong == "fail" or recipe.environment is not None:  # which says itself what is too long
        return list(prompts)
    try:
        too_long = {number for number, _ in measured(recipe, tokenizer, positions_of(actor), prompts).too_long}
    except ValueError as error:
        raise TrainingStopped(str(error)) from error
    return [prompt for number, prompt in enumerate(prompts) if number not in too_long]


def training_prompts(recipe: Recipe, actor: PreTrainedModel, tokenizer: Tokenizer, iteration: int) -> tuple[list[Prompt], int]:
    """An iteration's prompts, and how many of them were drawn in place of ones that are too long.

    Others come from a stream of the recipe's seed and the iteration, so their number stays and a resumed run draws the same.
    """
    drawn, expected = recipe.prompts(iteration, iteration), recipe.training.prompts_per_iteration
    if len(drawn) != expected:
        raise ValueError(f"it returned {len(drawn)} prompts; expected {expected}")
    kept = fitting(recipe, actor, tokenizer, drawn)
    missing = len(drawn) - len(kept)
    seed, start = derive_seed(recipe.seed, "overlong", iteration), 0
    while len(kept) < len(drawn):
        if start > TRIES * missing:
            raise TrainingStopped(f"of {start} prompts drawn in place of {missing} that are too long, nearly all are too")
        kept += fitting(recipe, actor, tokenizer, recipe.task.prompts(seed, start, AT_ONCE))
        start += AT_ONCE
    return kept[: len(drawn)], missing
