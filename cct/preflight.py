"""What `cct check` and `cct run` look at before a run: libraries, files, the data, and what is evaluated but trained on."""

from __future__ import annotations

from cct.policy import WARM_START_SEED
from cct.recipe import Recipe, RecipeError
from cct.task import Task


def preflight(recipe: Recipe, *, demonstrations: bool = True) -> None:
    """Raises RecipeError with every part that cannot work here, or with evaluation problems that the run would train on.

    demonstrations: whether those of a warm start, which are many, are looked at as well.
    """
    problems = []
    for place, part in recipe.parts.items():
        try:
            part.ready()
            if isinstance(part, Task):
                part.held_out()
            if place == "task":
                recipe.task.prompts(recipe.seed, 0, 1)
        except (ValueError, OSError) as error:
            problems.append(f"{place}: '{part.use}': {error}")
    problems = problems or _overlaps(recipe, demonstrations)
    if problems:
        raise RecipeError(*problems)


def trained_on(recipe: Recipe, demonstrations: bool = True) -> set[str]:
    """The text of every prompt that the run will draw, the warm start's demonstrations included or not."""
    training, warm_start = recipe.training, recipe.policy.warm_start
    texts = {prompt.text for prompt in recipe.prompts(1 - training.critic_warmup, training.iterations)}
    if warm_start is not None and demonstrations:
        count = warm_start.steps * warm_start.batch_size
        texts |= {text for text, _ in recipe.task.demonstrations(recipe.seed + WARM_START_SEED, 0, count)}
    return texts


def _overlaps(recipe: Recipe, demonstrations: bool) -> list[str]:
    trained = trained_on(recipe, demonstrations)
    sets = {"task": recipe.task} | {f"evaluation.frozen.{name}": task for name, task in recipe.evaluation.frozen.items()}
    problems = []
    for place, task in sets.items():
        shared = trained & {prompt.text for prompt in task.held_out()}
        if shared:
            problems.append(
                f"{place}: {len(shared)} evaluation problems of '{task.use}' would be trained on, e.g. {min(shared)!r}; "
                "take them out of the training problems, or evaluate on others"
            )
    return problems
