"""Regular expressions as knobs. `regex` runs them: unlike `re`, it can be given a time limit."""

from __future__ import annotations

import re
from collections import deque
from typing import Annotated

import regex
from pydantic import AfterValidator, Field

SECONDS = 0.5  # for one text; a pattern such as (a+)+b would search for ever


# `regex` takes `x{e<=1}` for "x with at most one error", `re` for a text.
_FUZZY = re.compile(r"(?<!\\)\{[^{}\\]*[deis][^{}\\]*\}")


def _compiles(pattern: str) -> str:
    """What both libraries take: a pattern means what Python's documentation says."""
    try:
        re.compile(pattern)
        regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if found := _FUZZY.search(pattern):
        raise ValueError(f"not a regular expression: write a literal brace as \\{{, in {found[0]}")
    return pattern


Pattern = Annotated[str, Field(max_length=2000), AfterValidator(_compiles)]


def last_match(pattern: str, text: str) -> str | None:
    """The first group of the last match (the whole match if there is no group), stripped; None where there is none.

    Raises ValueError where the search takes longer than SECONDS.
    """
    try:
        found = deque(regex.finditer(pattern, text, timeout=SECONDS), maxlen=1)
    except (TimeoutError, MemoryError):
        raise ValueError(_slow(pattern, text)) from None
    return (found[0].group(1 if found[0].re.groups else 0) or "").strip() if found else None


def matches(pattern: str, text: str, *, full: bool) -> bool:
    """Whether the whole text has the form of the pattern, or a part of it. Raises ValueError as `last_match`."""
    try:
        return (regex.fullmatch if full else regex.search)(pattern, text, timeout=SECONDS) is not None
    except (TimeoutError, MemoryError):
        raise ValueError(_slow(pattern, text)) from None


def _slow(pattern: str, text: str) -> str:
    return (
        f"the regular expression {pattern[:80]!r} takes more than {SECONDS:g} s on a text of {len(text)} characters; "
        "write it without a repetition inside a repetition"
    )
