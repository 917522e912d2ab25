"""A run's prompts: which it draws, their token ids, and how those that are too long are handled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cct.environment import EpisodePool, Start, opened
from cct.errors import TrainingStopped
from cct.evidence import Failure
from cct.recipe import CRITIC_WARMUP_SEED, Recipe
from cct.rollout import Prompt, derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer

LOOK_AHEAD = 2048  # prompts of an endless stream that are looked at before a run
EXAMPLES = 3  # of what is found, in a message
BEGUN = 64  # episodes that are begun to measure their prompts
# Prompts drawn at once instead of those that are too long, and for each of these before it is clear that next to none fits.
AT_ONCE, TRIES = 64, 1000


def drawn(recipe: Recipe, bound: int = LOOK_AHEAD) -> list[Prompt]:
    """Training prompts that the run may draw, warm-up of the critic and all refills included; the time does not grow with them.

    Of a list of problems exactly those that come up, each once; of an endless stream the first `bound`.
    """
    training, listed = recipe.training, recipe.task.training()
    found: dict[int, Prompt] = {}
    for seed, rounds in (
        (recipe.seed + CRITIC_WARMUP_SEED, training.critic_warmup),
        (recipe.seed, (training.iterations + recipe.generation.lag) * (1 + training.refill)),
    ):
        count = rounds * training.prompts_per_iteration
        if listed and count >= len(listed):
            return list(listed)
        found |= {id(prompt): prompt for prompt in recipe.task.prompts(seed, 0, min(count, len(listed or ()) or bound))}
    return list(found.values())


def training_prompts(
    recipe: Recipe,
    actor: PreTrainedModel,
    tokenizer: Tokenizer,
    iteration: int,
    extra: int = 0,
    replaced: Sequence[Sequence[int]] = (),
) -> tuple[list[Prompt], int]:
    """The prompts of an iteration's groups, and how many of them were drawn instead of ones that are too long.

    extra: prompts that refills drew in earlier iterations, by which the task's stream is further on. replaced: of each refill
    of this iteration the groups that get the next prompts of the stream.
    """
    each = recipe.training.prompts_per_iteration
    first = (
        recipe.prompts(iteration, iteration)
        if iteration < 1
        else recipe.task.prompts(recipe.seed, (iteration - 1) * each + extra, each)
    )
    prompts, overlong = _fitted(recipe, actor, tokenizer, first, each, iteration)
    for refill, groups in enumerate(replaced, 1):
        fresh = recipe.task.prompts(recipe.seed, iteration * each + extra, len(groups))
        fresh, more = _fitted(recipe, actor, tokenizer, fresh, len(groups), iteration, refill)
        for group, prompt in zip(groups, fresh, strict=True):
            prompts[group] = prompt
        extra, overlong = extra + len(groups), overlong + more
    return prompts, overlong


def _fitted(
    recipe: Recipe,
    actor: PreTrainedModel,
    tokenizer: Tokenizer,
    first: Sequence[Prompt],
    expected: int,
    iteration: int,
    refill: int = 0,
) -> tuple[list[Prompt], int]:
    """As many prompts, others in the place of those that are too long, and how many these are.

    Others come from a stream of the recipe's seed and the iteration, so their number stays and a resumed run draws the same.
    """
    if len(first) != expected:
        raise ValueError(f"it returned {len(first)} prompts; expected {expected}")
    kept = fitting(recipe, actor, tokenizer, first)
    missing = len(first) - len(kept)
    seed, start = derive_seed(recipe.seed, "overlong", iteration, *((refill,) if refill else ())), 0
    while len(kept) < len(first):
        if start > TRIES * missing:
            raise TrainingStopped(f"{missing} prompts are too long, and so are nearly all of {start} drawn to replace them")
        kept += fitting(recipe, actor, tokenizer, recipe.task.prompts(seed, start, AT_ONCE))
        start += AT_ONCE
    return kept[: len(first)], missing


def begun(recipe: Recipe, prompts: Sequence[Prompt], chat_template: str | None = None) -> list[Prompt | Failure]:
    """The first `BEGUN` of the prompts with what the recipe's environment opens an episode with; of each that fails, why."""
    assert recipe.environment is not None
    some = list(prompts[:BEGUN])
    with EpisodePool(recipe.environment.fitted(chat_template)) as pool:
        starts = pool.start([(prompt, derive_seed(recipe.seed, "begun", number)) for number, prompt in enumerate(some)])
    return [
        opened(prompt, start.observation) if isinstance(start, Start) else start
        for prompt, start in zip(some, starts, strict=True)
    ]


