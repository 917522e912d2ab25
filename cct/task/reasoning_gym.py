"""Problems of the library reasoning-gym: a hundred kinds, made without end, each with a scorer of its own."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import fields
from functools import cached_property, lru_cache
from typing import Any

from pydantic import Field, JsonValue, field_validator, model_validator

from cct.registry import Knobs, did_you_mean, optional
from cct.rollout import Prompt, derive_seed

from .base import Task, tasks

# Problems made from one seed. Some kinds choose all their problems when they are made, so they are made in blocks.
BLOCK = 2048
# Coprime to BLOCK, so that a redrawn problem is not the next place's.
STRIDE = 97
# Draws for one place before it is clear that the kinds have next to no problem that is not held out.
TRIES = 1000


class Kind(Knobs):
    """One of reasoning-gym's data sets in a mixture."""

    name: str = Field(min_length=1)
    """Its name in reasoning-gym, such as chain_sum."""
    weight: float = Field(1.0, gt=0, le=1e6)
    """How often it comes up, relative to the others."""
    config: dict[str, JsonValue] = {}
    """Its own settings, which make it easier or harder; those left out keep reasoning-gym's defaults."""


@tasks.register("reasoning_gym")
class ReasoningGym(Task):
    """Any of reasoning-gym's data sets, or a weighted mixture; needs the extra `.[reasoning-gym]`."""

    name: str | None = None
    """The data set, unless `datasets` gives a mixture."""
    config: dict[str, JsonValue] = {}
    """Settings of that data set."""
    datasets: tuple[Kind, ...] = ()
    """A mixture: entries {name, weight, config}."""
    template: str = "{question}"
    """Text of the prompt around {question}; write a literal brace twice."""
    held_out_size: int = Field(200, ge=1, le=10_000)
    """Problems kept for evaluation and never trained on; fewer if the data sets have fewer."""
    noise: float = Field(0.0, ge=0, le=1)
    """How often the demonstrating expert stops one character before the end of its answer."""

    @field_validator("template")
    @classmethod
    def _holds_the_question(cls, template: str) -> str:
        try:
            if template.format(question="<<>>").count("<<>>") == 1:
                return template
        except (ValueError, KeyError, IndexError, AttributeError):
            pass
        raise ValueError("must hold {question} once and no other field; write a literal brace twice, {{}}")

    @model_validator(mode="after")
    def _one_form(self) -> ReasoningGym:
        if bool(self.name) == bool(self.datasets):
            raise ValueError("give either name, for one data set, or datasets, a list of {name, weight, config}")
        if self.config and not self.name:
            raise ValueError("config belongs to name; in a mixture, give each entry its config")
        return self

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return self.datasets or (Kind(name=self.name or "", config=self.config),)

    def ready(self) -> None:
        for kind in self.kinds:
            block(kind.name, json.dumps(kind.config), 0)

    def _draw(self, seed: int, index: int, attempt: int = 0) -> tuple[str, Prompt]:
        """(answer, prompt) of a place in a stream; later attempts go through the block, then to blocks of their own."""
        rng = random.Random(f"{seed}:{index}:{attempt}")
        number = rng.choices(range(len(self.kinds)), [kind.weight for kind in self.kinds])[0]
        kind = self.kinds[number]
        problems = block(kind.name, json.dumps(kind.config), derive_seed(seed, number, index // BLOCK, attempt // BLOCK))
        entry = problems[(index + attempt * STRIDE) % BLOCK]
        meta = {"dataset": kind.name, "config": kind.config, "entry": entry}
        return str(entry["answer"]), Prompt(self.template.format(question=entry["question"]), str(entry["answer"]), meta)

    @cached_property
    def _held_out(self) -> dict[str, Prompt]:
        seed, found = derive_seed("reasoning_gym held out"), dict[str, Prompt]()
        for index in range(self.held_out_size * 10):
            prompt = self._draw(seed, index)[1]
            found.setdefault(prompt.text, prompt)
            if len(found) == self.held_out_size:
                break
        return found

    def held_out(self) -> list[Prompt]:
        return list(self._held_out.values())

    def _stream(self, seed: int, start: int, count: int) -> Iterator[tuple[str, Prompt]]:
        for index in range(start, start + count):
            for attempt in range(TRIES):
                answer, prompt = self._draw(seed, index, attempt)
                if prompt.text not in self._held_out:
                    yield answer, prompt
                    break
            else:
                raise ValueError(
                    f"{TRIES} problems drawn in a row are held-out problems (there are {len(self._held_out)}): "
                    "lower task.held_out_size, or widen task.config"
                )

    def prompts(self, seed: int, start: int, count: int) -> list[Prompt]:
        return [prompt for _, prompt in self._stream(seed, start, count)]

    def demonstrations(self, seed: int, start: int, count: int) -> list[tuple[str, str]]:
        shown = []
        for index, (answer, prompt) in enumerate(self._stream(seed, start, count), start):
            early = random.Random(f"{seed}:{index}:noise").random() < self.noise
            shown.append((prompt.text, answer[:-1] if early else answer))
        return shown

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"demonstrations"})

    @property
    def alphabet(self) -> str:
        """Characters of the held-out problems and of as many others."""
        seen = [*self.held_out(), *self.prompts(0, 0, self.held_out_size)]
        return "".join(sorted({char for prompt in seen for char in prompt.text + prompt.answer}))


@lru_cache(maxsize=64)
def block(name: str, config: str, seed: int) -> Any:
    """One of reasoning-gym's data sets, BLOCK problems of it. Raises ValueError for a bad name or bad settings (JSON)."""
    factory = optional("reasoning_gym.factory", "reasoning-gym")
    optional("reasoning_gym", "reasoning-gym")  # registers all
    if name not in factory.DATASETS:
        raise ValueError(did_you_mean("reasoning-gym data set", name, factory.DATASETS))
    settings = json.loads(config)
    known = [field.name for field in fields(factory.DATASETS[name][1]) if field.name not in ("seed", "size")]
    for key in settings:
        if key in ("seed", "size"):
            raise ValueError(f"the setting '{key}' of '{name}' is set by cct: problems follow from the recipe's seed")
        if key not in known:
            raise ValueError(f"reasoning-gym's '{name}': {did_you_mean('setting', key, known)}")
    try:
        return factory.create_dataset(name, seed=seed, size=BLOCK, **settings)
    except Exception as error:  # its checks are assertions, and a setting of a wrong type fails anywhere
        raise ValueError(f"reasoning-gym's '{name}' refuses {settings}: {type(error).__name__}: {error}") from error
