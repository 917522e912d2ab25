"""What `cct check` and `cct run` check before a run: libraries, files, data, and evaluation problems in the training data."""

from __future__ import annotations

from importlib.util import find_spec

from cct.audit import golds
from cct.evidence import Failure
from cct.policy import WARM_START_SEED, Policy, Shape
from cct.prompts import begun, drawn, named
from cct.recipe import Recipe, RecipeError
from cct.registry import RAISED, error_text, install
from cct.rollout import Prompt
from cct.statistic import Statistic
from cct.task import Task, same
from cct.transport import Gate, Transport
from cct.watching import LOGGERS

CHECKED, CHECKED_BEFORE_RUN = 4096, 65_536  # prompts of an endless stream that are compared with evaluation problems
GOLDS, GOLDS_BEFORE_RUN = 50, 1000  # gold answers read of training and of evaluation each; `cct check --deep` reads all


def preflight(recipe: Recipe, *, demonstrations: bool = True) -> list[str]:
    """Check a recipe's parts and data before a run. Returns warnings, each with its place.

    demonstrations: check more prompts and gold answers, and a warm start's demonstrations; otherwise only what takes a moment.
    Raises RecipeError with every part that cannot work here, with prompts that the policy cannot take, with gold answers that
    would stop the run, or with evaluation problems that it would train on.
    """
    problems = unready(recipe)
    for place, part in recipe.parts.items():
        try:
            if isinstance(part, Task) and not any(problem.startswith(f"{place}: ") for problem in problems):
                part.held_out()
                if place == "task":
                    part.prompts(recipe.seed, 0, 1)
        except RAISED as error:  # a part may be the user's own
            problems.append(f"{place}: '{part.use}': {message_of(error)}")
    if not problems:
        try:
            shape = recipe.policy.shape
        except (OSError, ValueError) as error:  # an impossible path, a folder with unexpected content
            raise RecipeError(f"policy: '{recipe.policy.use}': {error}") from None
        problems = unfit(recipe, shape) if shape is not None else []
    warnings: list[str] = []
    try:
        problems = problems or _overlaps(recipe, demonstrations)
        if not problems:
            problems, warnings = _data(recipe, GOLDS_BEFORE_RUN if demonstrations else GOLDS)
    except RAISED as error:  # a user's task, further on in its stream
        problems = [f"task: '{recipe.task.use}': {message_of(error)}"]
    if problems:
        raise RecipeError(*problems)
    return warnings


def _data(recipe: Recipe, bound: int) -> tuple[list[str], list[str]]:
    """Problems and warnings about the first `bound` training prompts and the first `bound` held-out prompts."""
    prompts = [*drawn(recipe, bound)[:bound], *recipe.task.held_out()[:bound]]
    first = prompts[:1] if recipe.environment is None else begun(recipe, prompts[:1])
    for failure in first:
        if isinstance(failure, Failure) and recipe.environment is not None:
            said = f"environment: '{recipe.environment.use}' cannot begin an episode of {named(prompts[0])}: {failure.reason}"
            return ([said], []) if recipe.environment.on_error == "fail" else ([], [said])
    talk = next((prompt for prompt in [*first, *prompts] if isinstance(prompt, Prompt) and prompt.messages), None)
    if talk is not None and not recipe.policy.takes_messages:
        return [
            f"task: {named(talk)} is a list of messages, and policy '{recipe.policy.use}' has no chat template for it; "
            "use a chat model with policy.chat at auto, or turn the row into text with task.template"
        ], []
    try:
        found = list(golds(recipe.evidence, prompts))
        for name, one in recipe.evaluation.sets.items():
            place = f"evaluation.sets.{name}.evidence" if one.evidence else "evidence"
            found += golds(one.evidence or recipe.evidence, one.task.held_out()[:bound], place)
    except RAISED as error:  # a part may be the user's own
        return [f"evidence: {message_of(error)}"], []
    return [text for fails, text in found if fails], [text for fails, text in found if not fails]


