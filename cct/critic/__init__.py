"""Critics: what a state is worth. Knobs here, torch modules in `towers`."""

from .base import Critic, critics
from . import critic  # noqa: F401  (registration)

__all__ = ["Critic", "critics"]
