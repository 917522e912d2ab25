"""tokens.json: some stored responses and episodes token by token, with the credit that transports give them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.rollout import Credit, Rollout
from cct.system.files import write_text
from cct.transport import Transport, gated_gae
from cct.transport.functional import join

from .replay import Replay

PROMPTS = 3  # of an iteration


def save_tokens(folder: Path, written: Sequence[str], plugins: Sequence[str] = (), *, trust: bool = False) -> Path:
    """Write tokens.json into the run: some stored responses or episodes token by token, with what transports made of them.

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
        joined, split = join(rollout)
        for one in _telling(joined):
            rows = [one] if split is None else _rows(split.episode, rollout.order, one)
            responses.append({"iteration": number} | _response(rollout, credits, deltas, rows, tokenizer))
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


def _rows(episode: Tensor, order: Tensor | None, number: int) -> list[int]:
    """Rows of an episode, in their order. episode: [B] of each row."""
    rows = (episode == number).nonzero().flatten()
    return (rows if order is None else rows[order[rows].argsort()]).tolist()


def _deltas(transport: Transport, rollout: Rollout, credit: Credit) -> Tensor | None:
    """TD errors r + g V' - V under the transport's discount, across the rows of an episode; None where it reads no values."""
    if "values" not in transport.needs or rollout.values is None:
        return None
    joined, split = join(rollout)
    gate = credit.gate if credit.gate is None or split is None else split.join(credit.gate)
    discount = gate if gate is not None else getattr(transport, "gamma", 1.0)
    assert joined.values is not None
    found = gated_gae(joined.rewards, joined.values, joined.mask, gamma=discount, lam=0.0, bootstrap=joined.bootstrap)[0]
    return found if split is None else split(found)


def _response(
    rollout: Rollout,
    credits: dict[str, Credit],
    deltas: dict[str, Tensor | None],
    rows: Sequence[int],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """What tokens.json holds of one response, or of an episode: its rows one after the other."""
    width = rollout.prompt_width
    lengths = [int(rollout.attention_mask[row, width:].sum()) for row in rows]

    def whole(x: Tensor) -> Tensor:
        return torch.cat([x[row, :length] for row, length in zip(rows, lengths, strict=True)])

    def listed(x: Tensor | None) -> list[float | None] | None:
        numbers = [] if x is None else [float(value) for value in whole(x)]
        return None if x is None else [round(value, 6) if math.isfinite(value) else None for value in numbers]

    prompts = [rollout.input_ids[row, :width][rollout.attention_mask[row, :width].bool()].tolist() for row in rows]
    tokens = whole(rollout.input_ids[:, width:]).tolist()
    return {
        "group": int(rollout.groups[rows[0]]),
        "prompt": tokenizer.decode(prompts[0], skip_special_tokens=True),
        "tokens": [tokenizer.decode([token]) for token in tokens],
        "trained": whole(rollout.mask).tolist(),
        "reward": float(rollout.scores[list(rows)].sum()),
        "finished": not bool(rollout.truncated[rows[-1]]),
        "value": listed(rollout.values),
        "credit": {
            name: {"advantage": listed(credit.advantages), "gate": listed(credit.gate), "delta": listed(deltas[name])}
            for name, credit in credits.items()
        },
    } | ({} if rollout.turns is None else _conversation(rollout, whole, prompts, tokens, lengths, tokenizer))


def _conversation(
    rollout: Rollout,
    whole: Callable[[Tensor], Tensor],
    prompts: Sequence[list[int]],
    tokens: list[int],
    lengths: Sequence[int],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """The turn of each token, -1 where it is observed; rewards by turn; and where a new row began, what it reads otherwise."""
    assert rollout.turns is not None
    of_token, rewards = whole(rollout.turns), whole(rollout.rewards)
    named = {name: whole(x) for name, x in rollout.components.items() if name}
    turns = [
        {
            "reward": round(float(rewards[of_token == turn].sum()), 6),
            "rewards": {name: round(float(x[of_token == turn].sum()), 6) for name, x in named.items()},
        }
        for turn in range(int(of_token.max()) + 1 if len(of_token) else 0)
    ]
    forks, end = [], 0
    for before, prompt, length in zip(prompts, prompts[1:], lengths, strict=False):
        read = [*before, *tokens[end : end + length]]
        end += length
        same = next((place for place, (x, y) in enumerate(zip(read, prompt, strict=False)) if x != y), len(read))
        text = tokenizer.decode(prompt[same:], skip_special_tokens=True)
        forks.append({"token": end, "read_again": len(prompt), "text": text})
    return {"turn": of_token.tolist(), "turns": turns, "forks": forks}
