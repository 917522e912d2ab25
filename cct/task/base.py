"""The Task axis."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

from cct.registry import Component, Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cct.rollout import Prompt


def same(text: str) -> str:
    """A prompt as it is compared with others: composed characters, and white space of whatever kind is one space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


class Task(Component):
    """Prompts with gold answers, in a reproducible endless order.

    The training stream is a function of (seed, position), so that a resumed run continues it and two
    runs with one seed see the same problems in the same order.
    """

    def prompts(self, seed: int, start: int, count: int) -> Sequence[Prompt]:
        """Training prompts number start .. start + count - 1 of the stream of this seed."""
        raise NotImplementedError

    def training(self) -> Sequence[Prompt] | None:
        """All training prompts, where they are a list that `prompts` shuffles; None where they are made without end.

        Then as many in a row as the list is long, from a start of 0, hold each of them once.
        """
        return None

    def held_out(self) -> Sequence[Prompt]:
        """The fixed evaluation prompts; none of them is ever returned by `prompts`."""
        raise NotImplementedError

    def demonstrations(self, seed: int, start: int, count: int) -> Sequence[tuple[str, str]]:
        """(prompt, response) pairs for a warm start; tasks that have them provide `demonstrations`."""
        raise NotImplementedError(f"task '{self.use}' has no demonstrations")

    @property
    def alphabet(self) -> str:
        """Characters that occur; a character tokenizer is made of them. Empty where unknown."""
        return ""


tasks: Registry[Task] = Registry("task", Task)
