"""The Generation axis: knobs, and the engine that they open. A new engine is one file: its knobs and its `Engine`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cct.registry import Component, Registry
from cct.system.terminal import say

from .base import end_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer


class Generation(Component):
    """An engine that samples responses from the current policy."""

    max_new_tokens: int = Field(64, ge=1, le=131_072)
    """Length limit of a response, in tokens."""
    temperature: float = Field(1.0, gt=0, le=10)
    """Sampling temperature; the trainer's log-probabilities use the same one. Evaluation is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this much probability; a value below 1 needs `geometry.correction`."""
    top_k: int = Field(0, ge=0)
    """Sample from this many of the likeliest tokens; 0 for all. Any other value needs `geometry.correction`."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, as an end token does; they remain part of it."""
    overlong: Literal["fail", "drop"] = "fail"
    """What to do with prompts that leave no room for `max_new_tokens` in the model's positions or the engine's `max_length`.
    fail: refuse them before the run. drop: leave them out, and replace them in training. Both report how many."""
    batch_size: int = Field(256, ge=1)
    """Sequences decoded at once."""
    lag: Literal[0, 1] = 0
    """Updates between the weights that sample a response and those that learn from it. 0: an iteration is sampled from the
    policy that it updates. 1: while an iteration updates the policy, the next one is sampled from the weights before this
    update. That needs an importance correction: `geometry.correction`, `ratio_to: engine`, or a transport that has one."""

    @property
    def provides(self) -> frozenset[str]:
        """`greedy`: the greedy response to each prompt of a round, where a part needs it."""
        return frozenset({"greedy"})

    def limit(self, positions: int | None) -> tuple[int, str] | None:
        """Tokens of a prompt with its response at most, and whose limit it is; None for no limit. positions: the model's."""
        return None if positions is None else (positions, f"the {positions} positions of the model")

    @property
    def elsewhere(self) -> bool:
        """Whether it takes no memory of the devices that are trained on."""
        return False

    @property
    def one_machine(self) -> bool:
        """Whether all processes must be on one machine."""
        return False

    @property
    def truncates(self) -> bool:
        """Whether tokens are left out of the distribution that is sampled from."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def processes_per_engine(self) -> int:
        """Processes that share one engine."""
        return 1

    def open(self, actor: PreTrainedModel, tokenizer: Tokenizer) -> Engine:
        """The engine, started on the actor's weights. Raises EngineError where it cannot be."""
        raise NotImplementedError


class EngineError(RuntimeError):
    """An engine that cannot start, or whose weights are not the trainer's."""


@dataclass(frozen=True)
class Completion:
    """One continuation."""

    tokens: tuple[int, ...]
    """Emitted ids; the end token, or the token that completes a stop string, is the last where there is one."""
    finished: bool
    """Ended by itself rather than at the length limit (the engine's `finish_reason`)."""
    logprobs: tuple[float, ...] = ()
    """Per token, of the distribution that it was drawn from: temperature, top-k and top-p applied. Empty where greedy."""


class Engine:
    """An engine on an actor's weights.

    One whose weights are a copy of the actor's takes them over in `sync`. All processes call every method together.
    """

    say: Callable[[str], None] = staticmethod(partial(say, file=sys.stderr))
    """Called with what a person should see while it goes on."""

    def __init__(self, knobs: Generation, actor: PreTrainedModel, tokenizer: Tokenizer):
        self.knobs, self.actor, self.tokenizer = knobs, actor, tokenizer
        self.ends = list(end_tokens(actor, tokenizer))

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None, limits: Sequence[int] | None = None
    ) -> list[Completion]:
        """One completion per prompt (token ids), each sampled from its own seed; greedy where seeds is None.

        limits: the length limit of each, in tokens, where it is not `max_new_tokens`.
        """
        raise NotImplementedError

    def sync(self) -> dict[str, float]:
        """The actor's weights have changed. Returns metrics; raises EngineError where the engine's differ after it."""
        return {}

    def rest(self) -> None:
        """Nothing will be generated until the next `generate`; memory may be given back."""

    def close(self) -> None:
        """The engine is no longer needed."""


# Another engine samples the same: what all of them share stays.
engines: Registry[Generation] = Registry("generation", Generation, keeps_shared=True)
