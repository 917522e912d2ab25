"""The Environment axis: it answers the policy turn by turn, and rewards it. Without one, an episode is a single response."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from cct.evidence.base import can_end_workers
from cct.registry import Component, Registry
from cct.rollout import as_messages

if TYPE_CHECKING:
    from cct.rollout import Message, Prompt


# What the policy reads next: a text, which the chat template writes as a user's turn, or messages {role, content}.
Observation = str | Sequence["Message"]


@dataclass(frozen=True)
class Action:
    """The policy's text in one turn."""

    text: str
    """Decoded without special tokens."""
    raw: str = ""
    """Decoded with them, without the token that ended the turn: tool calls may be marked by special tokens."""
    finished: bool = True
    """The policy ended the turn; False if the length limit cut it."""


@dataclass(frozen=True)
class Step:
    """The environment's answer to an action."""

    observation: Observation | None = None
    """What the policy reads next. Needed unless the episode ends here."""
    reward: float | Mapping[str, float] = 0.0
    """Reward of this turn; a mapping of named components counts as their sum."""
    done: bool = False
    """The episode ends with this turn, by the rules."""
    truncated: bool = False
    """The episode ends because of a limit that is not part of its rules; its last state still has a value."""
    state: str | None = None
    """Name of the state in which the next turn begins; turns that begin in the same state can be compared. None: unknown."""

    @property
    def over(self) -> bool:
        """No turn follows."""
        return self.done or self.truncated


@dataclass(frozen=True)
class Start:
    """How an episode begins."""

    observation: Observation = ""
    """Follows the task's prompt, or is the whole prompt if that has no text."""
    state: str | None = None
    """Name of the state in which the first turn begins."""


class Episode:
    """One episode. The same prompt, seed and actions must always give the same episode.

    cct replays an episode from its start to return to an earlier turn, or after a worker process died. `random` is seeded
    separately for each episode, however many are played at once.
    """

    def reset(self) -> Start | Observation:
        """The beginning. Called once, before any step."""
        raise NotImplementedError

    def step(self, action: Action) -> Step:
        """The answer to the policy's turn. Not called again after a done or truncated step."""
        raise NotImplementedError

    def close(self) -> None:
        """The episode is over."""


class Environment(Component):
    """Turns a prompt into an episode of several turns."""

    max_turns: int = Field(8, ge=1, le=1000)
    """Maximum number of the policy's turns; an episode that is not done by then is truncated."""
    max_tokens: int | None = Field(None, ge=1, le=10_000_000)
    """Maximum number of tokens of an episode, including observations but not the prompt. Null: as many as the model takes."""
    history: Literal["template", "sampled"] = "template"
    """What the policy sees of earlier turns if the chat template rewrites them, for example without their thinking. template:
    the rewritten text, in a new row of the same episode. sampled: the tokens as they were sampled."""
    on_error: Literal["fail", "end", "drop"] = "fail"
    """If a step raises, takes too long or returns something unusable: stop the run, end the episode with the rewards it has, or
    leave it out of the update."""
    workers: int = Field(0, ge=0, le=256)
    """Worker processes that play episodes. With 0, the trainer's process plays them, and an environment that hangs blocks the
    run."""
    time_limit: float | None = Field(None, gt=0, le=86400)
    """Time limit of a step in seconds; a worker that exceeds it is ended and replaced. Null: no limit. Needs workers."""

    _has_someone_to_end = model_validator(mode="after")(can_end_workers)

    def open(self, prompt: Prompt, seed: int) -> Episode:
        """A new episode. seed: for its randomness; whatever all episodes of a prompt share must come from the prompt."""
        raise NotImplementedError

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the rewards of a step; empty if a step's reward is one number."""
        return ()

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest total reward of an episode."""
        return 0.0, 1.0

    @property
    def tool_schemas(self) -> Sequence[dict[str, Any]]:
        """JSON schemas of the tools that the chat template lists."""
        return ()

    def fitted(self, chat_template: str | None) -> Environment:
        """This environment for a policy with this chat template; by default the same for all."""
        return self

    @property
    def example(self) -> Prompt:
        """A prompt from which it can open an episode, for the conformance suite."""
        from cct.rollout import Prompt

        return Prompt("3+4=", "7", {"seed": 0})

    def outside(self, total: float) -> str | None:
        """The error if the total reward of an episode is outside `bounds` by more than rounding; otherwise None."""
        low, high = self.bounds
        slack = 1e-6 * max(1.0, abs(low), abs(high))
        if low - slack <= total <= high + slack:
            return None
        return f"the episode's rewards add up to {total:g}, outside the environment's bounds [{low:g}, {high:g}]"

    @property
    def alphabet(self) -> str:
        """Characters of observations and of the expert's actions, for a character tokenizer."""
        return ""

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"environment"})

    def expert(self, prompt: Prompt, seen: Sequence[Observation], said: Sequence[str], rng: random.Random) -> str:
        """The expert's action for a warm start, given the observations and its earlier actions. Environments with an expert
        provide `demonstrations`."""
        raise NotImplementedError(f"environment '{self.use}' has no expert to start from")

    def demonstration(self, prompt: Prompt, seed: int) -> Demonstration:
        """An episode played by the expert."""
        rng, episode = random.Random(seed), self.open(prompt, seed)
        start = started(episode.reset())
        seen, said, turns = [start.observation], list[str](), []
        for _ in range(self.max_turns):
            text = self.expert(prompt, seen, said, rng)
            step = episode.step(Action(text, text))
            turns.append((text, None if step.over else step.observation))
            if step.over:
                break
            assert step.observation is not None
            seen.append(step.observation)
            said.append(text)
        return Demonstration(start.observation, turns)


@dataclass(frozen=True)
class Demonstration:
    """An episode played by the expert, turn by turn."""

    start: Observation
    turns: list[tuple[str, Observation | None]] = field(default_factory=list)
    """Each action, and what was observed after it; None after the last."""


def opened(prompt: Prompt, observation: Observation) -> Prompt:
    """The prompt with what the environment opens with: a text follows its text, messages its messages."""
    if not observation:
        return prompt
    if not prompt.text and not prompt.messages:
        if isinstance(observation, str):
            return replace(prompt, text=observation)
        return replace(prompt, text=observation[-1]["content"], messages=tuple(observation))
    if isinstance(observation, str) and not prompt.messages:
        return replace(prompt, text=f"{prompt.text}{observation}")
    return replace(prompt, messages=(*as_messages(prompt.written), *as_messages(observation)))


def started(found: Start | Observation) -> Start:
    """What `reset` returned, as a Start."""
    return found if isinstance(found, Start) else Start(found)


environments: Registry[Environment] = Registry("environment", Environment)
