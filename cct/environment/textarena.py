"""Games of the library textarena."""

from __future__ import annotations

import contextlib
import io
import json
import random
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from cct.evidence.base import in_order
from cct.registry import RAISED, did_you_mean, error_text, optional

from .base import Action, Environment, Episode, Start, Step, environments
from .player import OwnGenerators

if TYPE_CHECKING:
    from cct.rollout import Prompt


@environments.register("textarena")
class TextArena(Environment):
    """Any single-player game of the library textarena; needs the extra `.[textarena]`.

    `prompt.meta["seed"]` makes the level, which all episodes of a group share; what is drawn later differs between them.
    What the game says is the user's turn, and its reward comes with the last step.
    """

    game: str = Field(min_length=1, max_length=200)
    """The game's name in textarena, such as GuessTheNumber-v0."""
    max_turns: int = Field(50, ge=1, le=1000)
    """Maximum number of the policy's turns; a game's limit usually ends it earlier."""
    low: float = Field(-1.0, ge=-1e6, le=1e6)
    """Lowest reward that the game gives."""
    high: float = Field(1.0, ge=-1e6, le=1e6)
    """Highest reward that the game gives."""
    workers: int = Field(1, ge=0, le=256)
    """Worker processes that play games. With 0, the trainer's process plays them, and a game that hangs blocks the run."""

    _bounded = model_validator(mode="after")(in_order)

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high

    def ready(self) -> None:
        with OwnGenerators(0).installed():
            try:
                _Game(self.game, 0, 0).reset()
            except RAISED as error:
                if isinstance(error, ValueError) and error.args and str(error).startswith(("the library", "no textarena")):
                    raise
                raise ValueError(f"textarena's game '{self.game}' cannot be played: {why(error)}") from error

    def open(self, prompt: Prompt, seed: int) -> Episode:
        if not isinstance(prompt.meta.get("seed"), int):
            raise ValueError("textarena creates a level from prompt.meta['seed'], which is missing; set task: seeds")
        return _Game(self.game, prompt.meta["seed"], seed)


def why(error: BaseException) -> str:
    """What a user can do about an error of textarena's."""
    text = error_text(error)
    if isinstance(error, LookupError) and "NLTK" in str(error):
        corpus = str(error).partition("Resource ")[2].split(" ")[0].strip("'\x1b[93m0") or "words"
        return f"it needs a corpus that is not there: python -m nltk.downloader {corpus}"
    if "number of players" in text.lower():
        return f"it is for several players ({text})"
    return text


class _Game(Episode):
    def __init__(self, game: str, level: int, chance: int):
        self.chance, self.level = chance, level
        textarena = optional("textarena", "textarena")
        known = textarena.envs.registration.ENV_REGISTRY
        if f"{game}-raw" not in known:
            names = [name.removesuffix("-raw") for name in known if name.endswith("-raw")]
            raise ValueError(did_you_mean("textarena game", game, names))
        self.own = textarena.ObservationType.PLAYER_ACTION
        with contextlib.redirect_stdout(io.StringIO()):  # some games print
            self.game: Any = textarena.make(f"{game}-raw")

    def reset(self) -> Start:
        with contextlib.redirect_stdout(io.StringIO()):
            self.game.reset(num_players=1, seed=self.level)
        random.seed(self.chance)
        observed = self._observe()
        return Start(observed, self._state(observed))

    def step(self, action: Action) -> Step:
        done, _ = self.game.step(action.text)
        if done:
            rewards, _ = self.game.close()
            return Step(reward=float((rewards or {}).get(0, 0.0)), done=True)
        observed = self._observe()
        return Step(observed, state=self._state(observed))

    def _observe(self) -> str:
        """What was said since the last turn, the player's own words left out."""
        _, messages = self.game.get_observation()
        return "\n".join(text.strip() for _, text, kind in messages if kind is not self.own)

    def _state(self, observed: str) -> str | None:
        """A digest of the game's state and of what is seen of it; None where the state is not plain data."""
        try:
            state = json.dumps(self.game.state.game_state, sort_keys=True, default=_plain)
        except (TypeError, ValueError, AttributeError):
            return None
        return sha256(f"{state}\n{observed}".encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """A numpy array or a set as a list. Raises TypeError for anything else."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    raise TypeError(type(value).__name__)
