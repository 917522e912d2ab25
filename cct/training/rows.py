"""What was sampled: responses and episodes, and the rows of a rollout that hold them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import accumulate

from pydantic import TypeAdapter

from cct.evidence import Evidence
from cct.rollout import Prompt, Response, Rollout

OBSERVED = -1  # the turn of a token that the policy did not emit


@dataclass
class Span:
    """What one row of a rollout holds of an episode: a prompt, and the tokens that follow it."""

    prompt_tokens: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    """Of each token the number of its turn, `OBSERVED` where the policy did not emit it."""


@dataclass
class Sampled:
    """A response with the rows that hold it: one without an environment, or several where history was rewritten."""

    prompt: Prompt
    """With what the environment opened with."""
    response: Response
    spans: list[Span]
    asked: Prompt
    """The task's."""
    chance: int = 0
    """The environment's seed."""
    keep: bool = True
    """False where the environment failed under `on_error: drop`, or the episode could not begin."""

    def rows(
        self,
        rewards: Sequence[float],
        keep: bool,
        number: int,
        group: int,
        iteration: int,
        version: int = 0,
        components: Mapping[str, Sequence[float]] | None = None,
    ) -> list[Row]:
        """As rows of a rollout, once it is judged. number: of the episode in its iteration. group: of its prompt. components:
        rewards by each evidence."""
        found, first = list[Row](), 0
        for order, span in enumerate(self.spans):
            row = Row(
                self.prompt,
                span.prompt_tokens,
                self.response,
                tuple(rewards),
                keep and self.keep,
                group,
                iteration,
                number,
                self.asked,
                self.chance,
                order,
                first,
                tuple(span.tokens),
                tuple(span.turns),
                version,
                {name: tuple(numbers) for name, numbers in (components or {}).items()},
            )
            first += len(row.emitted)
            found.append(row)
        return found


@dataclass(frozen=True)
class Row:
    """A judged response, or of an episode of several rows a part of it."""

    prompt: Prompt
    prompt_tokens: tuple[int, ...]
    response: Response
    """Of the whole episode."""
    rewards: tuple[float, ...]
    """One per emitted token, of the whole episode."""
    keep: bool
    """False where evidence raised under `on_error: drop`, all evidence abstained, or nothing was emitted."""
    group: int
    """Number of its prompt within the iteration."""
    iteration: int = 0
    """In which it was sampled; 0 and below are the critic's warm-up."""
    episode: int = 0
    """Number of the episode within the iteration."""
    asked: Prompt | None = None
    """The task's prompt, before an environment opened the episode."""
    chance: int = 0
    """The environment's seed."""
    order: int = 0
    """Place of the row in its episode."""
    first: int = 0
    """Of the tokens that the policy emitted in the episode, the number of the row's first."""
    tokens: tuple[int, ...] = ()
    """All that follow the prompt, observations included; where none are given, those of the response."""
    turns: tuple[int, ...] = ()
    """Of each of them its turn, `OBSERVED` where the policy did not emit it; where none are given, all are of turn 0."""
    version: int = 0
    """The iteration whose update made the policy that emitted it; 0 for the starting policy."""
    components: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Like the rewards, by each evidence, where a part asks for them."""

    def __post_init__(self) -> None:
        if not self.tokens:
            object.__setattr__(self, "tokens", self.response.tokens)
            object.__setattr__(self, "turns", (0,) * len(self.response.tokens))

    @cached_property
    def emitted(self) -> list[int]:
        """Places among its tokens of those that the policy emitted."""
        return [place for place, turn in enumerate(self.turns) if turn != OBSERVED]

    def number(self, place: int) -> int:
        """Of a token that the policy emitted, by its place in the row, its number among those of the episode."""
        return self.first + sum(turn != OBSERVED for turn in self.turns[:place])

    @property
    def own_rewards(self) -> tuple[float, ...]:
        """Of the tokens that the policy emitted in this row."""
        return self.of_row(self.rewards)

    def of_row(self, numbers: tuple[float, ...]) -> tuple[float, ...]:
        """Of one number per token that the policy emitted in the episode, those of this row."""
        return numbers[self.first : self.first + len(self.emitted)]

    @property
    def key(self) -> str:
        """The task's prompt and its answer, as a digest."""
        prompt = self.asked or self.prompt
        return sha256(repr((prompt.written, prompt.answer)).encode()).hexdigest()[:32]

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Of the tokens that the policy emitted in this row, as the engine drew them."""
        return self.of_row(self.response.logprobs)


def names(evidence: Sequence[Evidence]) -> list[str]:
    """Of each piece of evidence, its name in `Rollout.components`; of several with one name the place as well."""
    often = Counter(part.use for part in evidence)
    return [f"evidence/{part.use}" + f"/{n}" * (often[part.use] > 1) for n, part in enumerate(evidence)]


def with_components(rollout: Rollout, rows: Sequence[Row], evidence: Sequence[Evidence]) -> Rollout:
    """The rollout with the rewards of its rows by each evidence, and their weights."""
    import torch

    weights = {name: part.weight for name, part in zip(names(evidence), evidence, strict=True)}
    components = {name: torch.zeros(rollout.mask.shape) for name in weights}
    for name, of_rows in components.items():
        for number, row in enumerate(rows):
            of_rows[number, row.emitted] = torch.tensor(row.of_row(row.components[name]))
    found = {name: x.to(rollout.rewards.device) for name, x in components.items()}
    return rollout.replace(components=rollout.components | found, weights=weights)


def scores_by_prompt(rows: Sequence[Row], scores: Sequence[float], valid: Sequence[bool]) -> dict[str, list[float]]:
    """Scores of an iteration's episodes by the key of their prompt. scores, valid: of each row; dropped ones do not count."""
    episodes: dict[tuple[str, int], float] = {}
    for row, score, counts in zip(rows, scores, valid, strict=True):
        if counts:
            episodes[row.key, row.episode] = episodes.get((row.key, row.episode), 0.0) + score
    found: dict[str, list[float]] = {}
    for (key, _), score in episodes.items():
        found.setdefault(key, []).append(score)
    return found


