"""The true advantage of actions, by continuing responses and episodes from before and from after them."""

from __future__ import annotations

from collections.abc import Sequence

from cct.recipe import RecipeError
from cct.training.rows import Row
from cct.training.sampler import Sampler, State

from .scores import branched_advantage


def advantages_at(
    sampler: Sampler, rows: Sequence[Row], places: Sequence[tuple[int, int, int]], each: int, seed: int
) -> tuple[list[tuple[float, float, float, float]], int]:
    """Q(s, a) - V(s) of each action: the estimate, those of its two halves, and the p-value of 0.

    places: row, first token in it, and number of tokens of each action: one, or those of a whole turn. each: continuations from
    before and from after every action. Returns as well the tokens that were sampled. Raises RecipeError where fewer than four
    continuations of a state could be judged.
    """

    def state(row: Row, t: int) -> State:
        return sampler.key(row), row.response.tokens[:t]

    here = [(rows[number], first := rows[number].number(t), first + n) for number, t, n in places]
    ends = [end == len(row.response.tokens) for row, _, end in here]  # nothing follows: what the action is worth is known
    wanted = [
        state(row, t)
        for (row, first, end), ended in zip(here, ends, strict=True)
        for t in ((first,) if ended else (first, end))
    ]
    states = list(dict.fromkeys(wanted))
    continued, cost = sampler.continue_from(rows, states, each, seed)
    of_state = dict(zip(states, continued, strict=True))
    if (fewest := min(map(len, continued), default=each)) < 4:
        raise RecipeError(f"{fewest} of {each} continuations of a state could be judged, and at least 4 are needed")
    found = []
    for (row, first, end), ended in zip(here, ends, strict=True):
        reward, action = sum(row.rewards[first:end]), row.response.tokens[first:end]
        after = [reward] * each if ended else [reward + one.value for one in of_state[state(row, end)]]
        before = of_state[state(row, first)]
        returns, chose = [one.value for one in before], [one.said[: len(action)] == action for one in before]
        whole, p = branched_advantage(after, returns, chose)
        half, other = (branched_advantage(after[k::2], returns[k::2], chose[k::2])[0] for k in (0, 1))
        found.append((whole, half, other, p))
    return found, int(cost["branch/tokens"])
