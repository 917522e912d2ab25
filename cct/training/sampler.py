"""The sampler: prompts in, judged responses out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.errors import attributed_to, of_engine
from cct.policy.generation import Completion, Engine
from cct.prompts import encode, fitting, training_prompts
from cct.recipe import Recipe
from cct.rollout import Prompt, Response, derive_seed

from .episodes import Episodes, Past
from .judge import Failures, Judged, apart, judged, without_contrast
from .metrics import refill_metrics
from .processes import Ranks
from .rows import Continuation, Row, Sampled, Samples, Span

# The number of a prompt within the iteration (with an environment, of an episode), and the tokens emitted after it.
State = tuple[int, tuple[int, ...]]


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
        self.recipe, self.actor, self.tokenizer, self.say = recipe, actor, tokenizer, say
        self.episodes: Episodes | None = None
        if recipe.environment is not None:
            environment = recipe.environment.fitted(tokenizer.chat_template)
            self.episodes = Episodes(recipe, environment, actor, tokenizer, lambda: self.engine, lambda: self.ranks)
        self.failures = Failures()  # on all processes, since they were last counted
        self.overlong = 0  # prompts that were too long and had others in their place, since they were last counted
        self.extra = 0  # prompts that refills have drawn: the task's stream is so much further on
        self._engine, self._ranks = engine, ranks

    # --- the engine ---------------------------------------------------------------------------
    @property
    def engine(self) -> Engine:
        """Opened when it is first needed: by then the processes are connected and the weights restored."""
        if self._engine is None:
            with of_engine():
                self._engine = self.recipe.generation.open(self.actor, self.tokenizer)
            self._engine.say = self.say
        return self._engine

    @property
    def ranks(self) -> Ranks:
        if self._ranks is None and self.recipe.generation.lag:
            self._ranks = Ranks.current().apart()
        return self._ranks or Ranks.current()

    def sync(self) -> dict[str, float]:
        """Give the engine the actor's current weights. Returns metrics; raises TrainingStopped if they then differ."""
        with of_engine():
            return self.engine.sync()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        if self.episodes is not None:
            self.episodes.close()

    # --- from prompts to responses --------------------------------------------------------------
    def sample(
        self, iteration: int, on_stage: Callable[[str], None] = lambda stage: None, version: int | None = None
    ) -> Samples:
        """`responses_per_prompt` judged responses to each prompt of an iteration.

        on_stage: called with the name of what begins. version: the iteration whose update made the engine's weights; None for
        the one before. Under `training.refill` every prompt of a round is sampled to its end before those without contrast
        are replaced, so none is preferred for being quick.
        """
        training, extra, where = self.recipe.training, self.extra, f"iteration {iteration}"
        version = max(0, iteration - 1) if version is None else version
        groups, rows_of, tokens = list(range(training.prompts_per_iteration)), dict[int, list[Row]](), 0
        replaced, failures = list[list[int]](), list[Failures]()
        while True:
            prompts, self.overlong = self.prompts(iteration, extra, replaced)
            found, flat, failed = self._round(iteration, len(replaced), prompts, groups, version, on_stage)
            rows_of |= {group: list(rows) for group, rows in groupby(found, key=lambda row: row.group)}
            failures += failed
            tokens += sum(len(row.emitted) for row in found)
            if not flat or iteration < 1 or len(replaced) == training.refill:
                break
            replaced.append(flat)
            groups, self.extra = flat, self.extra + len(flat)
        rows = [row for group in sorted(rows_of) for row in rows_of[group]]
        self._failed(failures, (len(rows_of) + self.extra - extra) * training.responses_per_prompt, where)
        if not any(row.keep for row in rows):
            self.say(f"warning: {where}: all {len(rows)} responses were left out, so there is nothing to learn from")
        of_refills = (
            refill_metrics(replaced, tokens, rows, len(flat) / len(rows_of)) if training.refill and iteration > 0 else {}
        )
        return Samples(iteration, rows, self.counts() | of_refills, extra, replaced)

    def prompts(self, iteration: int, extra: int, replaced: Sequence[Sequence[int]] = ()) -> tuple[list[Prompt], int]:
        """See `training_prompts`."""
        with attributed_to(f"task '{self.recipe.task.use}'", iteration):
            return training_prompts(self.recipe, self.actor, self.tokenizer, iteration, extra, replaced)

    def _round(
        self,
        iteration: int,
        refill: int,
        prompts: Sequence[Prompt],
        groups: Sequence[int],
        version: int,
        on_stage: Callable[[str], None],
    ) -> tuple[list[Row], list[int], list[Failures]]:
        """Judged rows of some groups, in their order; which of these have no contrast; what failed on each process."""
        recipe, ranks, each = self.recipe, self.ranks, self.recipe.training.responses_per_prompt
        numbers = [groups[number // each] * each + number % each for number in ranks.share(len(groups) * each)]
        on_stage("generate")
        seed = derive_seed(recipe.seed, "sample", iteration, *((refill,) if refill else ()))
        sampled = self.respond([prompts[number // each] for number in numbers], [derive_seed(seed, n) for n in numbers])
        on_stage("evidence")
        found = self._judge(sampled, iteration)
        said = [one.response for one in sampled]
        parts = apart(recipe.evidence, found.scored, said) if recipe.needs("components") else [{} for _ in said]
        mine = [
            row
            for number, one, reward, kept, part in zip(numbers, sampled, found.rewards, found.keep, parts, strict=True)
            for row in one.rows(reward, kept, number, number // each, iteration, version, part)
        ]
        totals = [x if kept and one.keep else None for x, kept, one in zip(found.totals, found.keep, sampled, strict=True)]
        gathered = ranks.gather((mine, totals, [found.failures]))
        rows, totals, failed = ([x for part in gathered for x in part[kind]] for kind in range(3))
        flat = without_contrast([group for group in groups for _ in range(each)], totals) if recipe.training.refill else []
        return rows, flat, failed

    def greedy_scores(self, prompts: Sequence[Prompt], iteration: int) -> list[float]:
        """The score of one greedy response to each prompt, NaN where it is not kept."""
        numbers = self.ranks.share(len(prompts))
        sampled = self.respond([prompts[number] for number in numbers], None, numbers)
        rewards, keep, failures, _ = self._judge(sampled, iteration)
        kept = [kept and one.keep for kept, one in zip(keep, sampled, strict=True)]
        scores = [sum(reward) if judged else math.nan for reward, judged in zip(rewards, kept, strict=True)]
        gathered = self.ranks.gather((scores, failures))
        self._failed((part for _, part in gathered), len(prompts), f"iteration {iteration}, greedy responses")
        return [score for part, _ in gathered for score in part]

    @of_engine()
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

    def _judge(self, sampled: Sequence[Sampled], iteration: int) -> Judged:
        return judged(self.recipe.evidence, [one.prompt for one in sampled], [one.response for one in sampled], iteration)

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
        rewards, keep, failures, _ = self._judge(sampled, iteration)
        found = [
            Continuation.of(one.response, reward, len(prefix))
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

    @of_engine()
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

        starts: of each row, numbers among the tokens that the policy emitted in it. Rows that share a prefix, as all of a
        prompt do at their first token, share its continuations. A prefix all of whose continuations were dropped by evidence
        takes the row's own return. Returns values as `starts`, and the cost.
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

    def counts(self, before: Mapping[str, float] | None = None) -> dict[str, float]:
        """`evidence/KIND/NAME`: how often evidence failed since this was last called; and prompts that were too long.

        before: what was counted earlier, to which this is added.
        """
        counted = {f"evidence/{name}": float(count) for name, count in self.failures.items()}
        if self.recipe.generation.overlong == "drop":
            counted["train/overlong"] = float(self.overlong)
        self.failures, self.overlong, before = Failures(), 0, before or {}
        counted |= self.environment_counts()
        return {**before, **{name: x + before.get(name, 0.0) for name, x in counted.items()}}

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
