"""Properties that transports and gates share, and those of gates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from cct.agent.agent import Agent
from cct.registry import RAISED
from cct.rollout import Credit, Rollout
from cct.transport import Gate, Transport

from .base import Broken, Malformed, Property
from .cases import (
    NOISE,
    Case,
    cast,
    full,
    noisy,
    numbers,
    padded,
    padding_left,
    python,
    rows_of,
    same,
    stretched,
    with_copy,
    without_gaps,
)
from .critics import Batch, random_actor
from .watch import Meddles, NoHalf, alone, grows_linearly, identical, later, unchanged

ROUNDING = 1e-4  # of the greatest number: sums of float32 in another order
BFLOAT16 = 0.06  # of the greatest number: eight bits, through a handful of sums and a division
CALLS = itertools.count()  # makes rollouts that no call before has seen
NUMBERS = ("rewards", "values", "bootstrap", "logprobs", "rollout_logprobs", "reference_logprobs", "teacher_logprobs")
PROVIDED = {  # what a part asks for -> the fields of a rollout that it then finds
    "values": ("values", "bootstrap"),
    "reference": ("reference_logprobs",),
    "teacher": ("teacher_logprobs",),
    "history": ("prompt_values",),
    "greedy": ("greedy_scores",),
    "anchors": ("anchors",),
    "environment": ("turns", "versions"),
}
CHANGES = (1.0, -2.5, 5.0)  # of a number, of which one at least must show


def outputs(operator: Transport | Gate, rollout: Rollout, ask: Callable[[Rollout], Any] | None = None) -> dict[str, Tensor]:
    """What an operator returns, by name, without what a gate holds at masked positions. ask: default the operator itself."""
    try:
        result = (ask or operator)(rollout)
    except RAISED as error:
        raise Malformed(f"it raised {type(error).__name__}: {error}") from error
    found: dict[str, Any] = {"gate": result}
    if isinstance(operator, Transport):
        if not isinstance(result, Credit):
            raise Malformed(f"it returned a {type(result).__name__}; expected a Credit")
        found = {"advantages": result.advantages, "value_targets": result.value_targets, "gate": result.gate}
    for name, x in found.items():
        if x is not None and not (isinstance(x, Tensor) and x.shape == rollout.mask.shape):
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise Malformed(f"{name} is {shape}; expected the mask's shape {tuple(rollout.mask.shape)}")
    return {name: x.masked_fill(~rollout.mask, 0.0) if name == "gate" else x for name, x in found.items() if x is not None}


def agree(
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
        raise Broken(f"{when}, it returns {', '.join(got)} instead of {', '.join(expected)}")
    for name, x in expected.items():
        same(name, x, back(got[name]), when, tolerance)


# --- properties of both ---------------------------------------------------------------------------
def form(operator: Any, case: Case) -> None:
    well_formed(operator, case.rollout(operator.statistics))


def well_formed(operator: Any, rollout: Rollout) -> None:
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
        agree(operator, rollout, noisy(rollout, value), f"with {value} at masked positions", tolerance=0.0)


def gap(operator: Any, case: Case) -> None:
    rollout = case.rollout(operator.statistics)
    packed, index = without_gaps(rollout)
    expected, got = outputs(operator, rollout), outputs(operator, packed)
    for name, x in expected.items():
        same(f"{name} of its steps", x.gather(1, index), got[name], "with the gaps removed", ROUNDING)


def observation(operator: Any, case: Case) -> None:
    rollout = case.rollout(operator.statistics)
    longer, places = stretched(rollout, 4)
    agree(operator, rollout, longer, "with every gap four times as long", back=lambda x: x.gather(1, places))


def padding(operator: Any, case: Case) -> None:
    rollout, width = case.rollout(operator.statistics), len(case.masked[0])
    for right in (1, 70):
        more = padded(rollout, right, left=2)
        agree(operator, rollout, more, f"with {right} more positions of padding", back=lambda x: x[:, :width])
    moved, index = padding_left(rollout)
    expected, got = outputs(operator, rollout), outputs(operator, moved)
    for name, x in expected.items():
        same(name, x.gather(1, index), got[name], "with the padding on the left", ROUNDING)


def order(operator: Any, case: Case) -> None:
    rollout = case.rollout(operator.statistics)
    rows = torch.arange(len(rollout.mask))
    for index in (rows.roll(1), rows.flip(0)):
        other = rows_of(rollout, index)
        agree(operator, rollout, other, f"in the order {index.tolist()}", back=lambda x, index=index: x[index.argsort()])  # type: ignore[misc]


def split(operator: Any, case: Case) -> None:
    rollout = with_moments(case, operator)
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
    with NoHalf():
        found = outputs(operator, rollout)
        exact = outputs(operator, cast(rollout, torch.float64))
    for name, x in found.items():
        same(name, exact[name], x, "in float32 against float64", ROUNDING)
    short = cast(rollout, torch.bfloat16)
    exact = outputs(operator, cast(short, torch.float64))
    for name, x in outputs(operator, short).items():
        same(name, exact[name], x, "from bf16 inputs against float64", BFLOAT16)


def determinism(operator: Any, case: Case) -> None:
    """Asked, asked about something else, and asked again a day later; then the same of another instance of it.

    The rollouts are new to the process, so that one who remembers has nothing to remember. An error is an answer, too.
    """
    case = replace(case, seed=case.seed + 1000 * next(CALLS))
    turned = replace(case, seed=case.seed + 1, groups=case.groups[::-1], rewards=case.rewards[::-1], masked=case.masked[::-1])

    def answer(asked: Any, about: Case, seed: int) -> dict[str, Tensor] | str:
        rollout = about.rollout(operator.statistics)
        try:
            with alone(seed):
                found = outputs(asked, rollout)
        except Meddles:
            raise
        except Broken as error:
            return str(error)
        unchanged("rollout", about.rollout(operator.statistics), rollout)
        return found

    def agrees(expected: dict[str, Tensor] | str, got: dict[str, Tensor] | str, when: str) -> None:
        if isinstance(expected, str) or isinstance(got, str):
            if expected != got:
                raise Broken(f"{when}, the same rollout gives {got} instead of {expected}")
        else:
            for name, x in expected.items():
                if not identical(x, got[name]):
                    raise Broken(f"{when}, {name} of the same rollout is {numbers(got[name])} instead of {numbers(x)}")

    first = answer(operator, case, 0)
    answer(operator, turned, 1)
    with later():
        agrees(first, answer(operator, case, 2), "called again")
    another = type(operator)(**{name: getattr(operator, name) for name in type(operator).model_fields})
    agrees(first, answer(another, case, 3), "of another instance with the same knobs")


def garbage(operator: Any, case: Case) -> None:
    """Where a number counts, NaN in its place must be seen: what hides it trains on garbage."""
    rollout = case.rollout(operator.statistics)
    token = case.token(rollout.mask)
    if token is None:
        return
    row, t = token
    before = outputs(operator, rollout)

    def changed(x: Tensor, value: float) -> Tensor:
        x = x.clone()
        x[(row, t) if x.dim() == 2 else row] = value
        return x

    def shows(name: str, value: float) -> bool:
        if name in rollout.stats:
            other = rollout.replace(stats={**rollout.stats, name: changed(rollout.stats[name], value)})
        else:
            other = rollout.replace(**{name: changed(getattr(rollout, name), value)})
        try:
            found = outputs(operator, other)
        except Broken:
            return True
        if math.isnan(value):
            return not all(bool(x.isfinite().all()) for x in found.values())
        return any(float((x - found[key]).abs().max()) > ROUNDING for key, x in before.items())

    for name in (*NUMBERS, *rollout.stats):
        if any(shows(name, change) for change in CHANGES) and not shows(name, math.nan):
            where = f"{name}[{row}]" if name == "bootstrap" else f"{name}[{row}, {t}]"
            raise Broken(
                f"{where} counts, and where it is NaN what comes out is finite: garbage in must be NaN out, or an error"
            )


def dropped(operator: Any, case: Case) -> None:
    """Responses that could not be judged stay in the batch with an empty mask."""
    rollout = case.rollout(operator.statistics)
    more = with_copy(rollout, 0)
    empty = torch.arange(len(more.mask)) == len(rollout.mask)
    assert more.bootstrap is not None
    more = more.replace(
        mask=more.mask & ~empty.unsqueeze(1), truncated=more.truncated & ~empty, bootstrap=more.bootstrap * ~empty
    )
    agree(operator, rollout, more, "with a dropped response added", back=lambda x: x[: len(rollout.mask)])


def needs(operator: Any, case: Case) -> None:
    """What a part does not ask for is not there in a run: no values without a critic, no statistic that nobody measures."""
    rollout = case.rollout(operator.statistics)
    absent: dict[str, Any] = {name: None for need, names in PROVIDED.items() if need not in operator.needs for name in names}
    if not getattr(operator, "branches", 0):
        absent |= {"starts": None, "branch_values": None}
    if "environment" not in operator.needs:
        absent |= {"components": {}}
    kept = {*operator.statistics, "entropy", *(["value_disagreement"] if "disagreement" in operator.needs else [])}
    absent |= {what: {name: x for name, x in getattr(rollout, what).items() if name in kept} for what in ("stats", "moments")}
    when = (
        f"without what its `needs` and `statistics` do not name ({', '.join(name for name, x in absent.items() if x is None)})"
    )
    try:
        agree(operator, rollout, rollout.replace(**absent), when, tolerance=0.0)
    except Malformed as error:
        outputs(operator, rollout)
        raise Broken(f"{when}, {error}") from error


def short(operator: Any, case: None) -> None:
    shapes = [[[True]], [[True], [True]], [[False]], [[True, True], [False, False]], [[False, False], [False, True]]]
    for steps in shapes:
        mask = torch.tensor(steps)
        whole = full(mask.shape[0], mask.shape[1], operator.statistics)
        rollout = whole.replace(mask=mask, rewards=whole.rewards * mask)
        try:
            well_formed(operator, rollout)
        except Broken as error:
            raise type(error)(f"with the mask {numbers(mask)}: {error}") from error


def length(operator: Any, case: None) -> None:
    def make(tokens: int) -> Callable[[], None]:
        rollout = full(4, tokens, operator.statistics)
        return lambda: well_formed(operator, rollout)

    for tokens in (1, 2, 65):
        make(tokens)()
    grows_linearly(make)


def with_moments(case: Case, operator: Any) -> Rollout:
    """As in any iteration but the first, where a batch's own moments stand in."""
    rollout = case.rollout(operator.statistics)
    return rollout.replace(moments={name: (0.5, 0.3) for name in rollout.stats})


