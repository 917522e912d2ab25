"""Signals that ask a process to end: Control-C, SIGTERM, and SIGHUP of a terminal that is closed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE = 15.0  # seconds; SLURM kills 30 s after SIGTERM, Kubernetes as well, and a study after 20


class Interrupted(KeyboardInterrupt):
    """The process was asked to end."""

    def __init__(self, number: int = signal.SIGINT):
        super().__init__()
        self.number = number

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    @property
    def exit_code(self) -> int:
        """As a shell would say it: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.number


def interrupt(number: int, frame: FrameType | None = None) -> None:
    """A signal handler that raises Interrupted."""
    raise Interrupted(number)


@contextmanager
def answered(handler: Callable[[int, FrameType | None], Any] = interrupt) -> Iterator[None]:
    """Within, these signals go to `handler`; what was ignored, as under nohup, stays ignored. In the main thread only."""
    before = {number: signal.getsignal(number) for number in ENDING}
    answer(handler)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, one in before.items():
                if one is not None:  # set by a library in C
                    signal.signal(number, one)


def answer(handler: Callable[[int, FrameType | None], Any]) -> None:
    """From now on these signals go to `handler`, ignored ones excepted."""
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)


class Ending:
    """How a run ends when it is asked to: after the iteration under way where that takes seconds, or else at once.

    A checkpoint holds the state between two iterations, so within one there is nothing to save. A second signal, and the end
    of GRACE, end it at once. Of several processes the first decides, and ends the others.
    """

    def __init__(self, first: bool):
        self.first = first
        self.asked: int | None = None
        """The signal, where the run ends after this iteration."""
        self._began = time.monotonic()
        self._took: float | None = None  # the iteration before
        self._last: threading.Timer | None = None

    def lap(self) -> None:
        """An iteration of the policy is over, its checkpoint included."""
        now = time.monotonic()
        self._took, self._began = now - self._began, now

    def answer(self) -> None:
        """Take the signals; Lightning sets handlers of its own when it begins."""
        answer(self)

    def close(self) -> None:
        """Nothing is waited for any more."""
        if self._last is not None:
            self._last.cancel()

    def __call__(self, number: int, frame: FrameType | None = None) -> None:
        left = None if self._took is None else max(0.0, self._took - (time.monotonic() - self._began))
        if not self.first:
            self.asked = number
        elif self.asked is not None or left is None or left > GRACE:
            raise Interrupted(number)
        else:
            self.asked = number
            text = f"{signal.Signals(number).name}: ends after this iteration, in about {left:.0f} s; once more ends at once\n"
            os.write(2, text.encode())  # print is not safe here
            self._last = threading.Timer(GRACE, os.kill, (os.getpid(), number))
            self._last.daemon = True
            self._last.start()
