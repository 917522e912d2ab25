"""What code of the user's raised, where, and what it returned, for messages."""

from __future__ import annotations

import sysconfig
import traceback
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CCT = f"{Path(__file__).parents[1]}/"
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib"))


# What a user's code may raise, or end the process by; not the user's own Control-C.
RAISED = (Exception, SystemExit, GeneratorExit, CancelledError)


def raised_at(error: BaseException) -> str:
    """`reward.py:12`: in the user's code, or else in a library's; empty where only cct's own is on the way."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((_CCT, "<"))]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def error_text(error: BaseException) -> str:
    """`KeyError: 'x' (reward.py:12)`: what was raised, and where: in the user's code, or else in a library's."""
    place = raised_at(error)
    where = f" ({place})" if place else ""
    try:
        message = " ".join(str(error).split())
    except Exception:  # of a class of the user's own
        message = "(its message cannot be made)"
    return f"{type(error).__name__}: {message}{where}"


class Exited(ValueError):
    """A user's code called `sys.exit`, which would have ended cct silently."""


@contextmanager
def no_exit() -> Iterator[None]:
    """Raises Exited where the code within, a user's, calls `sys.exit` or the like; says where."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise Exited(f"it tried to end the process with {error_text(error)}") from error


def described(value: Any) -> str:
    """A description of what a part returned, for an error message."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"
