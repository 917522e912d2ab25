"""`cct replay`: the stored rollouts of a run under other transports, and how their credit differs from the run's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cct.loading import load_recipe, read_part
from cct.recipe import Recipe, RecipeError
from cct.registry import PluginError, load_plugin
from cct.rollout import Rollout
from cct.training.rollouts import load, stored
from cct.transport import Transport

PARTS = 5  # of a response, for where the mass lies
WIDTH = 100  # of the table, where the terminal does not say


@dataclass
class Sums:
    """Over trainable tokens, of the run's own advantages x and another transport's y."""

    tokens: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0
    same_sign: int = 0
    size: float = 0.0
    parts: Tensor = field(default_factory=lambda: torch.zeros(PARTS, dtype=torch.float64))

    def add(self, own: Tensor, other: Tensor, mask: Tensor) -> None:
        x, y = own[mask].double(), other[mask].double()
        self.tokens += len(x)
        self.x, self.y = self.x + float(x.sum()), self.y + float(y.sum())
        self.xx, self.yy, self.xy = self.xx + float(x @ x), self.yy + float(y @ y), self.xy + float(x @ y)
        self.same_sign += int((x.sign() == y.sign()).sum())
        self.size += float(y.abs().sum())
        rank, count = mask.long().cumsum(1) - 1, mask.sum(1, keepdim=True)
        self.parts.index_add_(0, (rank * PARTS // count.clamp(min=1))[mask], y.abs())

    @property
    def correlation(self) -> float | None:
        """Pearson's; None where one of the two does not vary."""
        if not self.tokens:
            return None
        spread = [total - mean**2 / self.tokens for total, mean in ((self.xx, self.x), (self.yy, self.y))]
        if min(spread) <= 1e-12 * max(self.xx, self.yy, 1e-300):
            return None
        return (self.xy - self.x * self.y / self.tokens) / (spread[0] * spread[1]) ** 0.5


def compare(folder: Path, written: Sequence[str], plugins: Sequence[str] = ()) -> tuple[list[int], dict[str, Sums]]:
    """The iterations that are stored, and for each transport, the run's own first, how its credit compares.

    Raises RecipeError where the run has no rollouts, or where they lack what a transport reads.
    """
    if not (folder / "recipe.yaml").is_file():
        raise RecipeError(f"{folder}: not a run folder (no recipe.yaml)")
    recipe, paths = load_recipe(folder / "recipe.yaml"), stored(folder)
    if not paths:
        raise RecipeError(
            f"{folder}: no rollouts were stored (logging.rollouts is {recipe.logging.rollouts}, rollouts_mb "
            f"{recipe.logging.rollouts_mb:g}); a run with --set logging.rollouts=always keeps all"
        )
    for plugin in plugins:
        try:
            load_plugin(plugin, Path.cwd())
        except PluginError as error:
            raise RecipeError(str(error)) from None
    own = {f"{recipe.transport.use} (the run's own)": recipe.transport}
    others = {}
    for text in written:
        part = read_part("transport", text)
        assert isinstance(part, Transport)
        others[text.strip()] = part
    sums = {name: Sums() for name in own | others}
    for number, path in paths.items():
        rollout = load(path)
        (reference,) = (_advantages(part, name, rollout, recipe, number) for name, part in own.items())
        for name, part in (own | others).items():
            credit = reference if part is recipe.transport else _advantages(part, name, rollout, recipe, number)
            sums[name].add(reference, credit, rollout.mask)
    return list(paths), sums


def _advantages(transport: Transport, name: str, rollout: Rollout, recipe: Recipe, iteration: int) -> Tensor:
    where = f"transport {name}"
    if "values" in transport.needs and rollout.values is None:
        raise RecipeError(f"{where} needs values, and the run had no critic, so its rollouts hold none")
    if "reference" in transport.needs and rollout.reference_logprobs is None:
        raise RecipeError(f"{where} needs the reference's log-probabilities, which the run did not take")
    if "groups" in transport.needs and recipe.training.responses_per_prompt < 2:
        raise RecipeError(f"{where} compares responses to one prompt, of which the run sampled one each")
    for missing, what in transport.statistics.items():
        if missing not in rollout.stats:
            raise RecipeError(
                f"{where} reads the statistic {missing} ({json.dumps(what.model_dump(mode='json'))}), which the run's forward "
                f"did not take; stored are: {', '.join(rollout.stats)}. A run whose transport asks for it stores it"
            )
    try:
        advantages = transport(rollout).advantages
    except (KeyError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise RecipeError(f"{where} on iteration {iteration}: {type(error).__name__}: {error}") from error
    if advantages.shape != rollout.mask.shape or not bool(advantages[rollout.mask].isfinite().all()):
        raise RecipeError(f"{where} on iteration {iteration}: expected finite advantages of shape {tuple(rollout.mask.shape)}")
    return advantages


def print_replay(folder: Path, written: Sequence[str], plugins: Sequence[str] = ()) -> int:
    """Print the table. Returns 0."""
    iterations, sums = compare(folder, written, plugins)
    tokens = next(iter(sums.values())).tokens
    span = f"{iterations[0]} to {iterations[-1]}" if len(iterations) > 1 else str(iterations[0])
    table = Table(
        title=f"{folder}: {len(iterations)} stored iterations ({span}), {tokens:,} trainable tokens", title_justify="left"
    )
    table.add_column("transport", overflow="fold")
    for column in (
        "correlation",
        "same sign",
        "mean |A|",
        *(f"{100 * i // PARTS}-{100 * (i + 1) // PARTS}%" for i in range(PARTS)),
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for name, found in sums.items():
        total, count = float(found.parts.sum()), max(1, found.tokens)
        shares = [f"{float(part) / total:.2f}" if total else "-" for part in found.parts]
        correlation = "-" if found.correlation is None else f"{found.correlation:.3f}"
        table.add_row(name, correlation, f"{found.same_sign / count:.3f}", f"{found.size / count:.4f}", *shares)
    console = Console()
    console = console if console.is_terminal else Console(width=max(WIDTH, console.width))
    console.print(table)
    console.print(
        "correlation and same sign with the run's own advantages, over trainable tokens; the last columns: share of |A| in "
        "each fifth of a response",
        highlight=False,
    )
    return 0
