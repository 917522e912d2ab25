"""Episodes: the policy and its environment take turns, all living episodes at once, until each is over.

What the policy sampled is never rendered again: an observation enters as the tokens that stand between two turns. Where the
chat template writes earlier turns otherwise than they were sampled, what it writes becomes the prompt of a new row of the
same episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.environment import Action, Environment, EpisodePool, Observation, Start, Step, opened
from cct.errors import TrainingStopped
from cct.evidence import Failure
from cct.policy.chat import Conversation
from cct.policy.generation import Completion, Engine
from cct.prompts import positions_of
from cct.recipe import Recipe
from cct.rollout import Prompt, Response, Turn, derive_seed

from .judge import Failures
from .processes import Ranks
from .rows import OBSERVED, Sampled, Span


@dataclass
class Past:
    """The beginning of an episode sampled earlier: whole turns, and the first tokens of the next one."""

    turns: list[Completion] = field(default_factory=list)
    prefix: tuple[int, ...] = ()

    @classmethod
    def of(cls, response: Response, count: int) -> Past:
        """The first `count` tokens that the policy emitted."""
        whole, end = list[Completion](), 0
        for turn in response.turns:
            if end + turn.tokens > count:
                break
            whole.append(Completion(response.tokens[end : end + turn.tokens], turn.finished))
            end += turn.tokens
        return cls(whole, response.tokens[end:count])


@dataclass
class Playing:
    """An unfinished episode."""

    number: int
    asked: Prompt
    chance: int
    seed: int | None  # of its sampling; None: greedy
    prompt: Prompt
    talk: Conversation
    spans: list[Span]
    state: str | None
    used: int = 0  # tokens of the budget
    turns: list[Turn] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)

    @property
    def context(self) -> list[int]:
        return [*self.spans[-1].prompt_tokens, *self.spans[-1].tokens]

    def sampled(self, finished: bool, keep: bool = True) -> Sampled:
        parts = self.completions
        tokens = tuple(token for part in parts for token in part.tokens)
        logprobs = tuple(x for part in parts for x in part.logprobs)
        text = self.turns[-1].text if self.turns else ""
        spans = [span for span in self.spans if any(turn >= 0 for turn in span.turns)] or self.spans[:1]
        response = Response(text, tokens, finished, logprobs, tuple(self.turns))
        return Sampled(self.prompt, response, spans, self.asked, self.chance, keep)


class Episodes:
    """Plays a recipe's environment. engine: created when it is first needed."""

    def __init__(
        self,
        recipe: Recipe,
        environment: Environment,
        actor: PreTrainedModel,
        tokenizer: Tokenizer,
        engine: Callable[[], Engine],
        ranks: Callable[[], Ranks] = Ranks.current,
    ):
        self.recipe, self.environment, self.tokenizer, self.engine = recipe, environment, tokenizer, engine
        self.ranks, self.shared = ranks, recipe.generation.processes_per_engine > 1
        self.limit = recipe.generation.limit(positions_of(actor))
        self.failures = Failures()  # since they were last counted
        self._pool: EpisodePool | None = None

    @property
    def pool(self) -> EpisodePool:
        """Opened when it is first needed; its workers live until `close`."""
        if self._pool is None:
            self._pool = EpisodePool(self.environment)
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def play(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int] | None,
        chances: Sequence[int],
        past: Sequence[Past] | None = None,
    ) -> list[Sampled]:
        """One episode per prompt. seeds: of sampling, None for greedy. chances: the environment's seeds.

        past: what of each was sampled before, which is played again and not sampled.
        """
        past = past or [Past() for _ in prompts]
        over: dict[int, Sampled] = {}
        starts = self.pool.start(list(zip(prompts, chances, strict=True)))
        living = []
        for number, (prompt, chance, start) in enumerate(zip(prompts, chances, starts, strict=True)):
            begun = self._begin(number, prompt, chance, None if seeds is None else seeds[number], start)
            if isinstance(begun, Sampled):
                over[number] = begun
            else:
                living.append(begun)
        k = 0
        while self._go_on(bool(living)):
            living, k = self._turn(living, past, over, k, greedy=seeds is None), k + 1
        self.pool.end(range(len(prompts)))  # those that a limit cut
        return [over[number] for number in range(len(prompts))]

    def _begin(self, number: int, asked: Prompt, chance: int, seed: int | None, start: Start | Failure) -> Playing | Sampled:
        span = Span((self.tokenizer.pad_token_id,))
        unplayed = Sampled(asked, Response("", (), True), [span], asked, chance, keep=False)
        if isinstance(start, Failure):
            self._fail(start, asked, 0)
            return unplayed
        prompt = opened(asked, start.observation)
        environment, rewrites = self.environment, self.environment.history == "template"
        try:
            talk = Conversation(self.recipe.policy, self.tokenizer, prompt.written, environment.tool_schemas, rewrites)
        except ValueError as error:
            raise TrainingStopped(str(error)) from error
        if not talk.ids:
            raise TrainingStopped(f"environment '{environment.use}': the prompt and the first observation are empty")
        playing = Playing(number, asked, chance, seed, prompt, talk, [Span(talk.ids)], start.state)
        if self.room(playing) < 1:
            if self.recipe.generation.overlong == "fail":
                raise TrainingStopped(
                    f"the prompt {prompt.text[:60]!r} with {len(talk.ids)} tokens leaves no room for an episode; set "
                    "generation.overlong to drop, or raise the model's or the engine's limit"
                )
            self.failures.add("overlong", "")
            return unplayed
        return playing

    def room(self, playing: Playing, observed: int = 0, context: int | None = None) -> int:
        """Tokens that the next turn may have, after so many more of an observation, behind a context of so many."""
        length = len(playing.context) if context is None else context
        rooms = [self.recipe.generation.max_new_tokens]
        rooms += [self.limit[0] - length] if self.limit else []
        rooms += [self.environment.max_tokens - playing.used - observed] if self.environment.max_tokens else []
        return min(rooms)

    def _go_on(self, living: bool) -> bool:
        """Whether a turn is taken: by all processes that share an engine, as long as one of them has a living episode."""
        return any(self.ranks().gather(living)) if self.shared else living

    def _turn(
        self, living: list[Playing], past: Sequence[Past], over: dict[int, Sampled], k: int, greedy: bool
    ) -> list[Playing]:
        """Every living episode takes turn k; those that are not over by it."""
        said = self._say(living, past, k, greedy)
        actions = [self._take(playing, completion, k) for playing, completion in zip(living, said, strict=True)]
        steps = self.pool.step([playing.number for playing in living], actions)
        going = []
        for playing, action, step in zip(living, actions, steps, strict=True):
            ended = self._answer(playing, action, step, k)
            if ended is None:
                going.append(playing)
            else:
                over[playing.number] = ended
        return going

    def _say(self, living: Sequence[Playing], past: Sequence[Past], k: int, greedy: bool) -> list[Completion]:
        """What each says in turn k: sampled, or as it was in its past."""
        said = {p.number: past[p.number].turns[k] for p in living if k < len(past[p.number].turns)}
        asked = [p for p in living if p.number not in said]
        if asked or self.shared:
            prefixes = [past[p.number].prefix if k == len(past[p.number].turns) else () for p in asked]
            found = self.engine().generate(
                [(*p.context, *prefix) for p, prefix in zip(asked, prefixes, strict=True)],
                None if greedy else [derive_seed(p.seed or 0, k) for p in asked],
                [self.room(p) - len(prefix) for p, prefix in zip(asked, prefixes, strict=True)],
            )
            for p, prefix, one in zip(asked, prefixes, found, strict=True):
                said[p.number] = Completion((*prefix, *one.tokens), one.finished, () if prefix else one.logprobs)
        return [said[p.number] for p in living]

    def _take(self, playing: Playing, completion: Completion, k: int) -> Action:
        """Add the turn to the episode; returns its action."""
        span = playing.spans[-1]
        span.tokens += completion.tokens
        span.turns += [k] * len(completion.tokens)
        playing.completions.append(completion)
        playing.used += len(completion.tokens)
        ended = completion.finished and completion.tokens[-1:] and completion.tokens[-1] in self.engine().ends
        text, raw = playing.talk.say(completion.tokens, bool(ended))
        playing.turns.append(Turn(text, len(completion.tokens), completion.finished, state=playing.state))
        return Action(text, raw, completion.finished)

    def _answer(self, playing: Playing, action: Action, step: Step | Failure, k: int) -> Sampled | None:
        """Process the environment's answer; returns the episode if it is over."""
        if isinstance(step, Failure):
            self._fail(step, playing.prompt, k + 1)
            return playing.sampled(True, keep=self.environment.on_error != "drop")
        rewards = step.reward if isinstance(step.reward, Mapping) else {"": step.reward}
        playing.turns[-1] = replace(playing.turns[-1], rewards={name: float(x) for name, x in rewards.items()})
        if step.done or step.truncated:
            return playing.sampled(step.done)
        assert step.observation is not None
        if k + 1 == self.environment.max_turns:
            return playing.sampled(False)
        playing.state = step.state
        try:
            there_is_room = self._observe(playing, step.observation)
        except ValueError as error:
            self._fail(Failure(str(error)), playing.prompt, k + 1)
            return playing.sampled(True, keep=self.environment.on_error != "drop")
        return None if there_is_room else playing.sampled(False)

    def _observe(self, playing: Playing, observation: Observation) -> bool:
        """The policy reads it: the tokens that the template adds, or a new row where it rewrites what stood there.

        Returns whether there is room for another turn; where not, nothing is read.
        """
        added, span = playing.talk.observe(observation), playing.spans[-1]
        text = observation if isinstance(observation, str) else "\n".join(message["content"] for message in observation)
        if not text:
            self.failures.add("empty", "")
        if added.refused:
            self.failures.add("unwritten", "")
        if self.room(playing, added.observed, len(added.ids) + (0 if added.anew else len(playing.context))) < 1:
            self.failures.add("out_of_room", "")
            return False
        playing.turns[-1] = replace(playing.turns[-1], observation=text)
        playing.used += added.observed
        if added.anew:
            playing.spans.append(Span(tuple(added.ids)))
        else:
            span.tokens += added.ids
            span.turns += [OBSERVED] * len(added.ids)
        return True

    def _fail(self, failure: Failure, prompt: Prompt, turn: int) -> None:
        """Raises TrainingStopped under `on_error: fail`; otherwise counts the failure."""
        environment = self.environment
        if environment.on_error == "fail":
            when = f"in turn {turn}" if turn else "at its start"
            did = "" if failure.timed_out else "failed: "
            reason = failure.reason.removeprefix(f"environment '{environment.use}': ")
            raise TrainingStopped(
                f"environment '{environment.use}' {did}{reason}, {when} (prompt {prompt.text[:60]!r} "
                f"{prompt.meta or ''}); `on_error: end` or `drop` would go on"
            ) from failure.cause
        self.failures.add("timeouts" if failure.timed_out else "errors", failure.reason)
