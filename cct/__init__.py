"""cct: credit transport for language-model reinforcement learning.

Evidence tells success, transport carries it back along the tokens, geometry turns it into a policy
change. Importing this package, or any component's knobs, does not import torch: recipes validate in
a fraction of a second. Tensor mathematics lives in the `functional` modules and the `nn` towers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cct.api import Run, evaluate, load_recipe, resume, train

__version__ = "0.1.0"
__all__ = ["Run", "evaluate", "load_recipe", "resume", "train"]


def __getattr__(name: str) -> Any:
    """The functions of `cct.api`, imported when they are first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'cct' has no attribute {name!r}")
    from cct import api

    return getattr(api, name)
