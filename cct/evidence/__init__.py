"""Evidence: what tells success."""

from .base import Evidence, evidences
from . import exact_match  # noqa: F401  (registration)

__all__ = ["Evidence", "evidences"]
