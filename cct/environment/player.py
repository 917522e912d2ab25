"""Episodes played in one process, each with global generators of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cct.evidence.base import Failure
from cct.registry import RAISED

from .base import Action, Environment, Episode, Start, Step
from .checks import checked, checked_start, total_of

if TYPE_CHECKING:
    from cct.rollout import Prompt


class OwnGenerators:
    """States of Python's and numpy's global generators, seeded for one episode; nobody else's draws reach them."""

    def __init__(self, seed: int):
        import numpy

        self.states: tuple[Any, Any] = random.Random(seed).getstate(), numpy.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The global generators are the episode's within, and afterwards as they were before."""
        import numpy

        outside = random.getstate(), numpy.random.get_state()
        random.setstate(self.states[0])
        numpy.random.set_state(self.states[1])
        try:
            yield
        finally:
            self.states = random.getstate(), numpy.random.get_state()
            random.setstate(outside[0])
            numpy.random.set_state(outside[1])


@dataclass
class _Living:
    episode: Episode
    generators: OwnGenerators
    total: float = 0.0


class Player:
    """Plays episodes of one environment, in turns. Whatever one of them does wrong is a Failure of that one."""

    def __init__(self, environment: Environment):
        self.environment = environment
        self._living: dict[int, _Living] = {}

    def start(self, number: int, prompt: Prompt, seed: int) -> Start | Failure:
        """Open an episode under a number."""
        generators = OwnGenerators(seed)
        try:
            with generators.installed():
                episode = self.environment.open(prompt, seed)
                start = checked_start(episode.reset(), self.environment)
        except RAISED as error:
            return Failure.of(error)
        if isinstance(start, Start):
            self._living[number] = _Living(episode, generators)
        return start

    def step(self, number: int, action: Action) -> Step | Failure:
        """The answer to one turn; an episode that is over by it is closed."""
        if number not in self._living:
            return Failure(f"episode {number} is over")
        one = self._living[number]
        try:
            with one.generators.installed():
                found = one.episode.step(action)
            step = checked(found, self.environment, one.total)
        except RAISED as error:
            step = Failure.of(error)
        if isinstance(step, Step):
            one.total += total_of(step.reward)
        if isinstance(step, Failure) or step.over:
            self.end(number)
        return step

    def end(self, number: int) -> None:
        """Close an episode, if it lives. What its `close` raises changes nothing any more."""
        if one := self._living.pop(number, None):
            with suppress(*RAISED), one.generators.installed():
                one.episode.close()

    def close(self) -> None:
        """Close all episodes."""
        for number in list(self._living):
            self.end(number)
