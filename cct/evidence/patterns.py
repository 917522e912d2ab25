"""Regular expressions as knobs."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]


def last_match(pattern: str, text: str) -> str | None:
    """The first group of the last match (the whole match if there is no group), stripped; None where there is none."""
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    return (matches[-1].group(1 if matches[-1].re.groups else 0) or "").strip()
