"""Optional libraries, and the extras that bring them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType


def optional(module: str, extra: str) -> ModuleType:
    """Import an optional library. Raises ValueError with the extra to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.split(".")[0]
        if (error.name or "").split(".")[0] != library:
            raise  # the library is there, and lacks one of its own
        raise ValueError(f"the library {library} is not installed; install it with {install(extra)}") from None


def install(*extras: str) -> str:
    """The command that installs extras, in cct's checkout if there is one."""
    names = ",".join(extras)
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").is_file():
        return f"pip install 'credit-transport[{names}]'"
    here = Path.cwd() == root
    return f"pip install -e '.[{names}]'" + ("" if here else f" (in {root})")
