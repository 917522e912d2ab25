"""`cct replay`: the stored rollouts of a run under other transports, and how their credit differs from the run's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from cct.loading import read_transports
from cct.recipe import Recipe, RecipeError
from cct.rollout import Credit, Rollout
from cct.run_folder import RunFolder
from cct.system.terminal import make_console
from cct.transport import Transport
from cct.transport.functional import join

PARTS = 5  # of a response or an episode, for where the mass lies
WIDTH = 100  # of the table, where the terminal does not say


@dataclass
class Sums:
    """Over trainable tokens, of the run's own advantages x and another transport's y."""

    responses: int = 0
    tokens: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0
    same_sign: int = 0
    size: float = 0.0
    parts: Tensor = field(default_factory=lambda: torch.zeros(PARTS, dtype=torch.float64))

    def add(self, own: Tensor, other: Tensor, mask: Tensor, part: Tensor | None = None) -> None:
        """part: [B, T] in which of the PARTS each token is; by default a fifth of its row's."""
        x, y = own[mask].double(), other[mask].double()
        self.responses += int(mask.any(1).sum())
        self.tokens += len(x)
        self.x, self.y = self.x + float(x.sum()), self.y + float(y.sum())
        self.xx, self.yy, self.xy = self.xx + float(x @ x), self.yy + float(y @ y), self.xy + float(x @ y)
        self.same_sign += int((x.sign() == y.sign()).sum())
        self.size += float(y.abs().sum())
        self.parts.index_add_(0, (fifths(mask) if part is None else part)[mask], y.abs())

    @property
    def correlation(self) -> float | None:
        """Pearson's; None where one of the two does not vary."""
        if not self.tokens:
            return None
        spread = [total - mean**2 / self.tokens for total, mean in ((self.xx, self.x), (self.yy, self.y))]
        if min(spread) <= 1e-12 * max(self.xx, self.yy, 1e-300):
            return None
        return (self.xy - self.x * self.y / self.tokens) / (spread[0] * spread[1]) ** 0.5


def fifths(mask: Tensor) -> Tensor:
    """Of each masked token, in which fifth of its row's it is. mask: bool [B, T]; [B, T] int, 0 to 4."""
    return (mask.long().cumsum(1) - 1) * PARTS // mask.sum(1, keepdim=True).clamp(min=1)


def parts_of_episodes(turns: Tensor, most: int) -> Tensor:
    """Of each token, its turn where an episode has at most five, else in which fifth of its episode's turns that is.

    turns: [E, T] int, the number of the token's turn, negative where it is observed. most: turns that an episode may have.
    """
    return turns.clamp(max=most - 1) if most <= PARTS else turns * PARTS // (turns.amax(1, keepdim=True) + 1).clamp(min=1)


@dataclass(frozen=True)
class Replay:
    """A run's stored rollouts, and the transports to try on them, the run's own first."""

    folder: RunFolder
    recipe: Recipe
    transports: dict[str, Transport]

    @classmethod
    def of(cls, folder: Path, written: Sequence[str], plugins: Sequence[str] = (), *, trust: bool = False) -> Replay:
        """trust: run plug-ins of the recipe without a recorded SHA-256.

        Raises RecipeError where the run has no rollouts, or a transport is none.
        """
        run = RunFolder(folder)
        recipe = run.load_recipe(trust=trust)
        if not run.rollouts:
            raise RecipeError(
                f"{folder}: no rollouts were stored (logging.rollouts is {recipe.logging.rollouts}, rollouts_mb "
                f"{recipe.logging.rollouts_mb:g}); a run with --set logging.rollouts=always keeps all"
            )
        return cls(run, recipe, read_transports(recipe, written, plugins))

    def credit(self, iteration: int, rollout: Rollout) -> dict[str, Credit]:
        """Of a stored rollout, by transport. Raises RecipeError where it lacks what a transport reads."""
        return {name: _credit(part, name, rollout, self.recipe, iteration) for name, part in self.transports.items()}

    @property
    def turns(self) -> int:
        """That an episode may have; 1 without an environment."""
        return 1 if self.recipe.environment is None else self.recipe.environment.max_turns

    @property
    def parts(self) -> list[str]:
        """Names of the parts in which the mass is looked for."""
        if 1 < self.turns <= PARTS:
            return [f"turn {k + 1}" for k in range(self.turns)]
        return [f"{100 * i // PARTS}-{100 * (i + 1) // PARTS}%" for i in range(PARTS)]

    def compare(self) -> dict[str, Sums]:
        """By transport, the run's own first, how its credit compares over all stored iterations; an episode counts once."""
        sums = {name: Sums() for name in self.transports}
        for number in self.folder.rollouts:
            rollout = self.folder.rollout(number)
            joined, split = join(rollout)
            part = None if joined.turns is None or self.turns == 1 else parts_of_episodes(joined.turns, self.turns)
            advantages = {
                name: credit.advantages if split is None else split.join(credit.advantages)
                for name, credit in self.credit(number, rollout).items()
            }
            own = next(iter(advantages.values()))
            for name, other in advantages.items():
                sums[name].add(own, other, joined.mask, part)
        return sums


