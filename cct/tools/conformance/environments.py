"""Properties of environments: an episode follows from its prompt, seed and actions, and from nothing else."""

from __future__ import annotations

import math
import pickle
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from cct.environment import Action, Demonstration, Environment, EpisodePool, Start, Step
from cct.environment.checks import total_of
from cct.environment.player import Player
from cct.evidence import Failure
from cct.registry import RAISED, error_text
from cct.rollout import Prompt

from .base import Broken, Malformed, Property, hypothesis
from .watch import alone, later, restored, unchanged

PIECES = ("1", "a", " ", "\n", "[1 2]", "#", "é", "{", "</think>", "?")  # of actions, where no alphabet is known
Answer = Start | Step | Failure


@dataclass(frozen=True)
class Turns:
    """An episode in few words."""

    seed: int
    moves: tuple[tuple[int, ...] | None, ...]
    """Each turn as places in the alphabet; None for what the expert does there, where there is one."""

    def texts(self, environment: Environment, prompt: Prompt) -> list[str]:
        pieces = environment.alphabet or PIECES
        shown: list[str] = []
        if None in self.moves and "demonstrations" in environment.provides:
            with restored(), suppress(Broken):  # what is wrong with it, `expert` says
                shown = [text for text, _ in demonstrated(environment, prompt, self.seed).turns]
        expert = [*shown, *[pieces[0]] * len(self.moves)]
        return [
            expert[turn] if move is None else "".join(pieces[i % len(pieces)] for i in move)
            for turn, move in enumerate(self.moves)
        ]


def cases() -> Any:
    st = hypothesis().strategies
    move = st.one_of(st.none(), st.lists(st.integers(0, 19), max_size=3).map(tuple))
    return st.builds(Turns, st.integers(0, 99), st.lists(move, min_size=1, max_size=6).map(tuple))


def demonstrated(environment: Environment, prompt: Prompt, seed: int) -> Demonstration:
    try:
        return environment.demonstration(prompt, seed)
    except RAISED as error:
        raise Malformed(f"its demonstration raised {error_text(error)}") from error


def played(environment: Environment, prompt: Prompt, seed: int, texts: list[str]) -> list[Answer]:
    """The start and the answers to these turns, up to the one that ends the episode."""
    player = Player(environment)
    found: list[Answer] = [player.start(0, prompt, seed)]
    for text in texts:
        if isinstance(found[-1], Failure) or (isinstance(found[-1], Step) and found[-1].over):
            break
        found.append(player.step(0, Action(text, text)))
    player.close()
    return found


def same(expected: list[Answer], found: list[Answer], when: str) -> None:
    """Raises Broken where answers differ. Failures are the same where they say the same."""
    for turn, (one, other) in enumerate(zip(expected, found, strict=False)):
        if _plain(one) != _plain(other):
            raise Broken(f"{when}, turn {turn} is answered {_plain(other)} instead of {_plain(one)}")
    if len(expected) != len(found):
        raise Broken(f"{when}, the episode has {len(found) - 1} turns instead of {len(expected) - 1}")


def _plain(answer: Answer) -> Any:
    return answer.reason if isinstance(answer, Failure) else answer


# --- the properties -------------------------------------------------------------------------------
def determinism(environment: Environment, case: Turns) -> None:
    """Played, and again a day later with other global generators."""
    prompt = environment.example
    untouched, texts = deepcopy(prompt), case.texts(environment, prompt)
    with alone(0):
        first = played(environment, prompt, case.seed, texts)
    with later(), alone(1):
        second = played(environment, prompt, case.seed, texts)
    same(first, second, "played again, a day later")
    unchanged("prompt", untouched, prompt)


def form(environment: Environment, case: Turns) -> None:
    low, high = environment.bounds
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise Broken(f"its bounds are [{low}, {high}]; expected two finite numbers, the first the smaller")
    prompt = environment.example
    valid(environment, played(environment, prompt, case.seed, case.texts(environment, prompt)))


def valid(environment: Environment, answers: list[Answer]) -> None:
    total = 0.0
    for turn, answer in enumerate(answers):
        if isinstance(answer, Failure):
            raise Malformed(f"{'the start' if turn == 0 else f'turn {turn}'}: {answer.reason}")
        if isinstance(answer, Step):
            total += total_of(answer.reward)
    if problem := environment.outside(total):
        raise Broken(f"cut after {len(answers) - 1} turns, {problem}")


