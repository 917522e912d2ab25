"""The sampler: prompts in, judged responses out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.errors import TrainingStopped, attributed_to
from cct.policy.generation import Completion, Engine, EngineError
from cct.prompts import encode, fitting, training_prompts
from cct.recipe import Recipe
from cct.rollout import Prompt, Response, derive_seed

from .episodes import Episodes, Past
from .judge import Failures, apart, judge, score_all, weigh
from .processes import Ranks
from .rows import Row, Sampled, Span

# The number of a prompt within the iteration (with an environment, of an episode), and the tokens emitted after it.
State = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Continuation:
    """A response continued from within, judged."""

    said: tuple[int, ...]
    """What was emitted first: of an episode the rest of the turn, else one token."""
    value: float
    """Return from there on."""


def _first(response: Response, count: int) -> tuple[int, ...]:
    """What follows the first `count` tokens: of an episode the rest of the turn, else one token."""
    ends = accumulate(turn.tokens for turn in response.turns)
    return response.tokens[count : next((end for end in ends if end > count), count + 1)]


@contextmanager
def _stopping() -> Iterator[None]:
    """An engine's error stops the run."""
    try:
        yield
    except EngineError as error:
        raise TrainingStopped(str(error)) from error


class Sampler:
    """Samples responses from a policy and judges them; each process does its share.

    What is drawn depends on a seed and a response's number only: not on the processes, nor on the batch it is sampled in.
    """

    def __init__(
        self,
        recipe: Recipe,
        actor: PreTrainedModel,
        tokenizer: Tokenizer,
        engine: Engine | None = None,  # on the actor's weights, where one is open already
        ranks: Ranks | None = None,  # None: those there are when something is asked for
        say: Callable[[str], None] = lambda line: None,  # called with what a person should see
    ):
        self.recipe, self.actor, self.tokenizer = recipe, actor, tokenizer
        self.say = say
        self.episodes: Episodes | None = None
        if recipe.environment is not None:
            environment = recipe.environment.fitted(tokenizer.chat_template)
            self.episodes = Episodes(recipe, environment, actor, tokenizer, lambda: self.engine, lambda: self.ranks)
        self.failures = Failures()  # on all processes, since they were last counted
        self.overlong = 0  # prompts that were too long and had others in their place, since they were last counted
        self._engine, self._ranks = engine, ranks

    # --- the engine ---------------------------------------------------------------------------
    @property
    def engine(self) -> Engine:
        """Opened when it is first needed: by then the processes are connected and the weights restored."""
        if self._engine is None:
            with _stopping():
                self._engine = self.recipe.generation.open(self.actor, self.tokenizer)
            self._engine.say = self.say
        return self._engine

    @property
    def ranks(self) -> Ranks:
        return self._ranks or Ranks.current()

    def sync(self) -> dict[str, float]:
        """Give the engine the actor's current weights. Returns metrics; raises TrainingStopped if they then differ."""
        with _stopping():
            return self.engine.sync()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        if self.episodes is not None:
            self.episodes.close()

    # --- from prompts to responses --------------------------------------------------------------
    def sample(self, iteration: int, on_stage: Callable[[str], None] = lambda stage: None) -> list[Row]:
        """`responses_per_prompt` judged responses to each prompt of an iteration, in the order of the prompts.

        on_stage: called with the name of what begins.
        """
        recipe, ranks, each = self.recipe, self.ranks, self.recipe.training.responses_per_prompt
        with attributed_to(f"task '{recipe.task.use}'", iteration):
            prompts, self.overlong = training_prompts(recipe, self.actor, self.tokenizer, iteration)
        numbers = ranks.share(len(prompts) * each)
        on_stage("generate")
        seed = derive_seed(recipe.seed, "sample", iteration)
        sampled = self.respond([prompts[number // each] for number in numbers], [derive_seed(seed, n) for n in numbers])
        on_stage("evidence")
        responses, failures = [one.response for one in sampled], Failures()
        scored = score_all(recipe.evidence, [one.prompt for one in sampled], responses, failures, iteration)
        rewards, keep = weigh(recipe.evidence, scored, responses)
        parts = apart(recipe.evidence, scored, responses) if recipe.needs("components") else [{} for _ in sampled]
        mine = [
            row
            for number, one, reward, kept, part in zip(numbers, sampled, rewards, keep, parts, strict=True)
            for row in one.rows(reward, kept, number, number // each, iteration, part)
        ]
        gathered, where = ranks.gather((mine, failures)), f"iteration {iteration}"
        rows = [row for part, _ in gathered for row in part]
        self._failed((failures for _, failures in gathered), len(prompts) * each, where)
        if not any(row.keep for row in rows):
            self.say(f"warning: {where}: all {len(rows)} responses were left out, so there is nothing to learn from")
        return rows

    def greedy_scores(self, prompts: Sequence[Prompt], iteration: int) -> list[float]:
        """The score of one greedy response to each prompt, NaN where it is not kept."""
        ranks = self.ranks
        numbers = ranks.share(len(prompts))
        sampled = self.respond([prompts[number] for number in numbers], None, numbers)
        rewards, keep, failures = self._judge(sampled, iteration)
        kept = [kept and one.keep for kept, one in zip(keep, sampled, strict=True)]
        scores = [sum(reward) if judged else math.nan for reward, judged in zip(rewards, kept, strict=True)]
        gathered = ranks.gather((scores, failures))
        self._failed((part for _, part in gathered), len(prompts), f"iteration {iteration}, greedy responses")
        return [score for part, _ in gathered for score in part]

    @_stopping()
    def respond(
        self, prompts: Sequence[Prompt], seeds: Sequence[int] | None, numbers: Sequence[int] | None = None
    ) -> list[Sampled]:
        """One response per prompt, each from its own seed; greedy where seeds is None.

        With an environment an episode each, whose chance comes from the seed, and of a greedy one from its number.
        """
        if self.episodes is None:
            encoded = self.encode(prompts)
            found = zip(prompts, encoded, self.engine.generate(encoded, seeds), strict=True)
            return [self._alone(prompt, tokens, completion) for prompt, tokens, completion in found]
        own = [derive_seed(seed, "environment") for seed in seeds] if seeds is not None else None
        return self.episodes.play(
            prompts, seeds, own or [derive_seed("greedy episode", n) for n in numbers or range(len(prompts))]
        )

    def _alone(self, prompt: Prompt, tokens: tuple[int, ...], completion: Completion) -> Sampled:
        span = Span(tokens, list(completion.tokens), [0] * len(completion.tokens))
        return Sampled(prompt, self._response(completion), [span], prompt)

    def _response(self, completion: Completion, prefix: tuple[int, ...] = ()) -> Response:
        tokens = (*prefix, *completion.tokens)
        text = self.recipe.policy.opened + str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
        return Response(text, tokens, completion.finished, () if prefix else completion.logprobs)

    def _judge(self, sampled: Sequence[Sampled], iteration: int) -> tuple[list[list[float]], list[bool], Failures]:
        """Rewards per emitted token, whether to keep the response, and what failed."""
        return judge(self.recipe.evidence, [one.prompt for one in sampled], [one.response for one in sampled], iteration)

    def encode(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        """Token ids of the prompts. Raises TrainingStopped where there is no room for one and its response."""
        return encode(self.recipe, self.actor, self.tokenizer, prompts)

    def fitting(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts without those that are too long, under `generation.overlong: drop`; else all of them."""
        return fitting(self.recipe, self.actor, self.tokenizer, prompts)

    # --- from within responses ----------------------------------------------------------------
    def continue_from(
        self, rows: Sequence[Row], states: Sequence[State], each: int, seed: int
    ) -> tuple[list[list[Continuation]], dict[str, float]]:
        """`each` continuations of every state, without those that evidence dropped; the prompts are those of `rows`.

        A continuation may become as long as the response might have. Returns as well the metrics of what it cost.
        """
        ranks, of_key = self.ranks, {self.key(row): row for row in reversed(rows)}
        mine = [(number, *states[number // each]) for number in ranks.share(len(states) * each)]
        seeds = [derive_seed(seed, number) for number, _, _ in mine]
        iteration = rows[0].iteration if rows else 0
        sampled = self._continued([(of_key[key], prefix) for _, key, prefix in mine], seeds)
        rewards, keep, failures = self._judge(sampled, iteration)
        found = [
            Continuation(_first(one.response, len(prefix)), sum(reward[len(prefix) :]))
            if kept and one.keep and len(one.response.tokens) > len(prefix)
            else None
            for (_, _, prefix), one, reward, kept in zip(mine, sampled, rewards, keep, strict=True)
        ]
        new = sum(len(one.response.tokens) - len(prefix) for (_, _, prefix), one in zip(mine, sampled, strict=True))
        gathered = ranks.gather((found, new, failures))
        every = [one for part, _, _ in gathered for one in part]
        of_state = [[one for one in every[n * each : (n + 1) * each] if one is not None] for n in range(len(states))]
        cost = {
            "branch/prefixes": float(len(states)),
            "branch/responses": float(len(every)),
            "branch/tokens": float(sum(tokens for _, tokens, _ in gathered)),
        }
        self._failed((part for _, _, part in gathered), len(every), f"iteration {iteration}, continuations")
        return of_state, cost

    def key(self, row: Row) -> int:
        """A key that is equal for rows whose responses begin in the same state: their prompt, or with an environment their
        episode."""
        return row.group if self.episodes is None else row.episode

    @_stopping()
    def _continued(self, states: Sequence[tuple[Row, tuple[int, ...]]], seeds: Sequence[int]) -> list[Sampled]:
        """The response of each row, sampled again after its first tokens."""
        if self.episodes is None:
            room = self.recipe.generation.max_new_tokens
            completions = self.engine.generate(
                [(*row.prompt_tokens, *prefix) for row, prefix in states], seeds, [room - len(prefix) for _, prefix in states]
            )
            return [
                Sampled(row.prompt, self._response(one, prefix), [], row.prompt)
                for (row, prefix), one in zip(states, completions, strict=True)
            ]
        chances = [row.chance for row, _ in states]
        past = [Past.of(row.response, len(prefix)) for row, prefix in states]
        return self.episodes.play([row.asked or row.prompt for row, _ in states], seeds, chances, past)

    def branch_values(
        self, rows: Sequence[Row], starts: Sequence[Sequence[int]], seed: int
    ) -> tuple[list[list[float]], dict[str, float]]:
        """Monte-Carlo values: the mean return of continuations of each row's response from each of its starts.

        starts: of each row, numbers among the tokens that the policy emitted in it.

        Rows that share a prefix, as all of a prompt do at their first token, share its continuations. A prefix all of whose
        continuations were dropped by evidence takes the row's own return. Returns values as `starts`, and the cost.
        """
        prefixes = [
            [(self.key(row), row.response.tokens[: row.first + t]) for t in places]
            for row, places in zip(rows, starts, strict=True)
        ]
        distinct = list(dict.fromkeys(prefix for some in prefixes for prefix in some))
        found, cost = self.continue_from(rows, distinct, self.recipe.transport.branches, seed)
        mean = {state: sum(one.value for one in some) / len(some) for state, some in zip(distinct, found, strict=True) if some}
        values = [
            [mean.get(state, sum(row.rewards[len(state[1]) :])) for state in some]
            for row, some in zip(rows, prefixes, strict=True)
        ]
        return values, cost

    # --- what failed --------------------------------------------------------------------------
    def _failed(self, parts: Iterable[Failures], judged: int, where: str) -> None:
        failures = Failures.joined(parts)
        self.failures = Failures.joined([self.failures, failures])
        for line in failures.lines(judged, where):
            self.say(line)

    def counts(self) -> dict[str, float]:
        """`evidence/KIND/NAME`: how often evidence failed since this was last called; and prompts that were too long."""
        counted = {f"evidence/{name}": float(count) for name, count in self.failures.items()}
        if self.recipe.generation.overlong == "drop":
            counted["train/overlong"] = float(self.overlong)
        self.failures = Failures()
        return counted | self.environment_counts()

    def environment_counts(self) -> dict[str, float]:
        """`environment/KIND`: how often the environment failed, on all processes, since this was last called."""
        if self.episodes is None:
            return {}
        found, self.episodes.failures = Failures.joined(self.ranks.gather(self.episodes.failures)), Failures()
        name = self.episodes.environment.use
        for kind, reason in found.reasons.items():
            if reason:
                self.say(f"warning: environment '{name}' failed in {found[kind]} episodes ({kind}), first: {reason[:300]}")
        return {f"environment/{kind}": float(count) for kind, count in found.items()}
