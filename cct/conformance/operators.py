"""Properties of transports and gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from cct.rollout import Credit, Rollout
from cct.transport import Gate, Transport

from .base import Broken, Property
from .cases import (
    NOISE,
    Case,
    cast,
    full,
    grows_linearly,
    noisy,
    numbers,
    padded,
    padding_left,
    python,
    rows_of,
    same,
    without_gaps,
)

ROUNDING = 1e-4  # of the greatest number: sums of float32 in another order
BFLOAT16 = 0.06  # of the greatest number: eight bits, through a handful of sums and a division
CHANGES = (1.0, -2.5, 5.0)  # of a reward, of which one at least must show


def outputs(operator: Transport | Gate, rollout: Rollout) -> dict[str, Tensor]:
    """What an operator returns, by name, without what a gate holds at masked positions."""
    try:
        result = operator(rollout)
    except Exception as error:
        raise Broken(f"it raised {type(error).__name__}: {error}") from error
    found: dict[str, Any] = {"gate": result}
    if isinstance(operator, Transport):
        if not isinstance(result, Credit):
            raise Broken(f"it returned a {type(result).__name__}; expected a Credit")
        found = {"advantages": result.advantages, "value_targets": result.value_targets, "gate": result.gate}
    for name, x in found.items():
        if x is not None and not (isinstance(x, Tensor) and x.shape == rollout.mask.shape):
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise Broken(f"{name} is {shape}; expected the mask's shape {tuple(rollout.mask.shape)}")
    return {name: x.masked_fill(~rollout.mask, 0.0) if name == "gate" else x for name, x in found.items() if x is not None}


def _agree(
    operator: Any,
    rollout: Rollout,
    other: Rollout,
    when: str,
    *,
    back: Callable[[Tensor], Tensor] = lambda x: x,
    tolerance=ROUNDING,
) -> None:
    """The outputs on `other`, brought `back` to the places of `rollout`, are those on `rollout`."""
    expected, got = outputs(operator, rollout), outputs(operator, other)
    if expected.keys() != got.keys():
        raise Broken(f"{when}, it returns {', '.join(got)} in place of {', '.join(expected)}")
    for name, x in expected.items():
        same(name, x, back(got[name]), when, tolerance)


# --- properties of both ---------------------------------------------------------------------------
def form(operator: Any, case: Case) -> None:
    _form(operator, case.rollout(operator.statistics))


def _form(operator: Any, rollout: Rollout) -> None:
    found = outputs(operator, rollout)
    if "values" in operator.needs and isinstance(operator, Transport) and "value_targets" not in found:
        raise Broken("it needs a critic's values and returns no value_targets, from which the critic would learn")
    for name, x in found.items():
        if not x.is_floating_point() or not bool(x.isfinite().all()):
            raise Broken(f"{name} is not finite: {numbers(x)}")
        if bool(x[~rollout.mask].ne(0).any()):
            raise Broken(f"{name} is not 0 where the mask is off: {numbers(x)}")
        if name == "gate" and x.numel() and (float(x.min()) < 0 or float(x.max()) > 1):
            raise Broken(f"the gate leaves [0, 1]: {numbers(x)}")


def noise(operator: Any, case: Case) -> None:
    rollout = case.rollout(operator.statistics)
    for value in NOISE:
        _agree(operator, rollout, noisy(rollout, value), f"with {value} at masked positions", tolerance=0.0)


def gap(operator: Any, case: Case) -> None:
    rollout = case.rollout(operator.statistics)
    packed, index = without_gaps(rollout)
    expected, got = outputs(operator, rollout), outputs(operator, packed)
    for name, x in expected.items():
        same(f"{name} of its steps", x.gather(1, index), got[name], "with the gaps removed", ROUNDING)


def padding(operator: Any, case: Case) -> None:
    rollout, width = case.rollout(operator.statistics), len(case.masked[0])
    for right in (1, 70):
        more = padded(rollout, right, left=2)
        _agree(operator, rollout, more, f"with {right} more positions of padding", back=lambda x: x[:, :width])
    moved, index = padding_left(rollout)
    expected, got = outputs(operator, rollout), outputs(operator, moved)
    for name, x in expected.items():
        same(name, x.gather(1, index), got[name], "with the padding on the left", ROUNDING)


def order(operator: Any, case: Case) -> None:
    rollout = case.rollout(operator.statistics)
    rows = torch.arange(len(rollout.mask))
    for index in (rows.roll(1), rows.flip(0)):
        other = rows_of(rollout, index)
        _agree(operator, rollout, other, f"in the order {index.tolist()}", back=lambda x, index=index: x[index.argsort()])  # type: ignore[misc]


def split(operator: Any, case: Case) -> None:
    rollout = _with_moments(case, operator)
    whole = outputs(operator, rollout)
    for group in rollout.groups.unique().tolist():
        rows = (rollout.groups == group).nonzero().squeeze(1)
        steps = rollout.mask[rows].any(0).nonzero()
        width = int(steps.max()) + 1 if len(steps) else 1
        part = outputs(operator, rows_of(rollout, rows, width))
        for name, x in whole.items():
            same(name, x[rows, :width], part[name], f"with the responses of group {group} alone", ROUNDING)


def precision(operator: Any, case: Case) -> None:
    rollout = case.rollout(operator.statistics)
    exact = outputs(operator, cast(rollout, torch.float64))
    for name, x in outputs(operator, rollout).items():
        same(name, exact[name], x, "in float32 against float64", ROUNDING)
    short = cast(rollout, torch.bfloat16)
    exact = outputs(operator, cast(short, torch.float64))
    for name, x in outputs(operator, short).items():
        same(name, exact[name], x, "from bf16 inputs against float64", BFLOAT16)


def determinism(operator: Any, case: Case) -> None:
    rollout, untouched = case.rollout(operator.statistics), case.rollout(operator.statistics)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        state = torch.get_rng_state()
        first = outputs(operator, rollout)
        if not torch.equal(torch.get_rng_state(), state):
            raise Broken("it draws from torch's global generator; a generator seeded with rollout.seed makes a run repeatable")
        torch.manual_seed(case.seed + 1)
        second = outputs(operator, rollout)
    for name, x in first.items():
        same(name, x, second[name], "called again")
    for field in fields(rollout):
        before, after = getattr(untouched, field.name), getattr(rollout, field.name)
        if field.name == "stats":
            before, after = torch.stack([*before.values()]), torch.stack([*after.values()])
        if isinstance(before, Tensor) and not torch.equal(before, after):
            raise Broken(f"it wrote into rollout.{field.name}: {numbers(before)} became {numbers(after)}")


def short(operator: Any, case: None) -> None:
    shapes = [[[True]], [[True], [True]], [[False]], [[True, True], [False, False]], [[False, False], [False, True]]]
    for steps in shapes:
        mask = torch.tensor(steps)
        whole = full(mask.shape[0], mask.shape[1], operator.statistics)
        rollout = whole.replace(mask=mask, rewards=whole.rewards * mask)
        try:
            _form(operator, rollout)
        except Broken as error:
            raise Broken(f"with the mask {numbers(mask)}: {error}") from error


def length(operator: Any, case: None) -> None:
    def make(tokens: int) -> Callable[[], None]:
        rollout = full(4, tokens, operator.statistics)
        return lambda: _form(operator, rollout)

    for tokens in (1, 2, 65):
        make(tokens)()
    grows_linearly(make)


def _with_moments(case: Case, operator: Any) -> Rollout:
    """As in any iteration but the first, where a batch's own moments stand in."""
    rollout = case.rollout(operator.statistics)
    return rollout.replace(moments={name: (0.5, 0.3) for name in rollout.stats})


