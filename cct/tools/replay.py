"""`cct replay`: the stored rollouts of a run under other transports, and how their credit differs from the run's own."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.loading import read_transports
from cct.recipe import Recipe, RecipeError
from cct.rollout import Credit, Rollout
from cct.run_folder import RunFolder
from cct.system.files import write_text
from cct.system.terminal import make_console
from cct.transport import Transport, gated_gae

PARTS = 5  # of a response, for where the mass lies
PROMPTS = 3  # of an iteration, in tokens.json
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


def compare(
    folder: Path, written: Sequence[str], plugins: Sequence[str] = (), *, trust: bool = False
) -> tuple[list[int], dict[str, Sums]]:
    """The iterations that are stored, and for each transport, the run's own first, how its credit compares.

    Raises RecipeError where the run has no rollouts, or where they lack what a transport reads.
    """
    replay = Replay.of(folder, written, plugins, trust=trust)
    sums = {name: Sums() for name in replay.transports}
    iterations = list(replay.folder.rollouts)
    for number in iterations:
        rollout = replay.folder.rollout(number)
        credits = replay.credit(number, rollout)
        own = next(iter(credits.values())).advantages
        for name, credit in credits.items():
            sums[name].add(own, credit.advantages, rollout.mask)
    return iterations, sums


def save_tokens(folder: Path, written: Sequence[str], plugins: Sequence[str] = (), *, trust: bool = False) -> Path:
    """Write tokens.json into the run: some stored responses token by token, with what each transport made of them.

    Of the first and of the last stored iteration after the warm-up, and of PROMPTS prompts each, one response that scored
    highest and one that scored lowest. Raises RecipeError as `compare`.
    """
    replay = Replay.of(folder, written, plugins, trust=trust)
    recipe = replay.recipe
    tokenizer = recipe.policy.tokenizer(alphabet=recipe.alphabet)
    stored = list(replay.folder.rollouts)
    numbers = [number for number in stored if number > 0] or stored
    responses = []
    for number in dict.fromkeys((numbers[0], numbers[-1])):
        rollout = replay.folder.rollout(number)
        credits = replay.credit(number, rollout)
        deltas = {name: _deltas(replay.transports[name], rollout, credit) for name, credit in credits.items()}
        for row in _telling(rollout):
            responses.append({"iteration": number} | _response(rollout, credits, deltas, row, tokenizer))
    path = replay.folder.tokens_file
    write_text(path, json.dumps({"recipe": recipe.name, "responses": responses}, ensure_ascii=False) + "\n")
    return path


def _telling(rollout: Rollout) -> list[int]:
    """Rows to show: of each prompt, the highest and the lowest score; prompts where these differ come first."""
    pairs = []
    for group in rollout.groups[rollout.valid].unique().tolist():
        rows = [row for row in range(len(rollout.groups)) if rollout.groups[row] == group and rollout.valid[row]]
        scores = {row: float(rollout.scores[row]) for row in rows}
        high, low = max(rows, key=lambda row: scores[row]), min(rows, key=lambda row: scores[row])
        pairs.append((scores[low] - scores[high], group, [high] if scores[high] == scores[low] else [high, low]))
    return [row for _, _, rows in sorted(pairs)[:PROMPTS] for row in rows]


def _deltas(transport: Transport, rollout: Rollout, credit: Credit) -> Tensor | None:
    """TD errors r + g V' - V under the transport's discount; None where it reads no values."""
    if "values" not in transport.needs or rollout.values is None:
        return None
    discount = credit.gate if credit.gate is not None else getattr(transport, "gamma", 1.0)
    return gated_gae(rollout.rewards, rollout.values, rollout.mask, gamma=discount, lam=0.0, bootstrap=rollout.bootstrap)[0]


def _response(
    rollout: Rollout, credits: dict[str, Credit], deltas: dict[str, Tensor | None], row: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """What tokens.json holds of one response."""
    width = rollout.mask.shape[1]
    prompt, length = rollout.input_ids[row, :-width], int(rollout.attention_mask[row, -width:].sum())
    tokens = rollout.input_ids[row, -width:][:length].tolist()

    def listed(x: Tensor | None) -> list[float | None] | None:
        numbers = [] if x is None else [float(value) for value in x[row, :length]]
        return None if x is None else [round(value, 6) if math.isfinite(value) else None for value in numbers]

    return {
        "group": int(rollout.groups[row]),
        "prompt": tokenizer.decode(prompt[rollout.attention_mask[row, :-width].bool()], skip_special_tokens=True),
        "tokens": [tokenizer.decode([token]) for token in tokens],
        "trained": rollout.mask[row, :length].tolist(),
        "reward": float(rollout.scores[row]),
        "finished": not bool(rollout.truncated[row]),
        "value": listed(rollout.values),
        "credit": {
            name: {"advantage": listed(credit.advantages), "gate": listed(credit.gate), "delta": listed(deltas[name])}
            for name, credit in credits.items()
        },
    }


def _credit(transport: Transport, name: str, rollout: Rollout, recipe: Recipe, iteration: int) -> Credit:
    where = f"transport {name}"
    if "values" in transport.needs and rollout.values is None:
        raise RecipeError(f"{where} needs values, and the run had no critic, so its rollouts hold none")
    if "reference" in transport.needs and rollout.reference_logprobs is None:
        raise RecipeError(f"{where} needs the reference's log-probabilities, which the run did not store")
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


def print_replay(
    folder: Path, written: Sequence[str], plugins: Sequence[str] = (), *, save: bool = False, trust: bool = False
) -> int:
    """Print the table; write tokens.json, if asked. Returns 0."""
    iterations, sums = compare(folder, written, plugins, trust=trust)
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
    terminal = make_console(WIDTH)
    terminal.print(table)
    terminal.print(
        "correlation and same sign with the run's own advantages, over trainable tokens; the last columns: share of |A| in "
        "each fifth of a response",
    )
    if save:
        terminal.print(f"wrote {save_tokens(folder, written, plugins, trust=trust)}")
    return 0
