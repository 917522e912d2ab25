"""The sampler: prompts in, judged responses out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.policy.sampling import Completion, Engine, EngineError
from cct.recipe import Recipe
from cct.rollout import Prompt, Response, derive_seed

from .judge import judge
from .ranks import Ranks
from .stopped import TrainingStopped, blamed_on

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
    """False where evidence raised under `on_error: drop`, or nothing was emitted."""
    group: int
    """Number of its prompt within the iteration."""


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
    ):
        self.recipe, self.actor, self.tokenizer = recipe, actor, tokenizer
        self.failures = Counter[str]()  # of evidence on all processes, since they were last counted
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
    def prompts(self, iteration: int) -> list[Prompt]:
        """The training prompts of an iteration."""
        with blamed_on(f"task '{self.recipe.task.use}'", iteration):
            return self.recipe.prompts(iteration, iteration)

    def sample(self, iteration: int, on_stage: Callable[[str], None] = lambda stage: None) -> list[Row]:
        """`responses_per_prompt` judged responses to each prompt of an iteration, in the order of the prompts.

        on_stage: called with the name of what begins.
        """
        prompts, each = self.prompts(iteration), self.recipe.training.responses_per_prompt
        ranks, seed = self.ranks, derive_seed(self.recipe.seed, "sample", iteration)
        numbers, tokens = ranks.share(len(prompts) * each), self.encode(prompts)
        on_stage("generate")
        seeds = [derive_seed(seed, number) for number in numbers]
        responses = self.respond([tokens[number // each] for number in numbers], seeds)
        on_stage("evidence")
        rewards, keep, errors = judge(self.recipe.evidence, [prompts[number // each] for number in numbers], responses)
        rows = [
            Row(prompts[number // each], tokens[number // each], response, tuple(reward), kept, number // each)
            for number, response, reward, kept in zip(numbers, responses, rewards, keep, strict=True)
        ]
        gathered = ranks.gather((rows, errors))
        self._count(errors for _, errors in gathered)
        return [row for part, _ in gathered for row in part]

    def greedy_scores(self, iteration: int) -> list[float]:
        """The score of one greedy response to each prompt of an iteration, NaN where it is not kept."""
        prompts, ranks = self.prompts(iteration), self.ranks
        mine = [prompts[number] for number in ranks.share(len(prompts))]
        rewards, keep, errors = judge(self.recipe.evidence, mine, self.respond(self.encode(mine), None))
        scores = [sum(reward) if kept else math.nan for reward, kept in zip(rewards, keep, strict=True)]
        gathered = ranks.gather((scores, errors))
        self._count(errors for _, errors in gathered)
        return [score for part, _ in gathered for score in part]

    def respond(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None) -> list[Response]:
        """One response per prompt (token ids), each from its own seed; greedy where seeds is None."""
        return [self._response(completion) for completion in self.engine.generate(prompts, seeds)]

    def _response(self, completion: Completion, prefix: tuple[int, ...] = ()) -> Response:
        tokens = (*prefix, *completion.tokens)
        text = str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
        return Response(text, tokens, completion.finished, () if prefix else completion.logprobs)

    def encode(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        """Token ids of the prompts. Raises TrainingStopped where the model has no positions for one and its response."""
        return encode(self.recipe, self.actor, self.tokenizer, prompts)

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
        rewards, keep, errors = judge(self.recipe.evidence, [of_group[group].prompt for _, group, _ in mine], responses)
        found = [
            Continuation(completion.tokens[0], sum(reward[len(prefix) :])) if kept else None
            for (_, _, prefix), completion, reward, kept in zip(mine, completions, rewards, keep, strict=True)
        ]
        gathered = ranks.gather((found, sum(len(completion.tokens) for completion in completions), errors))
        every = [one for part, _, _ in gathered for one in part]
        of_state = [[one for one in every[n * each : (n + 1) * each] if one is not None] for n in range(len(states))]
        cost = {
            "branch/prefixes": float(len(states)),
            "branch/responses": float(len(every)),
            "branch/tokens": float(sum(tokens for _, tokens, _ in gathered)),
        }
        self._count(errors for _, _, errors in gathered)
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

    def _count(self, failures: Iterable[Counter[str]]) -> None:
        for some in failures:
            self.failures += some

    def counts(self) -> dict[str, float]:
        """`evidence/KIND/NAME`: how often evidence failed since this was last called."""
        counted = {f"evidence/{name}": float(count) for name, count in self.failures.items()}
        self.failures.clear()
        return counted


def encode(recipe: Recipe, actor: PreTrainedModel, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Token ids of the prompts. Raises TrainingStopped where the model has no positions for one and its response."""
    tokens = [tuple(recipe.policy.encode(tokenizer, prompt.text)) for prompt in prompts]
    positions = getattr(actor.config.get_text_config(), "max_position_embeddings", None)
    room = recipe.generation.max_new_tokens
    for prompt, ids in zip(prompts, tokens, strict=True):
        if not ids:
            raise TrainingStopped(f"the prompt {prompt.text[:60]!r} has no tokens; leave it out of the task")
        if positions is not None and len(ids) + room > positions:
            raise TrainingStopped(
                f"the prompt {prompt.text[:60]!r} has {len(ids)} tokens; with generation.max_new_tokens ({room}) that is more "
                f"than the {positions} positions of the model. Leave it out of the task, or lower max_new_tokens"
            )
    return tokens
