"""Evidence: what tells success."""

from . import environment, exact_match, lab, math_verify, python, reasoning_gym, reward_model, shape  # noqa: F401  (registration)
from .base import Evidence, Failure, Verdict, evidences, plain
from .workers import close_workers, verdicts

__all__ = ["Evidence", "Failure", "Verdict", "close_workers", "evidences", "plain", "verdicts"]
