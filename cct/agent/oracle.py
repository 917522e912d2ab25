"""The oracle of the laboratory: the exact value of every state of a rollout under the policy that sampled it.

What is exact, and what is not: at each decision the probability of being right is the policy's own, from its distribution
over the next token. Later decisions are taken to be right as often as the policy has it in this very response, whichever way
this one falls. Where a response leaves the layout, the later ones are as probable as they are on average in the batch, by
kind (decision or routine). So the advantage at a decision is unbiased as long as a token does not change the chances of
later ones, as in a policy that works each part out from the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import PrivateAttr
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.errors import TrainingStopped
from cct.laboratory import Layout, layout_of
from cct.rollout import Prompt, Response, Rollout
from cct.statistic import Forward, Statistic

from .agent import Agent

MOST_TOKENS = 1000  # of a vocabulary of characters


class _Chance(Statistic):
    """The probability of a set of tokens, [B, T]."""

    reads = frozenset({"distribution"})
    _allowed: Tensor = PrivateAttr()  # [B, T, V] bool

    @classmethod
    def of(cls, allowed: Tensor) -> _Chance:
        made = cls()
        made._allowed = allowed
        return made

    def measure(self, forward: Forward) -> Tensor:
        return forward.distribution.masked_fill(~self._allowed, -torch.inf).logsumexp(-1).exp()


def with_exact_values(
    rollout: Rollout, agent: Agent, tokenizer: Tokenizer, prompts: Sequence[Prompt], responses: Sequence[Response]
) -> Rollout:
    """The rollout with `exact_values` [B, T] and `decisions` [B, T]; one more forward, without gradient.

    Raises TrainingStopped where the policy's tokens are not characters.
    """
    characters = _characters(agent, tokenizer)
    written = [[characters[token] for token in response.tokens] for response in responses]
    layouts, texts = [layout_of(prompt) for prompt in prompts], ["".join(chars) for chars in written]
    states = [_states(chars) for chars in written]
    chances = _chances(rollout, agent, characters, layouts, texts, states)
    values, decisions = torch.zeros_like(rollout.rewards), torch.zeros_like(rollout.mask)
    for row, (layout, text, at) in enumerate(zip(layouts, texts, states, strict=True)):
        of_text = layout.values(text, *chances[row])
        places, aligned = layout.places(text), layout.aligned(text)
        values[row, : len(at)] = values.new_tensor([of_text[number] for number in at])
        decides = [number <= aligned and number < len(places) and places[number].decides for number in at]
        decisions[row, : len(at)] = torch.tensor(decides, device=decisions.device)
    return rollout.replace(exact_values=values, decisions=decisions & rollout.mask)


def _characters(agent: Agent, tokenizer: Tokenizer) -> list[str]:
    """The character that each token is; empty of special tokens."""
    size = agent.actor.config.get_text_config().vocab_size
    if size <= MOST_TOKENS:
        known = len(tokenizer)
        found = [str(tokenizer.decode([token], skip_special_tokens=True)) if token < known else "" for token in range(size)]
        if max(map(len, found)) == 1:
            return found
    raise TrainingStopped(
        "exact values need a policy whose tokens are characters, and this one's are not; take policy `scratch`, or another task"
    )


def _states(chars: Sequence[str]) -> list[int]:
    """Of each token how many characters stand before it: the place of the layout that it is to fill."""
    found, number = [], 0
    for char in chars:
        found.append(number)
        number += len(char)
    return found


def _chances(
    rollout: Rollout,
    agent: Agent,
    characters: Sequence[str],
    layouts: Sequence[Layout],
    texts: Sequence[str],
    states: Sequence[Sequence[int]],
) -> list[tuple[list[float], list[float]]]:
    """For each response, the policy's probability of being right and of staying intact at each place of its layout."""
    size, (rows, width) = len(characters), rollout.mask.shape
    allowed, known = torch.zeros(2, rows, width, size, dtype=torch.bool), list[dict[int, int]]()
    places = [layout.places(text) for layout, text in zip(layouts, texts, strict=True)]
    every = {chars for each in places for place in each for chars in (place.right, place.intact)}
    sets = {chars: torch.tensor([char != "" and char in chars for char in characters]) for chars in every}
    for row, at in enumerate(states):
        last = min(layouts[row].aligned(texts[row]), len(places[row]) - 1)
        known.append({place: t for t, place in enumerate(at) if place <= last})  # the last of its tokens
        for place, t in known[row].items():
            allowed[0, row, t], allowed[1, row, t] = sets[places[row][place].right], sets[places[row][place].intact]
    wanted = {name: _Chance.of(of.to(rollout.mask.device)) for name, of in zip(("right", "intact"), allowed, strict=True)}
    with torch.no_grad():
        ids, seen = rollout.input_ids, rollout.attention_mask
        read = agent(ids, seen, width, statistics=wanted, with_entropy=False).stats  # type: ignore[arg-type]
    found = [read[name].tolist() for name in ("right", "intact")]
    kinds = [[place.decides for place in each] for each in places]
    of_kind = [
        {
            kind: _mean([x[row][t] for row, each in enumerate(known) for place, t in each.items() if kinds[row][place] == kind])
            for kind in (True, False)
        }
        for x in found
    ]
    right, intact = (
        [
            [x[row][known[row][place]] if place in known[row] else usual[kind] for place, kind in enumerate(kinds[row])]
            for row in range(rows)
        ]
        for x, usual in zip(found, of_kind, strict=True)
    )
    return list(zip(right, intact, strict=True))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 1.0
