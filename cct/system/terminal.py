"""What reaches the terminal: nothing of a user's is markup, moves the cursor, or fails to be encoded there."""

from __future__ import annotations

import io
import os
import re
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# Control characters but newline and tab, line separators, changes of direction, and lone surrogates.
_UNPRINTABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with escapes in place of what a terminal would obey, such as `\\x1b`, or could not show."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(*texts: object, file: TextIO | None = None, end: str = "\n") -> None:
    """`print`, of texts that may be a user's."""
    print(*(printable(str(text)) for text in texts), file=file, end=end)


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and three dots where it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def say_traceback(error: BaseException) -> None:
    """What Python prints of an exception that nobody catches, its text a user's."""
    import traceback

    say("".join(traceback.format_exception(error)), file=sys.stderr, end="")


def encode_anything() -> None:
    """Let the standard streams escape what their encoding lacks, as in an ASCII locale, and tracebacks what is unprintable."""
    sys.excepthook = lambda kind, error, trace: say_traceback(error)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def make_console(least: int = 0, **options: Any) -> Console:
    """A rich console to which texts are texts: no markup, no emoji codes, no escape sequences.

    least: columns where the output is no terminal, for tables that would be cut.
    """
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    made = Plain(markup=False, emoji=False, highlight=False, **options)
    return made if made.is_terminal or made.width >= least else make_console(0, width=least, **options)


def leave_stdout() -> None:
    """What is still to be written there goes nowhere, or Python complains when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