def unready(recipe: Recipe) -> list[str]:
    """Every part that cannot work here because a library or a file is missing."""
    problems = []
    for place, part in recipe.parts.items():
        try:
            part.ready()
        except RAISED as error:
            problems.append(f"{place}: '{part.use}': {message_of(error)}")
    if recipe.teacher is not None and not any(problem.startswith(("policy", "teacher")) for problem in problems):
        problems += _of_another_vocabulary(recipe.teacher, recipe)
    strategy = recipe.training.strategy
    if strategy.startswith("deepspeed") and find_spec("deepspeed") is None:
        problems.append(f"training.strategy: {strategy} needs DeepSpeed, which is not installed: {install('deepspeed')}")
    for logger in recipe.logging.logger:
        if (module := LOGGERS.get(logger.use)) and find_spec(module) is None:
            problems.append(f"logging.logger: {logger.use} is not installed: {install(logger.use)}, or set it to csv")
    return problems


def _of_another_vocabulary(teacher: Policy, recipe: Recipe) -> list[str]:
    """A problem where the teacher's tokens are not the policy's, without loading weights."""
    try:
        own, other = (part.tokenizer(alphabet=recipe.alphabet).get_vocab() for part in (recipe.policy, teacher))
    except RAISED as error:
        return [f"teacher: '{teacher.use}': {message_of(error)}"]
    if own == other:
        return []
    token = min(set(own.items()) ^ set(other.items()))[0]
    numbers = f"{token!r} is {own.get(token, 'no token')} of the policy and {other.get(token, 'no token')} of the teacher"
    return [
        f"teacher: '{teacher.use}' has another vocabulary than the policy ({len(other):,} and {len(own):,} tokens; {numbers}); "
        "both must number the same tokens alike: use a teacher of the policy's family"
    ]


def message_of(error: BaseException) -> str:
    """The message of a ValueError or OSError, which parts write for users; of any other error, also where it was raised."""
    return str(error) if isinstance(error, ValueError | OSError) else error_text(error)


def unfit(recipe: Recipe, shape: Shape) -> list[str]:
    """Every part that does not fit a model of this shape."""
    problems: list[str] = []
    for place, part in reversed(recipe.parts.items()):  # a gate before the transport that contains it
        if isinstance(part, Transport | Gate | Statistic) and not any(problem.startswith(place) for problem in problems):
            try:
                for statistic in [part] if isinstance(part, Statistic) else part.statistics.values():
                    statistic.fits(shape.layers, shape.heads)
            except ValueError as error:
                problems.append(f"{place}: {error}")
    room, limit = recipe.generation.max_new_tokens, recipe.generation.limit(shape.positions)
    if limit is not None and room >= limit[0]:
        of_model = limit[0] == shape.positions
        has = f"the model has {limit[0]} positions" if of_model else f"the limit is {limit[1]}"
        remedy = "raise policy.max_length, or " if of_model and "max_length" in type(recipe.policy).model_fields else ""
        problems.append(f"generation.max_new_tokens: {room}, but {has} for prompt and response together; {remedy}lower it")
    return problems


def trained_on(recipe: Recipe, demonstrations: bool = True) -> set[str]:
    """The texts of the prompts that the run draws, with or without the warm start's demonstrations.

    From a list of problems, all that the run draws. From an endless stream and from demonstrations, only the first ones: at
    most CHECKED, or CHECKED_BEFORE_RUN of each if `demonstrations`. The time therefore does not grow with the iterations.
    """
    warm_start, bound = recipe.policy.warm_start, CHECKED_BEFORE_RUN if demonstrations else CHECKED
    texts = {prompt.text for prompt in drawn(recipe, bound) if prompt.text}
    if warm_start is not None and demonstrations:
        count = min(warm_start.steps * warm_start.batch_size, bound)
        if "demonstrations" in recipe.task.provides:
            texts |= {text for text, _ in recipe.task.demonstrations(recipe.seed + WARM_START_SEED, 0, count)}
    return texts


def _overlaps(recipe: Recipe, demonstrations: bool) -> list[str]:
    trained = {same(text): text for text in trained_on(recipe, demonstrations)}
    sets = {"task": recipe.task} | recipe.evaluation.other_tasks
    problems = []
    for place, task in sets.items():
        shared = trained.keys() & {same(prompt.text) for prompt in task.held_out()}
        if shared:
            problems.append(
                f"{place}: {len(shared)} evaluation problems of '{task.use}' would be trained on, "
                f"e.g. {trained[min(shared)]!r}; "
                "remove them from the training problems, or evaluate on others"
            )
    return problems
