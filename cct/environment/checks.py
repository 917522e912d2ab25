"""What an environment answered, as plain text, numbers and names; or a Failure that says what was found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cct.evidence.base import LARGEST, Failure, plain
from cct.registry import described

from .base import Environment, Observation, Start, Step


class Unusable(ValueError):
    """An answer that cannot be used; says what was found and what was expected."""


def checked_start(found: Any, environment: Environment) -> Start | Failure:
    """What `reset` returned, as a Start."""
    try:
        start = found if isinstance(found, Start) else Start(found)
        observed = () if _is_empty_list(start.observation) else _observation(start.observation, "reset")
        return Start(observed or "", _state(start.state, "reset"))
    except Unusable as error:
        return Failure(f"environment '{environment.use}': {error}")


def checked(found: Any, environment: Environment, total: float = 0.0) -> Step | Failure:
    """What `step` returned, in plain numbers and text. total: rewards of the episode's earlier steps."""
    try:
        if not isinstance(found, Step):
            raise Unusable(f"step returned {described(found)}; expected a cct.environment.Step")
        done, truncated = _flag(found.done, "done"), _flag(found.truncated, "truncated")
        reward = _reward(found.reward, environment.components)
        over, observation = done or truncated, None
        if not over and (found.observation is None or _is_empty_list(found.observation)):
            raise Unusable(
                f"step returned the observation {found.observation!r} but the episode is not over; expected text or messages, "
                "or done=True"
            )
        if not over:
            observation = _observation(found.observation, "step")
        elif problem := environment.outside(total + total_of(reward)):
            raise Unusable(problem)
        return Step(observation, reward, done, truncated, _state(found.state, "step"))
    except Unusable as error:
        return Failure(f"environment '{environment.use}': {error}")


def total_of(reward: float | Mapping[str, float]) -> float:
    """A step's reward as one number."""
    return math.fsum(reward.values()) if isinstance(reward, Mapping) else reward


def _is_empty_list(observation: Any) -> bool:
    return not isinstance(observation, str) and isinstance(observation, Sequence) and not observation


def _observation(found: Any, giver: str) -> Observation:
    if isinstance(found, str):
        return _text(found, f"{giver}: the observation")
    if not isinstance(found, Sequence):
        raise Unusable(f"{giver} returned the observation {described(found)}; expected text, or messages {{role, content}}")
    return tuple(_message(message, f"{giver}: message {number} of the observation") for number, message in enumerate(found, 1))


def _message(found: Any, where: str) -> dict[str, str]:
    if not isinstance(found, Mapping):
        raise Unusable(f"{where} is {described(found)}; expected a mapping with role and content")
    for key in ("role", "content"):
        if key not in found:
            raise Unusable(f"{where} has no {key}; its keys are {', '.join(map(repr, found)) or 'none'}")
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise Unusable(f"{where}: {key!r} is {described(value)}; expected text")
    return {key: _text(value, f"{where}: {key}") for key, value in found.items()}


def _text(found: str, where: str) -> str:
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise Unusable(f"{where} holds {found[error.start]!r}, which no UTF-8 text can") from None
    return found


def _reward(found: Any, components: Sequence[str]) -> float | dict[str, float]:
    if not isinstance(found, Mapping):
        return _number(found, "the reward")
    for name in found:
        if name not in components:
            raise Unusable(
                f"step returned a reward named {name!r}; its property `components` names {', '.join(components) or 'none'}"
            )
    return {name: _number(value, f"the reward '{name}'") for name, value in found.items()}


def _number(found: Any, what: str) -> float:
    try:
        number = plain(found)
    except ValueError:
        number = None
    if not isinstance(number, float):
        shown = repr(found)[:80] if isinstance(found, int | float) else described(found)
        raise Unusable(f"step returned {what} as {shown}; expected a finite number of at most {LARGEST:g} in size")
    return number


def _flag(found: Any, name: str) -> bool:
    if type(found).__name__ not in ("bool", "bool_"):  # numpy's own too
        raise Unusable(f"step returned {name} as {described(found)}; expected True or False")
    return bool(found)


def _state(found: Any, giver: str) -> str | None:
    if found is not None and not isinstance(found, str):
        raise Unusable(f"{giver} returned the state as {described(found)}; expected a name, or None")
    return found
