"""Evidence: what tells success."""

from . import exact_match  # noqa: F401  (registration)
from .base import Evidence, evidences

__all__ = ["Evidence", "evidences"]
