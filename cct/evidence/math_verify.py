"""The verifier for mathematical answers, by the library math-verify."""

from __future__ import annotations

import logging
import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field

from cct.registry import optional
from cct.rollout import Prompt, Response

from .base import Evidence, evidences

_NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
# The library reads each of these, in some 15 ms.
_READABLE = re.compile(r"-?(?:\d{1,15}(?:\.\d{1,6})?|\\d?frac\{\d+\}\{\d+\}|\d*\\sqrt\{\d+\})")
_MIXED = re.compile(r"(?<![\w.^}])(\d+)\s*\\frac\s*(?:\{(\d+)\}\s*\{(\d+)\}|(\d)\s*(\d))")
# What separates thousands besides a comma, which the library knows.
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,?\\[,!;: ]|\{,\}|[ ~\u00a0\u2009\u202f])\d{3})+(?!\d)")
# Unicode's minus signs, dashes and degrees, and its wide characters, which Chinese text has.
_CHARACTERS = str.maketrans("\u2212\u2013\ufe63", "---", "\u00b0\u00ba") | {0xFEE0 + code: code for code in range(0x21, 0x7F)}
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\?[$€£¥₹]|\^\s*\{?\s*\\circ\s*\}?|\\degree\b|\\displaystyle|\\(?:left|right)(?![a-z])", ""),
        (r"\\[dtc]frac", r"\\frac"),
        (r"(?<![\w.])(\d+)\s+(\d+)/(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),  # 3 1/2
        (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)", r"\1 \\times 10^{\2}"),  # 1e-7
        (r"^\\text[a-z]*\s*\{[^{}]*(?:\bis|[:=])\s*\}(?=.)", ""),  # the answer is
        (r"^([^=<>]+)=\s*([A-Za-z])$", r"\2 = \1"),  # 7 = x
        (r"infinity", r"\\infty"),
        (r"\\varnothing", r"\\emptyset"),
        (r"(?<![\\A-Za-z])(pi|infty)(?![A-Za-z])", r"\\\1"),
    )
]
# A number and a unit in plain words; words that are mathematics stay.
_UNIT = re.compile(
    rf"({_NUMBER})\s*(?!(?:and|or|mod|percent|percentage|pct|hundred|thousand|(?:m|b|tr)illion|pi|sqrt|sin|cos|tan|log|exp)\b)"
    r"(?:[A-Za-z]{3,}|[cmk]m|[mk]?g|m?l|ft|in|lbs?|oz|hrs?|mi|km/h|mph|m/s)(?:\b[A-Za-z /]*(?:\^?[23])?)?"
)
_CHOICE = re.compile(r"\(([A-J])\).*|([A-J])(?:[.:)]\s*\S.*)?", re.DOTALL)
_WORDS = re.compile(r"(?=.*[A-Za-z]{4})(?!.*(?:sqrt|infinity))[A-Za-z]+(?:[ -][A-Za-z]+)*|yes|no", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+(?P<token>[^\s{}$\\]+)")
_BETWEEN_BOXES = re.compile(r"[\s$,;]*(?:(?:and|or)|\\text\s*\{\s*(?:and|or)\s*\})?[\s$,;]*(?:\\[()\[\]])?")
_REPEATING = re.compile(r"(?<![\d.])(\d{0,15})\.(\d{0,15})\\overline\s*\{(\d{1,50})\}")
_IN_BASE = re.compile(r"([0-9A-Z]+)_\s*\{?\s*(\d+)\s*\}?")
_TINY, _CLOSE = 1e-2, 1e-5


@evidences.register("math_verify")
class MathVerify(Evidence):
    r"""1 if the response's answer is mathematically equal to the gold answer, else 0; needs the extra `.[math]`.

    The answer is the content of the last complete `\boxed{}`, or of the last ones where only commas or "and" stand between
    them; in a response without a box it is what math-verify finds in the text.
    """

    require: Literal["box"] | None = None
    r"""`box`: a response without a complete `\boxed{}` gets 0. Null uses a number or formula from the text instead."""
    on_error: Literal["fail", "zero", "drop"] = "zero"
    """If judging raises or takes too long, which a wrong answer can cause: stop the run, count 0, or drop the response."""
    workers: int = Field(2, ge=0, le=256)
    """Worker processes that judge; 0 judges in the trainer's process and needs `time_limit: null`."""
    time_limit: float | None = Field(10.0, gt=0, le=86400)
    """Time limit for one response in seconds; a worker that exceeds it is ended and replaced. Null: no limit."""

    def ready(self) -> None:
        optional("math_verify", "math")

    def unreadable(self, prompt: Prompt) -> str | None:
        answer = prompt.answer.strip()
        if _READABLE.fullmatch(answer) or any(not isinstance(x, str) for x in _gold(prompt.answer)):
            return None
        if "\\" not in answer and any(char.isalpha() for char in answer):  # a word of whatever language, compared as it is
            return None
        return f"the gold answer {prompt.answer!r} cannot be read as mathematics"

    def __call__(self, prompt: Prompt, response: Response) -> float:
        if reason := self.unreadable(prompt):
            raise ValueError(reason)
        gold = _gold(prompt.answer)
        found = boxes(response.text)
        if not found:
            return 0.0 if self.require == "box" else float(_equal(gold, _parsed(response.text)))
        answers = found[-1:] if len(found) == 1 else [found[-1], ", ".join(found)]
        return float(any(_right(prompt.answer, gold, answer) for answer in answers))


def boxes(text: str) -> list[str]:
    """Contents of the last complete box of a text, and of those before it where only commas or "and" stand between."""
    found: list[tuple[int, int, str]] = []  # start, end, content
    closed_at = _braces(text)
    for match in _BOX.finditer(text):
        if match["token"]:
            found.append((match.start(), match.end(), match["token"].rstrip(".,;")))
        elif (end := closed_at.get(match.end())) is not None:
            found.append((match.start(), end + 1, text[match.end() + 1 : end]))
    last = found[-1:]
    for box in reversed(found[:-1]):
        if box[1] > last[0][0]:  # it holds the other one
            continue
        if not _BETWEEN_BOXES.fullmatch(text[box[1] : last[0][0]]):
            break
        last.insert(0, box)
    return [content for _, _, content in last]


def _braces(text: str) -> dict[int, int]:
    """Where each brace that opens is closed."""
    opened, closed_at = list[int](), dict[int, int]()
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closed_at[opened.pop()] = match.start()
    return closed_at


def normalised(answer: str) -> str:
    r"""An answer in a form that math-verify reads: `\$1,\!320.` is `1320`, `16\frac{2}{3}\%` is `\frac{50}{3}\%`.

    Currency, degree signs, separators between thousands, a full stop at the end and a unit in words are taken off; fractions
    and minus signs of Unicode, mixed and scientific numbers are written in LaTeX.
    """
    text = "".join(map(_fraction, answer.translate(_CHARACTERS))).strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing):
            text = text[len(opening) : -len(closing)].strip()
    text = text.rstrip(" \t\r\n.,;:").rstrip("\\")
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _REPEATING.sub(_repeating, text)
    text = _MIXED.sub(_improper, _THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text))
    unit = _UNIT.fullmatch(text.strip())
    return unit[1] if unit else text.strip()


