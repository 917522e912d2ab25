"""Critics: what a state is worth. Knobs here, torch modules in `towers`."""

from . import critic  # noqa: F401  (registration)
from .base import Critic, critics

__all__ = ["Critic", "critics"]