# --- of transports --------------------------------------------------------------------------------
def causal(operator: Transport, case: Case) -> None:
    rollout = _with_moments(case, operator)
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
    rollout = _with_moments(case, operator)
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
    alone = torch.arange(len(rollout.groups))
    for changed, what in (
        (rollout.replace(rewards=0.7 * last), "with the same reward for every response"),
        (rollout.replace(groups=alone), "with every response in a group of its own"),
    ):
        found = outputs(operator, changed)["advantages"]
        same("advantages", torch.zeros_like(found), found, what)


def names(operator: Any, case: Case) -> None:
    rollout = case.rollout(operator.statistics)
    _agree(
        operator, rollout, rollout.replace(groups=7 - 3 * rollout.groups), "with other numbers for the groups", tolerance=1e-6
    )


# --- of gates -------------------------------------------------------------------------------------
def future(operator: Gate, case: Case) -> None:
    rollout = _with_moments(case, operator)
    token = case.token(rollout.mask)
    if token is None:
        return
    row, t = token
    before = outputs(operator, rollout)["gate"][row, : t + 1]
    ids, mask = rollout.input_ids.clone(), rollout.mask.clone()
    ids[row, rollout.prompt_width + t :] = 2
    mask[row, t + 1 :] = False

    def changed(x: Tensor, start: int) -> Tensor:
        x = x.clone()
        x[row, start:] = 5.0 - x[row, start:]
        return x

    emitted = {name: changed(getattr(rollout, name), t) for name in ("logprobs", "rollout_logprobs", "reference_logprobs")}
    assert rollout.values is not None and rollout.bootstrap is not None
    unknown = {
        "later tokens and what was read after them": rollout.replace(
            **emitted,
            input_ids=ids,
            values=changed(rollout.values, t + 1),
            stats={name: changed(x, t + 1) for name, x in rollout.stats.items()},
        ),
        "the rewards": rollout.replace(rewards=changed(rollout.rewards, 0), bootstrap=rollout.bootstrap + 1),
        "the number of later tokens": rollout.replace(mask=mask),
    }
    for what, other in unknown.items():
        after = outputs(operator, other)["gate"][row, : t + 1]
        same(f"gate[{row}, :{t + 1}]", before, after, f"with other values of {what}", ROUNDING)