def compare(
    folder: Path, written: Sequence[str], plugins: Sequence[str] = (), *, trust: bool = False
) -> tuple[list[int], dict[str, Sums]]:
    """The iterations that are stored, and for each transport, the run's own first, how its credit compares.

    Raises RecipeError where the run has no rollouts, or where they lack what a transport reads.
    """
    replay = Replay.of(folder, written, plugins, trust=trust)
    return list(replay.folder.rollouts), replay.compare()


def _credit(transport: Transport, name: str, rollout: Rollout, recipe: Recipe, iteration: int) -> Credit:
    where = f"transport {name}"
    if "values" in transport.needs and rollout.values is None:
        raise RecipeError(f"{where} needs values, and the run had no critic, so its rollouts hold none")
    if "reference" in transport.needs and rollout.reference_logprobs is None:
        raise RecipeError(f"{where} needs the reference's log-probabilities, which the run did not store")
    if "teacher" in transport.needs and rollout.teacher_logprobs is None:
        raise RecipeError(f"{where} needs the teacher's log-probabilities, and the run had no teacher")
    if "history" in transport.needs and rollout.prompt_values is None:
        raise RecipeError(f"{where} needs values of prompts over iterations, which the run did not track")
    if "components" in transport.needs and not rollout.weights:
        raise RecipeError(f"{where} needs the rewards of each evidence, which the run did not store; `gdpo` stores them")
    if "groups" in transport.needs and recipe.training.responses_per_prompt < 2:
        raise RecipeError(f"{where} compares responses to one prompt, but the run sampled only one per prompt")
    for missing, what in transport.statistics.items():
        if missing not in rollout.stats:
            raise RecipeError(
                f"{where} reads the statistic {missing} ({json.dumps(what.model_dump(mode='json'))}), which the run did "
                f"not measure; stored are: {', '.join(rollout.stats)}. A run stores a statistic if its transport reads it "
                "or logging.statistics names it"
            )
    try:
        credit = transport.checked(rollout)
    except (KeyError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise RecipeError(f"{where} on iteration {iteration}: {type(error).__name__}: {error}") from error
    if credit.advantages.shape != rollout.mask.shape or not bool(credit.advantages[rollout.mask].isfinite().all()):
        raise RecipeError(f"{where} on iteration {iteration}: expected finite advantages of shape {tuple(rollout.mask.shape)}")
    return credit


def print_replay(folder: Path, written: Sequence[str], plugins: Sequence[str] = (), *, trust: bool = False) -> None:
    """Print the table."""
    replay = Replay.of(folder, written, plugins, trust=trust)
    iterations, sums = list(replay.folder.rollouts), replay.compare()
    first = next(iter(sums.values()))
    span = f"{iterations[0]} to {iterations[-1]}" if len(iterations) > 1 else str(iterations[0])
    episodes = "" if replay.recipe.environment is None else f" in {first.responses:,} episodes"
    title = f"{folder}: {len(iterations)} stored iterations ({span}), {first.tokens:,} trainable tokens{episodes}"
    table = Table(title=title, title_justify="left")
    table.add_column("transport", overflow="fold")
    for column in ("correlation", "same sign", "mean |A|", *replay.parts):
        table.add_column(column, justify="right", no_wrap=True)
    for name, found in sums.items():
        total, count = float(found.parts.sum()), max(1, found.tokens)
        shares = [f"{float(part) / total:.2f}" if total else "-" for part in found.parts[: len(replay.parts)]]
        correlation = "-" if found.correlation is None else f"{found.correlation:.3f}"
        table.add_row(name, correlation, f"{found.same_sign / count:.3f}", f"{found.size / count:.4f}", *shares)
    terminal = make_console(WIDTH)
    terminal.print(table)
    where = "a response" if replay.turns == 1 else "an episode's turns" if replay.turns > PARTS else ""
    terminal.print(
        "correlation and same sign with the run's own advantages, over trainable tokens; the last columns: share of |A| in "
        f"each {f'fifth of {where}' if where else 'turn'}",
    )