# --- of gates -------------------------------------------------------------------------------------
def future(operator: Gate, case: Case) -> None:
    rollout = with_moments(case, operator)
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

    emitted = {
        name: changed(getattr(rollout, name), t)
        for name in ("logprobs", "rollout_logprobs", "reference_logprobs", "teacher_logprobs")
    }
    assert rollout.values is not None and rollout.bootstrap is not None
    unknown = {
        "later tokens and what was read after them": rollout.replace(
            **emitted,
            input_ids=ids,
            values=changed(rollout.values, t + 1),
            stats={name: changed(x, t + 1) for name, x in rollout.stats.items()},
        ),
        "the rewards": rollout.replace(rewards=changed(rollout.rewards, 0), bootstrap=rollout.bootstrap + 1),
        "the number of later tokens": rollout.replace(mask=mask, truncated=~rollout.truncated),
    }
    for what, other in unknown.items():
        after = outputs(operator, other)["gate"][row, : t + 1]
        same(f"gate[{row}, :{t + 1}]", before, after, f"with other values of {what}", ROUNDING)


def measured(operator: Gate, case: None) -> None:
    """`future` and `padding` again, with the gate's statistics measured in a forward of a random model."""
    actor = random_actor()
    config = actor.config
    try:
        for what in operator.statistics.values():
            what.fits(config.num_hidden_layers, config.num_attention_heads)
    except ValueError:
        return  # it is for larger models
    batch = Batch((3, 2, 4), (6, 5, 1), 0, 0)

    def gates(since: int | None = None, left: int = 0) -> Tensor:
        ids, seen, width = batch.tokens(left)
        if since is not None:
            ids[0, ids.shape[1] - width + since :] = 15 - ids[0, ids.shape[1] - width + since :]
        try:
            with torch.no_grad():
                reading = Agent(actor, None)(ids, seen, width, statistics=operator.statistics)
        except Exception as error:
            raise Broken(f"measuring its statistics raised {type(error).__name__}: {error}") from error
        mask = seen[:, -width:].bool()
        stats = {**reading.stats, "entropy": reading.entropy}
        moments = {name: (0.5, 0.3) for name in stats}
        numbers = torch.zeros(mask.shape)
        rollout = Rollout(
            ids, seen, mask, numbers, torch.arange(len(ids)), ~mask[:, 0], reading.logprobs, reading.logprobs, numbers,
            numbers[:, 0], stats=stats, moments=moments,
        )  # fmt: skip
        return outputs(operator, rollout)["gate"]

    plain = gates()
    for t in range(plain.shape[1]):
        after = gates(since=t)[0, : t + 1]
        same(f"gate[0, :{t + 1}]", plain[0, : t + 1], after, f"with other tokens from {t} on", ROUNDING)
    same("gate", plain, gates(left=3), "with 3 more positions of padding before the prompts", ROUNDING)


