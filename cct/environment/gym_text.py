"""Environments written as SkyRL-gym's BaseTextEnv: `init`, `step` and `close` over messages."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import Field, JsonValue, model_validator

from cct.evidence.base import in_order
from cct.registry import described, named_in_code

from .base import Action, Environment, Episode, Start, Step, environments
from .tools import ToolName

if TYPE_CHECKING:
    from cct.rollout import Message, Prompt


@environments.register("gym_text")
class GymText(Environment):
    """Your class, written for SkyRL-gym as a BaseTextEnv, without changes.

    It is made as SkyRL makes it, `MyEnv(env_config=..., extras=...)`: extras holds what the prompt's `meta` holds,
    `reward_spec` with the gold answer as `ground_truth`, and `max_turns`. `init(messages)` gets the prompt, and may return
    further messages after it. `postprocessed_action` is not read: what the policy sampled stays as it was.
    """

    env: ToolName
    """The class: `./mine.py:MyEnv`, with the file relative to the recipe, or `package.module:MyEnv`."""
    arguments: dict[str, JsonValue] = {}
    """The class receives this as env_config; entries can also be read as attributes."""
    low: float = Field(0.0, ge=-1e6, le=1e6)
    """Lowest total reward of an episode."""
    high: float = Field(1.0, ge=-1e6, le=1e6)
    """Highest total reward of an episode."""

    _bounded = model_validator(mode="after")(in_order)

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high

    @cached_property
    def made_by(self) -> Any:
        """The class. Raises ValueError where it is missing, or lacks `init` or `step`."""
        found = named_in_code(self.env)
        lacking = [name for name in ("init", "step") if not callable(getattr(found, name, None))]
        if not isinstance(found, type) or lacking:
            what = f"lacks {' and '.join(lacking)}" if isinstance(found, type) else described(found)
            raise ValueError(f"{self.env}: {what}; expected a class with init(prompt) and step(action)")
        return found

    def ready(self) -> None:
        _ = self.made_by

    def open(self, prompt: Prompt, seed: int) -> Episode:
        extras = {
            "reward_spec": {"method": "rule", "ground_truth": prompt.answer},
            **prompt.meta,
            "max_turns": self.max_turns,
        }
        return _Adapted(self.made_by(env_config=Config(self.arguments), extras=extras), prompt)


class Config(dict[str, Any]):
    """A mapping whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self:
            raise AttributeError(f"the environment's arguments hold no '{name}'; they are {', '.join(self) or 'none'}")
        return Config(self[name]) if isinstance(self[name], dict) else self[name]


class _Adapted(Episode):
    def __init__(self, env: Any, prompt: Prompt):
        self.env, self.prompt = env, prompt

    def reset(self) -> Start:
        asked: list[Message] = [dict(message) for message in self.prompt.messages]
        if self.prompt.text and not asked:
            asked = [{"role": "user", "content": self.prompt.text}]
        found = self.env.init([dict(message) for message in asked])
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(f"init returned {described(found)}; expected (messages, info)")
        messages = list(found[0])
        if messages[: len(asked)] != asked:
            raise ValueError(
                "init changed the messages of the prompt, but it may only add messages; put what it writes into the "
                "task's prompts, or let it write the whole prompt with task: seeds"
            )
        return Start(messages[len(asked) :])

    def step(self, action: Action) -> Step:
        found = self.env.step(action.text)
        if not isinstance(found, Mapping) or not {"observations", "reward", "done"} <= set(found):
            keys = f"the keys {', '.join(map(repr, found))}" if isinstance(found, Mapping) else described(found)
            raise ValueError(f"step returned {keys}; expected a mapping with observations, reward and done")
        return Step(None if found["done"] else found["observations"], found["reward"], found["done"])

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()
