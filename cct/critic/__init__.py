"""Critics: what a state is worth. Knobs here, torch modules in `towers`."""

from . import combined, critic  # noqa: F401  (registration)
from .base import Critic, SingleCritic, critics

__all__ = ["Critic", "SingleCritic", "critics"]
