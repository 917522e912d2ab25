"""Properties of transports."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cct.transport import Transport
from cct.transport.functional import turn_ends, turn_starts

from .base import Broken, Property
from .cases import Case, cast, cut, full, numbers, rows_of, same, with_copy
from .operators import BOTH, CHANGES, ROUNDING, agree, outputs, split, with_moments

RAISES = (0.25, 1.0, 4.0)  # of a reward


def causal(operator: Transport, case: Case) -> None:
    rollout = with_moments(case, operator)
    token = case.token(rollout.mask)
    if token is None:
        return
    row, t = token
    rewards = rollout.rewards.clone()
    rewards[row, t] += 1
    before = outputs(operator, rollout)["advantages"]
    after = outputs(operator, rollout.replace(rewards=rewards))["advantages"]
    where = f"with 1 more reward at token {t} of response {row}"
    same(f"advantages[{row}, {t + 1}:]", before[row, t + 1 :], after[row, t + 1 :], where, ROUNDING)
    others = torch.arange(len(before)) != row
    same("advantages of the other responses", before[others], after[others], where, ROUNDING)
    if float((after - before)[row, t].abs()) < ROUNDING:
        raise Broken(f"{where}, advantages[{row}, {t}] stays {float(before[row, t]):.4g}: a token's own reward does not count")


def linear(operator: Transport, case: Case) -> None:
    rollout = with_moments(case, operator)
    other = rollout.rewards.roll(1, 0).flip(1) + 0.5

    def advantages(rewards: Tensor) -> Tensor:
        return outputs(operator, rollout.replace(rewards=rewards))["advantages"]

    nothing = advantages(torch.zeros_like(other))
    parts = advantages(rollout.rewards) - nothing + 2 * (advantages(other) - nothing)
    same("advantages", parts + nothing, advantages(rollout.rewards + 2 * other), "with two rewards added up", ROUNDING)


def outcome(operator: Transport, case: None) -> None:
    rollout = full(8, 6, operator.statistics)
    rollout = rollout.replace(groups=torch.zeros_like(rollout.groups), mask=rollout.mask.clone())
    rollout.mask[0, 3] = False  # a gap
    rollout.mask[1, 4:] = False  # padding, and with it the reward that stood there
    before = outputs(operator, rollout)["advantages"]
    for row in range(len(before)):
        last = int(rollout.mask[row].nonzero().max())
        for change in CHANGES:
            rewards = rollout.rewards.clone()
            rewards[row, last] += change
            if not torch.allclose(before, outputs(operator, rollout.replace(rewards=rewards))["advantages"], atol=1e-6):
                break
        else:
            raise Broken(
                f"whatever is added to the reward of the last token of response {row}, the advantages stay {numbers(before)}"
            )


def equal(operator: Transport, case: Case) -> None:
    rollout = case.rollout(operator.statistics)
    last = rollout.mask & (rollout.mask.flip(1).cumsum(1).flip(1) == 1)
    alone, groups = torch.arange(len(rollout.groups)), rollout.groups.unsqueeze(1)
    for changed, what in (
        *(
            (rollout.replace(rewards=score * last, groups=0 * rollout.groups), "with the same reward for every response")
            for score in (0.7, 0.1, 0.3)  # of which a mean may differ by rounding
        ),
        (rollout.replace(rewards=(0.7 + groups) * last), "with the same reward for every response of a group"),
        (rollout.replace(groups=alone), "with every response in a group of its own"),
    ):
        found = outputs(operator, changed)["advantages"]
        same("advantages", torch.zeros_like(found), found, what)


def names(operator: Any, case: Case) -> None:
    rollout = case.rollout(operator.statistics)
    agree(
        operator, rollout, rollout.replace(groups=7 - 3 * rollout.groups), "with other numbers for the groups", tolerance=1e-6
    )


def better(operator: Transport, case: Case) -> None:
    """Of two responses that differ in one reward only, no token up to it gets less in the better one. Whitening keeps it so."""
    rollout = case.rollout(operator.statistics)
    token = case.token(rollout.mask)
    if token is None:
        return
    row, t = token
    twins = with_copy(rollout, row)
    for raised in RAISES:
        rewards = twins.rewards.clone()
        rewards[-1, t] += raised
        found = outputs(operator, twins.replace(rewards=rewards))["advantages"]
        worse, better = found[row, : t + 1], found[-1, : t + 1]
        if bool((better < worse - ROUNDING * max(1.0, float(found.abs().max()))).any()):
            raise Broken(
                f"response {row} and a copy of it whose reward at token {t} is {raised:g} higher get the advantages "
                f"{numbers(worse)} and {numbers(better)}: the better one gets less"
            )


def bootstrap(operator: Transport, case: None) -> None:
    """Of two cut responses, the one that would go on better gets more, and its target is higher. No value is one of 0."""
    seen: dict[str, bool] = {"advantages": False, "value_targets": False}
    for seed in range(4):
        rollout = Case(((False,) * 3,) * 3, ((0.0, 0.5, 0.0),) * 3, (0, 0, 0), (True,) * 3, seed, False, 0).rollout(
            operator.statistics
        )
        twins = with_copy(rollout, 0)
        assert twins.bootstrap is not None
        value = twins.bootstrap.clone()
        value[-1] += 10
        found = outputs(operator, twins.replace(bootstrap=value))
        if "value_targets" not in found:
            return  # which `form` says
        for name in seen:
            worse, better = found[name][0], found[name][-1]
            seen[name] |= bool((better > worse + ROUNDING).any())
            if float(better[-1]) < float(worse[-1]) - ROUNDING:
                raise Broken(
                    f"of two cut responses, {name} of the one with a bootstrap of {float(value[-1]):.4g} are "
                    f"{numbers(better)}, of its copy with {float(value[0]):.4g} {numbers(worse)}: what would "
                    "have followed counts the wrong way"
                )
        whole = rollout.replace(truncated=torch.zeros_like(rollout.truncated), bootstrap=torch.zeros_like(value[:-1]))
        agree(operator, whole, whole.replace(bootstrap=None), "where bootstrap is None and nothing was cut")
    for name, shows in seen.items():
        if not shows:
            raise Broken(f"{name} of a response that the length limit cut do not depend on rollout.bootstrap, V after its end")


def targets(operator: Transport, case: Case) -> None:
    """A critic that says what it was taught leaves nothing to credit: V = R makes every TD error of its kernel 0.

    Taught again and again, from the last token on one more value is right each time. Two further responses, the negative of
    each other, keep what whitens from having nothing to divide by, and its mean at 0.
    """
    rollout = cast(rows_of(with_moments(case, operator), torch.zeros(3, dtype=torch.long)), torch.float64)
    if not bool(rollout.mask.any()):
        return
    assert rollout.values is not None and rollout.bootstrap is not None
    other = torch.linspace(-1, 2, rollout.mask.shape[1], dtype=torch.float64)
    rewards, values, after = rollout.rewards.clone(), rollout.values.clone(), rollout.bootstrap.clone()
    for x, rest in ((rewards, other), (values, other.flip(0) - 1.0), (after, 0.5 * rollout.truncated[0])):
        x[1], x[2] = rest, -rest
    rollout = rollout.replace(rewards=rewards, bootstrap=after, groups=torch.zeros(3).long(), rollout_logprobs=rollout.logprobs)
    for _ in range(rollout.mask.shape[1] + 1):
        found = outputs(operator, rollout.replace(values=values))
        if "value_targets" not in found:
            return  # which `form` says
        values = values.clone()
        values[0] = found["value_targets"][0]
    left = outputs(operator, rollout.replace(values=values))["advantages"]
    if float(left[0].abs().max()) > ROUNDING * max(1.0, float(left.abs().max())):
        raise Broken(
            f"where a critic has learnt the value targets of a response, {numbers(values[0])}, its advantages are "
            f"{numbers(left[0])}, not 0: targets and advantages are not of one kernel"
        )


def cuts(operator: Transport, case: Case) -> None:
    """Rows cut in two, in three and unevenly, where a turn begins or where the observation before it does; and mixed up."""
    rollout = case.rollout(operator.statistics)
    mask = rollout.mask
    starts, after = turn_starts(mask), torch.nn.functional.pad(turn_ends(mask), (1, 0))[:, :-1]
    turn = starts.long().cumsum(1)
    whole = outputs(operator, rollout, operator.checked)
    for when, later in (
        ("with a row for each turn", starts & (turn > 1)),
        ("with a row for each turn and the observation before it", after & (turn < turn.amax(1, keepdim=True))),
        ("with a row for the first turn and one for the rest", starts & (turn == 2)),
        ("with every second response in rows of two turns", starts & (turn > 1) & (turn % 2 == 1) & _every_second(mask)),
    ):
        for backwards in (False, True) if bool(later.any()) else ():
            rows, places = cut(rollout, later, backwards)
            found = outputs(operator, rows, operator.checked)
            if found.keys() != whole.keys():
                raise Broken(f"{when}, it returns {', '.join(found)} instead of {', '.join(whole)}")
            for name, x in whole.items():
                got = found[name].flatten()[places].masked_fill(~mask, 0.0)
                same(name, x, got, when + ", backwards" * backwards, ROUNDING)


def _every_second(mask: Tensor) -> Tensor:
    return (torch.arange(len(mask)) % 2 == 0).unsqueeze(1)


def _by_position(operator: Transport) -> str:
    name = next((name for name in ("observation", "padding", "order") if name in operator.waives), "")
    return f"it waives `{name}`: {operator.waives[name]}" if name else ""


def _draws(operator: Transport) -> str:
    return (
        f"it waives `order` ({operator.waives['order']}), so that no two responses are alike"
        if "order" in operator.waives
        else ""
    )


def _no_critic(operator: Transport) -> str:
    return "" if "values" in operator.needs else "it does not need values"


TRANSPORT = [
    *BOTH,
    Property("outcome", "the reward of the last token reaches an advantage", outcome, cases=0, waivable=True),
    Property(
        "better",
        "of two responses that differ in one reward, the better one has no lower advantage up to it",
        better,
        waivable=True,
        excused=_draws,
    ),
    Property(
        "bootstrap",
        "for a truncated response, V after its end counts in advantages and targets",
        bootstrap,
        cases=0,
        waivable=True,
        excused=lambda operator: _no_critic(operator) or _draws(operator),
    ),
    Property(
        "targets",
        "with a critic that has learnt its targets, every advantage is 0",
        targets,
        cases=0.25,
        waivable=True,
        excused=lambda operator: _no_critic(operator) or _draws(operator),
    ),
    Property(
        "cut",
        "an episode cut into rows between its turns gets the same credit as in one row",
        cuts,
        cases=0.5,
        excused=_by_position,
    ),
    Property("groups", "only the partition into groups matters, not their numbers", names),
    Property(
        "equal",
        "in a group of one or with equal rewards, every advantage is exactly 0",
        equal,
        waivable=True,
        excused=lambda operator: "" if "groups" in operator.needs else "it does not need groups",
    ),
    Property(
        "causal",
        "A_t depends on the reward at t, and on no reward before t or of another response",
        causal,
        claimed="group baselines and whitening read rewards of other responses, outcome methods those of earlier tokens",
    ),
    Property(
        "linear",
        "advantages are linear in the rewards, up to a constant",
        linear,
        claimed="dividing by a deviation is not linear",
    ),
    Property(
        "split",
        "each group computed separately, without extra padding, gets the same result",
        split,
        claimed="whitening reads the whole batch; a transport always gets it whole",
    ),
]