# --- the lists ------------------------------------------------------------------------------------
BOTH = [
    Property(
        "determinism",
        "the same rollout gives the same result and stays unchanged; no global random generator is used",
        determinism,
        cases=0.5,
    ),
    Property("form", "[B, T], finite, 0 where masked; value targets where values are needed; gates in [0, 1]", form),
    Property("needs", "it works without anything that its `needs` and `statistics` do not name", needs, cases=0.25),
    Property("noise", "the content of masked positions, NaN included, changes no bit of the result", noise),
    Property("garbage", "NaN in a number that matters gives NaN or an error", garbage, cases=0.25),
    Property("gap", "a response with a gap equals the one without it", gap, waivable=True),
    Property(
        "observation",
        "the length of an observation between two turns does not matter",
        observation,
        cases=0.5,
        waivable=True,
        excused=lambda operator: f"it waives `padding`: {operator.waives['padding']}" if "padding" in operator.waives else "",
    ),
    Property("padding", "neither the amount nor the side of padding matters", padding, waivable=True),
    Property("order", "the order of the responses does not matter", order, waivable=True),
    Property("dropped", "a response without trainable tokens has no effect", dropped, waivable=True),
    Property("precision", "float32 and bf16 inputs agree with float64; nothing is computed below float32", precision),
    Property("short", "one-token and empty responses, and batches of nothing else", short, cases=0),
    Property("length", "1 to 16,384 tokens in O(B*T) memory", length, cases=0),
]

GATE = [
    *BOTH,
    Property("future", "g_t does not depend on rewards, on tokens from t on, or on how many follow", future, waivable=True),
    Property(
        "measured",
        "its statistics at t do not depend on tokens from t on, or on padding",
        measured,
        cases=0,
        waivable=True,
        excused=lambda gate: f"it waives `future`: {gate.waives['future']}" if "future" in gate.waives else "",
    ),
    Property(
        "split",
        "each group computed separately, without extra padding, gets the same result",
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
