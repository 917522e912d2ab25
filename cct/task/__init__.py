"""Tasks: where prompts and their gold answers come from."""

from .base import Task, tasks
from . import chain_arithmetic, jsonl  # noqa: F401  (registration)

__all__ = ["Task", "tasks"]
