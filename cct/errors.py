"""How a run stops, and which part stopped it. Problems of a recipe are `recipe.RecipeError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cct.handover import HandoverError
from cct.policy.generation import EngineError
from cct.recipe import RecipeError
from cct.registry import RAISED, Knobs, error_text


class TrainingStopped(Exception):
    """A run cannot continue; the message names the component and the iteration.

    No RuntimeError: one raised from a StopIteration is taken for that StopIteration by `contextlib`, which then ends a loop.
    """


@contextmanager
def attributed_to(part: str, iteration: int | None = None, recipe: Knobs | None = None) -> Iterator[None]:
    """Whatever is raised within stops the run, in one line that names the part; the cause keeps the traceback.

    A HandoverError names another part: the one that it is about, and its place in the recipe.
    """
    try:
        yield
    except (TrainingStopped, RecipeError, KeyboardInterrupt):
        raise
    except HandoverError as error:
        raise TrainingStopped(error.message(recipe, iteration)) from error
    except RAISED as error:
        where = "" if iteration is None else f" in iteration {iteration}"
        raise TrainingStopped(f"{part}{where}: {error_text(error)}") from error


@contextmanager
def of_recipe() -> Iterator[None]:
    """Raises RecipeError if a policy cannot be loaded because of its files or the recipe."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise RecipeError(str(error)) from error


@contextmanager
def of_engine() -> Iterator[None]:
    """Raises TrainingStopped with what an engine says."""
    try:
        yield
    except EngineError as error:
        raise TrainingStopped(str(error)) from error