def _fraction(char: str) -> str:
    r"""`\frac{1}{2}` for the character of a half; other characters as they are."""
    if "VULGAR FRACTION" not in unicodedata.name(char, "") or not (value := unicodedata.numeric(char, 0)):
        return char
    fraction = Fraction(value).limit_denominator(10)
    return rf"\frac{{{fraction.numerator}}}{{{fraction.denominator}}}"


def _improper(match: re.Match[str]) -> str:
    whole, up, down = int(match[1]), int(match[2] or match[4]), int(match[3] or match[5])
    return rf"\frac{{{whole * down + up}}}{{{down}}}" if down else match[0]


def _repeating(match: re.Match[str]) -> str:
    r"""`\frac{1}{3}` for `0.\overline{3}`."""
    whole, once, again = match.groups()
    up = int(whole + once + again) - int(whole + once or 0)
    return rf"\frac{{{up}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"


def _boxed(answer: str) -> str:
    return rf"\boxed{{{normalised(answer)}}}"


@lru_cache(maxsize=4096)
def _gold(answer: str) -> list[Any]:
    """What the library makes of a gold answer; that of a solution is in its last box."""
    return _parsed(_boxed((boxes(answer) or [answer])[-1]))


def _parsed(text: str) -> list[Any]:
    library = optional("math_verify", "math")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    # Its own time limits are alarms in the main thread; a worker's stands instead.
    return library.parse(text, parsing_timeout=None)


def _right(gold: str, parsed: list[Any], answer: str) -> bool:
    one, other = (_IN_BASE.fullmatch(normalised(x)) for x in (gold, answer))
    if one and other:  # the library leaves the base of a number out
        return one.groups() == other.groups()
    said = _as_words(gold, answer)
    return _equal(parsed, _parsed(_boxed(answer))) if said is None else said


def _equal(gold: list[Any], found: list[Any]) -> bool:
    """Whether the library calls any two of them equal, and their sizes agree."""
    verify = optional("math_verify", "math").verify
    return any(verify([one], [other], timeout_seconds=None) and _of_one_size(one, other) for one in gold for other in found)


def _of_one_size(gold: Any, found: Any) -> bool:
    """False for tiny numbers that differ by more than rounding: the library compares after some six decimals."""
    if any(getattr(x, "free_symbols", True) or not getattr(x, "is_number", False) for x in (gold, found)):
        return True
    one, other = (abs(x.doit().evalf(20)) for x in (gold, found))  # arbitrary exponents: 1/2006! is no 0 here
    larger = one if one > other else other
    return not (0 < larger < _TINY) or bool(abs(one - other) <= _CLOSE * larger)


def _as_words(gold: str, answer: str) -> bool | None:
    r"""Whether a choice's letter or a word is right; None where the gold answer is neither.

    `\textbf{(B)}\ 12` is choice B. Of words the library would make products of their letters, in which `seat` is `east`.
    """
    bare = [re.sub(r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}", r"\1", x).strip(" .") for x in (gold, answer)]
    letters = [_CHOICE.fullmatch(x) for x in bare]
    if letters[0] and letters[1]:
        return len({match[1] or match[2] for match in letters if match}) == 1
    if _WORDS.fullmatch(bare[0]):
        return bare[0].lower().split() == bare[1].lower().split()
    return None
