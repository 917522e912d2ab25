"""The sampler: prompts in, judged responses out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.policy.generation import Completion, Engine, EngineError
from cct.recipe import Recipe
from cct.rollout import Prompt, Response, derive_seed

from .judge import Failures, judge
from .processes import Ranks
from .prompts import encode, fitting, training_prompts
from .stopped import TrainingStopped, attributed_to

State = tuple[int, tuple[int, ...]]  # the number of a prompt within the iteration, and the tokens emitted after it


@dataclass(frozen=True)
class Row:
    """A judged response."""

    prompt: Prompt
    prompt_tokens: tuple[int, ...]
    response: Response
    rewards: tuple[float, ...]
    """One per emitted token."""
    keep: bool
    """False where evidence raised under `on_error: drop`, all evidence abstained, or nothing was emitted."""
    group: int
    """Number of its prompt within the iteration."""
    iteration: int = 0
    """In which it was sampled; 0 and below are the critic's warm-up."""


@dataclass(frozen=True)
class Continuation:
    """A response continued from within, judged."""

    first: int
    """The token emitted first."""
    value: float
    """Return from there on."""


class Sampler:
    """Samples responses from a policy and judges them, on each process its share.

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
        self.failures = Failures()  # on all processes, since they were last counted
        self.overlong = 0  # prompts that were too long and had others in their place, since they were last counted
        self._engine, self._ranks = engine, ranks

    # --- the engine ---------------------------------------------------------------------------
    @property
    def engine(self) -> Engine:
        """Opened when it is first needed: the processes know each other, and weights are restored, by then."""
        if self._engine is None:
            try:
                self._engine = self.recipe.generation.open(self.actor, self.tokenizer)
            except EngineError as error:
                raise TrainingStopped(str(error)) from error
        return self._engine

    @property
    def ranks(self) -> Ranks:
        return self._ranks or Ranks.current()

    def sync(self) -> dict[str, float]:
        """Give the engine the actor's present weights. Returns metrics; raises TrainingStopped where they then differ."""
        try:
            return self.engine.sync()
        except EngineError as error:
            raise TrainingStopped(str(error)) from error

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    # --- from prompts to responses --------------------------------------------------------------
    def sample(self, iteration: int, on_stage: Callable[[str], None] = lambda stage: None) -> list[Row]:
        """`responses_per_prompt` judged responses to each prompt of an iteration, in the order of the prompts.

        on_stage: called with the name of what begins.
        """
        recipe, ranks, each = self.recipe, self.ranks, self.recipe.training.responses_per_prompt
        with attributed_to(f"task '{recipe.task.use}'", iteration):
            prompts, self.overlong = training_prompts(recipe, self.actor, self.tokenizer, iteration)
        numbers, tokens = ranks.share(len(prompts) * each), self.encode(prompts)
        on_stage("generate")
        seed = derive_seed(recipe.seed, "sample", iteration)
        seeds = [derive_seed(seed, number) for number in numbers]
        responses = self.respond([tokens[number // each] for number in numbers], seeds)
        on_stage("evidence")
        rewards, keep, failures = judge(recipe.evidence, [prompts[number // each] for number in numbers], responses, iteration)
        mine = [
            Row(prompts[number // each], tokens[number // each], response, tuple(reward), kept, number // each, iteration)
            for number, response, reward, kept in zip(numbers, responses, rewards, keep, strict=True)
        ]
        gathered, where = ranks.gather((mine, failures)), f"iteration {iteration}"
        rows = [row for part, _ in gathered for row in part]
        self._failed((failures for _, failures in gathered), len(rows), where)
        if not any(row.keep for row in rows):
            self.say(f"warning: {where}: all {len(rows)} responses were left out, so there is nothing to learn from")
        return rows

    def greedy_scores(self, prompts: Sequence[Prompt], iteration: int) -> list[float]:
        """The score of one greedy response to each prompt, NaN where it is not kept."""
        ranks = self.ranks
        mine = [prompts[number] for number in ranks.share(len(prompts))]
        rewards, keep, failures = judge(self.recipe.evidence, mine, self.respond(self.encode(mine), None), iteration)
        scores = [sum(reward) if kept else math.nan for reward, kept in zip(rewards, keep, strict=True)]
        gathered = ranks.gather((scores, failures))
        self._failed((part for _, part in gathered), len(prompts), f"iteration {iteration}, greedy responses")
        return [score for part, _ in gathered for score in part]

    def respond(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None) -> list[Response]:
        """One response per prompt (token ids), each from its own seed; greedy where seeds is None."""
        return [self._response(completion) for completion in self.engine.generate(prompts, seeds)]

    def _response(self, completion: Completion, prefix: tuple[int, ...] = ()) -> Response:
        tokens = (*prefix, *completion.tokens)
        text = self.recipe.policy.opened + str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
        return Response(text, tokens, completion.finished, () if prefix else completion.logprobs)

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
        ranks, room, of_group = self.ranks, self.recipe.generation.max_new_tokens, {row.group: row for row in rows}
        mine = [(number, *states[number // each]) for number in ranks.share(len(states) * each)]
        completions = self.engine.generate(
            [(*of_group[group].prompt_tokens, *prefix) for _, group, prefix in mine],
            [derive_seed(seed, number) for number, _, _ in mine],
            [room - len(prefix) for _, _, prefix in mine],
        )
        responses = [self._response(one, prefix) for (_, _, prefix), one in zip(mine, completions, strict=True)]
        prompts, iteration = [of_group[group].prompt for _, group, _ in mine], rows[0].iteration if rows else 0
        rewards, keep, failures = judge(self.recipe.evidence, prompts, responses, iteration)
        found = [
            Continuation(completion.tokens[0], sum(reward[len(prefix) :])) if kept and completion.tokens else None
            for (_, _, prefix), completion, reward, kept in zip(mine, completions, rewards, keep, strict=True)
        ]
        gathered = ranks.gather((found, sum(len(completion.tokens) for completion in completions), failures))
        every = [one for part, _, _ in gathered for one in part]
        of_state = [[one for one in every[n * each : (n + 1) * each] if one is not None] for n in range(len(states))]
        cost = {
            "branch/prefixes": float(len(states)),
            "branch/responses": float(len(every)),
            "branch/tokens": float(sum(tokens for _, tokens, _ in gathered)),
        }
        self._failed((part for _, _, part in gathered), len(every), f"iteration {iteration}, continuations")
        return of_state, cost

    def branch_values(
        self, rows: Sequence[Row], starts: Sequence[Sequence[int]], seed: int
    ) -> tuple[list[list[float]], dict[str, float]]:
        """Monte-Carlo values: the mean return of continuations of each row's response from each of its starts.

        Rows that share a prefix, as all of a prompt do at their first token, share its continuations. A prefix all of whose
        continuations were dropped by evidence takes the row's own return. Returns values as `starts`, and the cost.
        """
        prefixes = [[(row.group, row.response.tokens[:t]) for t in places] for row, places in zip(rows, starts, strict=True)]
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
        return counted
