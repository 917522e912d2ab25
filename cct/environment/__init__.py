"""Environments: what answers the policy, turn by turn."""

from . import calculator, guess_number, gym_text, textarena, tools  # noqa: F401  (registration)
from .base import Action, Demonstration, Environment, Episode, Observation, Start, Step, environments, opened
from .workers import EpisodePool, close_pools

__all__ = [
    "Action", "Demonstration", "Environment", "Episode", "EpisodePool", "Observation", "Start", "Step", "close_pools",
    "environments", "opened",
]  # fmt: skip