@dataclass(frozen=True)
class Continuation:
    """A response continued from within, judged."""

    said: tuple[int, ...]
    """What was emitted first: of an episode the rest of the turn, else one token."""
    value: float
    """Return from there on."""

    @classmethod
    def of(cls, response: Response, rewards: Sequence[float], count: int) -> Continuation:
        """The whole response, which was continued after its first `count` tokens."""
        ends = accumulate(turn.tokens for turn in response.turns)
        said = response.tokens[count : next((end for end in ends if end > count), count + 1)]
        return cls(said, sum(rewards[count:]))


@dataclass(frozen=True)
class Samples:
    """What was sampled and judged for an iteration."""

    iteration: int
    rows: list[Row]
    """In the order of the prompts."""
    counts: dict[str, float]
    """Metrics: what failed, and how prompts were replaced."""
    extra: int = 0
    """Prompts that refills had drawn before."""
    replaced: list[list[int]] = field(default_factory=list)
    """Of each refill the groups whose prompts it replaced."""

    def as_json(self) -> str:
        """All but the `meta` of prompts, which may hold anything."""
        bare = [replace(row, prompt=_bare(row.prompt), asked=row.asked and _bare(row.asked)) for row in self.rows]
        return json.dumps(asdict(replace(self, rows=bare)))

    @classmethod
    def from_json(cls, text: str) -> Samples:
        return TypeAdapter(cls).validate_python(json.loads(text))

    def of(self, prompts: Sequence[Prompt]) -> Samples:
        """With the `meta` of the task's prompts, one of each group."""

        def known(row: Row) -> Row:
            meta = prompts[row.group].meta
            return replace(row, prompt=replace(row.prompt, meta=meta), asked=row.asked and replace(row.asked, meta=meta))

        return replace(self, rows=[known(row) for row in self.rows])


def _bare(prompt: Prompt) -> Prompt:
    return replace(prompt, meta={})


def episode_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Means over an iteration's episodes; empty without an environment."""
    episodes = [row for row in rows if row.order == 0]
    turns = [turn for row in episodes for turn in row.response.turns]
    if not turns:
        return {}
    of_rows: dict[str, float] = {
        "episode/turns": len(turns),
        "episode/observed": sum(len(row.tokens) - len(row.emitted) for row in rows),
        "episode/rows": len(rows),
        "episode/read_again": sum(len(row.prompt_tokens) for row in rows if row.order),
    }
    names = dict.fromkeys(name for turn in turns for name in turn.rewards if name)
    of_rows |= {f"episode/reward/{name}": sum(turn.rewards.get(name, 0.0) for turn in turns) for name in names}
    return {name: total / len(episodes) for name, total in of_rows.items()}