# --- lengths ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Lengths:
    """Prompts as the policy encodes them."""

    tokens: list[tuple[int, ...]]
    too_long: list[tuple[int, int]]
    """Number and length of each that leaves no room for a response."""
    which: str
    """Which those are, in words; empty where there are none."""
    remedy: str = "Lower max_new_tokens"

    @property
    def problem(self) -> str:
        return f"{self.which}. {self.remedy}, take them out, or leave them out by `generation.overlong: drop`"


def measured(recipe: Recipe, tokenizer: Tokenizer, positions: int | None, prompts: Sequence[Prompt]) -> Lengths:
    """Token ids of the prompts, and which are too long. positions: the model's.

    Raises ValueError for a prompt without tokens, and where the policy cannot encode one.
    """
    tools, room = (recipe.environment.tool_schemas, 1) if recipe.environment else ((), recipe.generation.max_new_tokens)
    tokens = [tuple(recipe.policy.encode(tokenizer, prompt.written, tools)) for prompt in prompts]
    if () in tokens:
        raise ValueError(f"the prompt {named(prompts[tokens.index(())])} has no tokens; leave it out of the task")
    limit = recipe.generation.limit(positions)
    if limit is None:
        return Lengths(tokens, [], "")
    too_long = [(number, len(ids)) for number, ids in enumerate(tokens) if len(ids) + room > limit[0]]
    if not too_long:
        return Lengths(tokens, [], "")
    needed, remedy = f"generation.max_new_tokens ({room})", "Lower max_new_tokens"
    if recipe.environment:
        needed, remedy = "one token of a turn", "Raise the model's or the engine's limit"
    shown = ", ".join(f"{named(prompts[number])} with {length} tokens" for number, length in too_long[:EXAMPLES])
    return Lengths(
        tokens,
        too_long,
        f"{len(too_long)} of {len(tokens)} prompts are too long: with {needed} they take more than {limit[1]}, e.g. {shown}",
        remedy,
    )


def named(prompt: Prompt) -> str:
    """A prompt in a message: its place, where it has one, and its beginning."""
    beginning = repr(prompt.text[:60]) + ("..." if len(prompt.text) > 60 else "")
    return f"{prompt.place} {beginning}".lstrip()


def positions_of(actor: PreTrainedModel) -> int | None:
    """Tokens that the model has positions for; None where there is no limit."""
    return getattr(actor.config.get_text_config(), "max_position_embeddings", None)


def encode(recipe: Recipe, actor: PreTrainedModel, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Token ids of the prompts.

    Raises TrainingStopped where there is no room for one and its response, or the model has no embedding for a token of one.
    """
    lengths = _lengths(recipe, actor, tokenizer, prompts)
    if lengths.too_long:
        raise TrainingStopped(lengths.problem)
    known = actor.config.get_text_config().vocab_size
    for prompt, ids in zip(prompts, lengths.tokens, strict=True):
        if max(ids) >= known:
            raise TrainingStopped(
                f"the prompt {prompt.text[:60]!r} has the token {tokenizer.decode([max(ids)])!r} ({max(ids)}), but the model "
                f"knows tokens up to {known - 1}. Leave it out of the task, or use the model's own tokenizer"
            )
    return lengths.tokens


def fitting(recipe: Recipe, actor: PreTrainedModel, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts without those that are too long, under `generation.overlong: drop`; else all of them."""
    if recipe.generation.overlong == "fail" or recipe.environment is not None:  # which says itself what is too long
        return list(prompts)
    too_long = {number for number, _ in _lengths(recipe, actor, tokenizer, prompts).too_long}
    return [prompt for number, prompt in enumerate(prompts) if number not in too_long]


def _lengths(recipe: Recipe, actor: PreTrainedModel, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> Lengths:
    try:
        return measured(recipe, tokenizer, positions_of(actor), prompts)
    except ValueError as error:
        raise TrainingStopped(str(error)) from error
