"""Tasks: where prompts and their gold answers come from."""

from . import chain_arithmetic, files, huggingface, lab, reasoning_gym, seeds  # noqa: F401  (registration)
from .base import Task, same, tasks

__all__ = ["Task", "same", "tasks"]