def odd(environment: Environment, case: None) -> None:
    """Turns that no player means to make."""
    for text in ("", " ", "\x00", "(" * 500, "9" * 5000, "\n\n", "</s>", "😀"):
        for finished in (True, False):
            player = Player(environment)
            player.start(0, environment.example, 0)
            answer = player.step(0, Action(text, text, finished))
            player.close()
            if isinstance(answer, Failure):
                raise Malformed(f"the turn {text[:20]!r} of {len(text)} characters: {answer.reason}")


def replay(environment: Environment, case: Turns) -> None:
    """Begun again at every turn."""
    prompt = environment.example
    texts = case.texts(environment, prompt)
    answers = played(environment, prompt, case.seed, texts)
    actions = [Action(text, text) for text in texts]
    with EpisodePool(environment.model_copy(update={"workers": 0})) as pool:
        again = pool.replay([(prompt, case.seed, actions[:turn]) for turn in range(len(answers))])
    same(answers, again, "begun again at each turn")


def neighbours(environment: Environment, case: Turns) -> None:
    """Played turn about with others of the same prompt and of another seed."""
    prompt = environment.example
    texts = case.texts(environment, prompt)
    expected = played(environment, prompt, case.seed, texts)
    player = Player(environment)
    found: list[Answer] = []
    for turn, text in enumerate(["", *texts][: len(expected)]):
        for number, seed in enumerate((case.seed + 1, case.seed, case.seed)):
            if number == 2 and turn > 0:
                continue  # one that waits at its start
            own = text if number else texts[-turn] if turn else ""
            answer = player.step(number, Action(own, own)) if turn else player.start(number, prompt, seed)
            if number == 1:
                found.append(answer)
    player.close()
    same(expected, found, "with other episodes played between its turns")


def remade(environment: Environment, case: Turns) -> None:
    """As a worker process does."""
    prompt = environment.example
    texts = case.texts(environment, prompt)
    knobs = {name: knob for name, knob in environment.model_dump(mode="json").items() if name != "use"}
    try:
        sent = pickle.loads(pickle.dumps(prompt))
        other = type(environment).model_validate(knobs)
    except Exception as error:
        raise Broken(f"its example prompt, or its knobs, cannot be sent to a worker: {error_text(error)}") from error
    expected = played(environment, prompt, case.seed, texts)
    same(expected, played(other, sent, case.seed, texts), "made again from its knobs")


def close(environment: Environment, case: Turns) -> None:
    episode = environment.open(environment.example, case.seed)
    with restored():
        try:
            episode.reset()
            episode.close()
            episode.close()
        except RAISED as error:
            raise Broken(f"closing an episode twice raised {error_text(error)}") from error


def expert(environment: Environment, case: Turns) -> None:
    prompt = environment.example
    with alone(case.seed):
        shown = demonstrated(environment, prompt, case.seed)
    texts = [text for text, _ in shown.turns]
    if not texts or any(not isinstance(text, str) for text in texts):
        raise Broken(f"its demonstration is {texts!r}; expected at least one action, each a text")
    observed = [shown.start, *(seen for _, seen in shown.turns if seen is not None)]
    strange = {*"".join(texts), *"".join(seen for seen in observed if isinstance(seen, str))} - {*environment.alphabet}
    if environment.alphabet and strange:
        raise Broken(f"its demonstration contains {sorted(strange)!r}, which its alphabet lacks")
    again = played(environment, prompt, case.seed, texts)
    if len(again) != len(texts) + 1 or (len(texts) < environment.max_turns and not _over(again[-1])):
        raise Broken(f"its demonstration of {len(texts)} turns does not end where the episode does")


def _over(answer: Answer) -> bool:
    return isinstance(answer, Step) and answer.over


ENVIRONMENT = [
    Property(
        "determinism",
        "prompt, seed and actions determine the episode; only Python's and numpy's random generators are used",
        determinism,
    ),
    Property("form", "every answer is usable, and the total reward is within its bounds", form),
    Property("odd", "it also answers empty, garbled and unfinished turns", odd, cases=0, waivable=True),
    Property("replay", "an episode replayed up to a turn continues in the same way", replay, cases=0.5),
    Property("neighbours", "an episode does not depend on episodes played between its turns", neighbours, cases=0.5),
    Property("remade", "recreated from its name and knobs, as in a worker, it plays the same episodes", remade, cases=0.5),
    Property("close", "an episode can be closed twice", close, cases=0.25),
    Property(
        "expert",
        "a demonstration uses only its alphabet, and ends with the episode",
        expert,
        cases=0.5,
        excused=lambda each: "" if "demonstrations" in each.provides else "it has no expert",
    ),
]


def show(environment: Environment, case: Turns) -> str:
    prompt = environment.example
    lines = [f"prompt, seed = {prompt!r}, {case.seed}", f"actions = {case.texts(environment, prompt)!r}"]
    return "\n".join(lines)
