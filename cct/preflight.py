"""What `cct check` and `cct run` look at before a run: libraries, files, the data, and what is evaluated but trained on."""

from __future__ import annotations

from importlib.util import find_spec

from cct.policy import WARM_START_SEED, Shape
from cct.recipe import Recipe, RecipeError
from cct.registry import install, told
from cct.task import Task
from cct.transport import Gate, Transport


def preflight(recipe: Recipe, *, demonstrations: bool = True) -> None:
    """Raises RecipeError with every part that cannot work here, or with evaluation problems that the run would train on.

    demonstrations: whether those of a warm start, which are many, are looked at as well.
    """
    problems = unready(recipe)
    for place, part in recipe.parts.items():
        try:
            if isinstance(part, Task) and not any(problem.startswith(f"{place}: ") for problem in problems):
                part.held_out()
                if place == "task":
                    part.prompts(recipe.seed, 0, 1)
        except (Exception, SystemExit) as error:  # a part may be the user's own
            problems.append(f"{place}: '{part.use}': {said(error)}")
    if not problems:
        try:
            shape = recipe.policy.shape
        except OSError as error:  # of a path that no file can have
            raise RecipeError(f"policy: '{recipe.policy.use}': {error}") from None
        problems = unfit(recipe, shape) if shape is not None else []
    problems = problems or _overlaps(recipe, demonstrations)
    if problems:
        raise RecipeError(*problems)


def unready(recipe: Recipe) -> list[str]:
    """Every part that cannot work here, for want of a library or a file."""
    problems = []
    for place, part in recipe.parts.items():
        try:
            part.ready()
        except (Exception, SystemExit) as error:
            problems.append(f"{place}: '{part.use}': {said(error)}")
    strategy, logger = recipe.training.strategy, recipe.logging.logger
    if strategy.startswith("deepspeed") and find_spec("deepspeed") is None:
        problems.append(f"training.strategy: {strategy} needs DeepSpeed, which is not installed: {install('deepspeed')}")
    if logger == "tensorboard" and find_spec("tensorboard") is None and find_spec("tensorboardX") is None:
        problems.append(f"logging.logger: tensorboard is not installed: {install('tensorboard')}, or set it to csv")
    return problems


def said(error: BaseException) -> str:
    """Parts raise ValueError and OSError with a message for users; whatever else they raise, with its place."""
    return str(error) if isinstance(error, ValueError | OSError) else told(error)


def unfit(recipe: Recipe, shape: Shape) -> list[str]:
    """Every part that does not fit a model of this shape."""
    problems: list[str] = []
    for place, part in reversed(recipe.parts.items()):  # a gate before the transport that holds it
        if isinstance(part, Transport | Gate) and not any(problem.startswith(place) for problem in problems):
            try:
                for statistic in part.statistics.values():
                    statistic.fits(shape.layers, shape.heads)
            except ValueError as error:
                problems.append(f"{place}: {error}")
    room = recipe.generation.max_new_tokens
    if shape.positions is not None and room >= shape.positions:
        problems.append(
            f"generation.max_new_tokens: {room}, and the model has {shape.positions} positions for a prompt and its response"
            + ("; raise policy.max_length, or lower it" if "max_length" in type(recipe.policy).model_fields else "; lower it")
        )
    return problems


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
