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
from cct.policy.generation import Completion, Engine
from cct.policy.models import as_messages
from cct.prompts import positions_of
from cct.recipe import Recipe
from cct.rollout import Message, Prompt, Response, Turn, derive_seed

from .judge import Failures
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
    talk: list[Message]  # so far, by message
    text: str  # so far, as the policy read and wrote it
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
    ):
        self.recipe, self.environment, self.tokenizer, self.engine = recipe, environment, tokenizer, engine
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
        while living:
            living = self._turn(living, past, over)
        return [over[number] for number in range(len(prompts))]

    def _begin(self, number: int, asked: Prompt, chance: int, seed: int | None, start: Start | Failure) -> Playing | Sampled:
        span = Span((self.tokenizer.pad_token_id,))
        unplayed = Sampled(asked, Response("", (), True), [span], asked, chance, keep=False)
        if isinstance(start, Failure):
            self._fail(start, asked, 0)
            return unplayed
        prompt = opened(asked, start.observation)
        try:
            ids = tuple(self.recipe.policy.encode(self.tokenizer, prompt.written, self.environment.tool_schemas))
            text = self.recipe.policy.written(self.tokenizer, as_messages(prompt.written), self.environment.tool_schemas)
        except ValueError as error:
            raise TrainingStopped(str(error)) from error
        if not ids:
            raise TrainingStopped(f"environment '{self.environment.use}': the prompt and the first observation are empty")
        playing = Playing(
            number, asked, chance, seed, prompt, as_messages(prompt.written), text or "", [Span(ids)], start.state
        )
        if self.room(playing) < 1:
            if self.recipe.generation.overlong == "fail":
                raise TrainingStopped(
                    f"the prompt {prompt.text[:60]!r} with {len(ids)} tokens leaves no room for an episode; set "
                    "generation.overlong to drop, or raise the model's or the engine's limit"
                )
            self.failures.add("overlong", "")
            return unplayed
        return playing

    def room(self, playing: Playing) -> int:
        """Maximum number of tokens of the next turn."""
        rooms = [self.recipe.generation.max_new_tokens]
        rooms += [self.limit[0] - len(playing.context)] if self.limit else []
        rooms += [self.environment.max_tokens - playing.used] if self.environment.max_tokens else []
        return min(rooms)

    def _turn(self, living: list[Playing], past: Sequence[Past], over: dict[int, Sampled]) -> list[Playing]:
        """Every unfinished episode takes a turn; returns those that are still unfinished."""
        k = len(living[0].turns)
        said = self._say(living, past, k)
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

    def _say(self, living: Sequence[Playing], past: Sequence[Past], k: int) -> list[Completion]:
        """Each episode's text in turn k: sampled, or taken from its past."""
        said = {p.number: past[p.number].turns[k] for p in living if k < len(past[p.number].turns)}
        asked = [p for p in living if p.number not in said]
        if asked:
            prefixes = [past[p.number].prefix if k == len(past[p.number].turns) else () for p in asked]
            seeds = None if asked[0].seed is None else [derive_seed(p.seed or 0, k) for p in asked]
            found = self.engine().generate(
                [(*p.context, *prefix) for p, prefix in zip(asked, prefixes, strict=True)],
                seeds,
                [max(1, self.room(p) - len(prefix)) for p, prefix in zip(asked, prefixes, strict=True)],
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
        tokens = list(completion.tokens[:-1] if ended else completion.tokens)
        before = self.recipe.policy.opened
        raw = before + str(self.tokenizer.decode(tokens, skip_special_tokens=False))
        text = before + str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        playing.text += raw.removeprefix(before)
        playing.talk.append({"role": "assistant", "content": raw})
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
            self._observe(playing, step.observation)
        except ValueError as error:
            self._fail(Failure(str(error)), playing.prompt, k + 1)
            return playing.sampled(True, keep=self.environment.on_error != "drop")
        if self.room(playing) < 1:
            self.failures.add("out_of_room", "")
            return playing.sampled(False)
        return None

    def _observe(self, playing: Playing, observation: Observation) -> None:
        """What the policy reads next: the tokens that the template adds, or a new row where it rewrites what stood there."""
        policy, environment = self.recipe.policy, self.environment
        between = policy.between(self.tokenizer, playing.prompt.written, observation, environment.tool_schemas)
        messages = as_messages(observation)
        playing.talk += messages
        playing.turns[-1] = replace(playing.turns[-1], observation="\n".join(message["content"] for message in messages))
        playing.text += between
        if environment.history == "template":
            whole = policy.written(self.tokenizer, playing.talk, environment.tool_schemas)
            if whole is not None and "".join(whole.split()) != "".join(playing.text.split()):
                ids = self.tokenizer(whole, add_special_tokens=False)["input_ids"]
                playing.used += max(0, len(ids) - len(playing.context))
                playing.spans.append(Span(tuple(ids)))
                playing.text = whole
                return
        ids = self.tokenizer(between, add_special_tokens=False)["input_ids"] if between else []
        span = playing.spans[-1]
        if ids and span.tokens and ids[0] == span.tokens[-1]:
            ids = ids[1:]  # the end of the turn, which the policy emitted itself
        span.tokens += ids
        span.turns += [OBSERVED] * len(ids)
        playing.used += len(ids)

    def _fail(self, failure: Failure, prompt: Prompt, turn: int) -> None:
        """Raises TrainingStopped under `on_error: fail`; otherwise counts the failure."""
        environment = self.environment
        if environment.on_error == "fail":
            when = f"in turn {turn}" if turn else "at its start"
            did = "" if failure.timed_out else "failed: "
            raise TrainingStopped(
                f"environment '{environment.use}' {did}{failure.reason}, {when} (prompt {prompt.text[:60]!r} "
                f"{prompt.meta or ''}); with `on_error: end` or `drop` the run would continue"
            ) from failure.cause
        self.failures.add("timeouts" if failure.timed_out else "errors", failure.reason)
