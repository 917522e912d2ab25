"""Environments: what answers the policy, turn by turn."""

from .base import Action, Demonstration, Environment, Episode, Observation, Start, Step, environments

__all__ = ["Action", "Demonstration", "Environment", "Episode", "Observation", "Start", "Step", "environments"]