# --- the lists ------------------------------------------------------------------------------------
BOTH = [
    Property("form", "[B, T], finite, 0 where masked; value targets where values are needed; gates in [0, 1]", form),
    Property("noise", "whatever stands at masked positions, NaN too, changes no bit", noise),
    Property("gap", "a response with a gap equals the one without it", gap, waivable=True),
    Property("padding", "neither the amount nor the side of padding matters", padding, waivable=True),
    Property("order", "the order of the responses does not matter", order, waivable=True),
    Property("precision", "float32 agrees with float64, and so do bf16 inputs", precision),
    Property(
        "determinism",
        "the same rollout gives the same, is not written into, and no global generator is drawn from",
        determinism,
    ),
    Property("short", "one-token and empty responses, and batches of nothing else", short, cases=0),
    Property("length", "1 to 16,384 tokens in O(B*T) memory", length, cases=0),
]

TRANSPORT = [
    *BOTH,
    Property("outcome", "the reward of the last token reaches an advantage", outcome, cases=0, waivable=True),
    Property("groups", "the numbers of the groups are only names", names),
    Property(
        "equal",
        "in a group of one or of equal rewards every advantage is exactly 0",
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
        "advantages are linear in the reward, beyond what they are without any",
        linear,
        claimed="dividing by a deviation is not linear",
    ),
    Property(
        "split",
        "groups taken by themselves, each as wide as it needs, get the same",
        split,
        claimed="whitening reads the whole batch; a transport always gets it whole",
    ),
]

GATE = [
    *BOTH,
    Property(
        "future", "a gate does not depend on the reward, nor on tokens from t on or how many follow", future, waivable=True
    ),
    Property(
        "split",
        "groups taken by themselves, each as wide as it needs, get the same",
        split,
        claimed="controls read the whole batch; a gate always gets it whole",
    ),
]


class _Reading(Rollout):
    """A rollout that remembers which of its fields were read."""

    def __getattribute__(self, name: str) -> Any:
        seen = object.__getattribute__(self, "__dict__").get("_seen")
        if seen is not None:
            seen.add(name)
        return object.__getattribute__(self, name)


def show(operator: Any, case: Case) -> str:
    """The case's rollout, of it what the operator reads."""
    rollout = case.rollout(operator.statistics)
    watched = _Reading(**{field.name: getattr(rollout, field.name) for field in fields(rollout)})
    watched.__dict__["_seen"] = seen = {"mask", "rewards", "groups"} if isinstance(operator, Transport) else {"mask"}
    try:
        operator(watched)
    except Exception:
        seen |= {"values"}
    read = {field.name: getattr(rollout, field.name) for field in fields(rollout) if field.name in seen}
    if "stats" in read and operator.statistics:
        read["stats"] = {name: x for name, x in read["stats"].items() if name in operator.statistics}
    return python(**read)
