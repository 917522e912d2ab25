"""The callbacks that a recipe asks for: made, and named where they fail."""

from __future__ import annotations

import io
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from cct.recipe import LightningCallback, RecipeError
from cct.registry import RAISED, error_text, run_file
from cct.system.files import NO_ROOM, WriteError

from .export import why_unreadable
from .stopped import TrainingStopped


def made(callback: LightningCallback) -> Callback:
    """The callback that a recipe asks for. Raises RecipeError where there is no such class, or it cannot be made."""
    where, _, name = callback.use.rpartition(":" if ".py:" in callback.use else ".")
    try:
        cls = getattr(run_file(Path(where)) if where.endswith(".py") else import_module(where), name)
        if not (isinstance(cls, type) and issubclass(cls, Callback)):
            raise TypeError("it is no class of a lightning.pytorch.Callback")
        return cls(**callback.arguments)
    except RAISED as error:
        raise RecipeError(f"callbacks: {callback.use}: {error_text(error)}") from error


@contextmanager
def named(callbacks: Sequence[tuple[str, Callback]]) -> Iterator[None]:
    """Raises TrainingStopped with the name of the callback in which something was raised; cct's own errors pass."""
    try:
        yield
    except (TrainingStopped, RecipeError, WriteError):
        raise
    except RAISED as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise
        for frame, _ in traceback.walk_tb(error.__traceback__):
            for name, callback in callbacks:
                if frame.f_locals.get("self") is callback:
                    raise TrainingStopped(f"callback '{name}': {error_text(error)}") from error
        if callbacks and isinstance(error, MisconfigurationException):  # one that does not go with how cct sets Lightning up
            raise TrainingStopped(f"callbacks: {error_text(error)}") from error
        raise


def must_be_plain(callbacks: Sequence[tuple[str, Callback]]) -> None:
    """Raises TrainingStopped where a callback's state cannot be read back: a checkpoint that holds it would be lost."""
    for name, callback in callbacks:
        file = io.BytesIO()
        try:
            torch.save(callback.state_dict(), file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except RAISED as error:
            raise TrainingStopped(
                f"callback '{name}': its state_dict cannot be read back from a checkpoint, which holds tensors and plain data "
                f"only: {why_unreadable(error)}"
            ) from error
