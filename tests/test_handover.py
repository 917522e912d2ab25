"""Who gave a bad number, or changed what it was given, is named where it handed it over, in the first iteration."""

from __future__ import annotations

import decimal
import re
from asyncio import CancelledError
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_mask, make_rollout
from held import Held
from test_training import build, run, tiny

from cct.critic.combined import GroupCritic
from cct.errors import TrainingStopped, attributed_to
from cct.evidence import Evidence
from cct.evidence.base import plain
from cct.geometry.ppo_clip import PPOClip
from cct.handover import HandoverError, check, read_only
from cct.rollout import Credit, Prompt, Response
from cct.statistic import TokenEntropy
from cct.system.signals import Interrupted
from cct.training.evaluation import evaluate
from cct.training.judge import judge
from cct.transport import Gate, Transport, transports
from cct.transport.gate import EntropyGate, ProductGate

NAN, INF = float("nan"), float("inf")


# --- the check itself -----------------------------------------------------------------------------
def test_an_output_is_a_float_tensor_of_the_mask_s_shape_finite_and_in_range_where_the_mask_is_true():
    mask = make_mask("110", "100")
    check("it", torch.tensor([[0.0, 1.0, NAN], [1 + 1e-7, INF, -4.0]]), mask, within=(0, 1))
    for found, says in [
        (None, "it returned None; expected a float tensor of shape (2, 3)"),
        (3.0, "it returned a value of type float; expected"),
        (torch.ones(2, 3, dtype=torch.long), "it returned a tensor of torch.int64 and shape (2, 3); expected"),
        (torch.ones(2, 2), "it returned a tensor of torch.float32 and shape (2, 2); expected"),
        (torch.tensor([[NAN, 0, 0], [0, 0, 0]]), "NaN or infinity from it"),
        (torch.tensor([[0, -INF, 0], [0, 0, 0]]), "NaN or infinity from it"),
        (torch.tensor([[0, 1, 2], [2, 0, 0]]).float(), "it returned 2; expected numbers in [0, 1] at every token"),
        (torch.tensor([[-1e-3, 1, 2], [0, 0, 0]]), "it returned -0.001; expected numbers in [0, 1] at every token"),
    ]:
        with pytest.raises(HandoverError, match=re.escape(says)):
            check("it", found, mask, within=(0, 1))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda r: r.rewards.mul_(2), "rewards"),
        (lambda r: r.mask.__setitem__((0, 0), False), "mask"),
        (lambda r: r.values.detach().add_(0), "values"),
        (lambda r: r.stats["x"].zero_(), r"stats\['x'\]"),
        (lambda r: r.stats.pop("x"), r"stats\['x'\]"),
        (lambda r: r.stats.update(y=torch.ones(1)), r"stats\['y'\]"),
        (lambda r: r.moments.update(x=(0.0, 2.0)), r"moments\['x'\]"),
        (lambda r: setattr(r, "logprobs", r.logprobs.clone()), "logprobs"),
        (lambda r: setattr(r, "seed", 5), "seed"),
    ],
)
def test_a_change_made_in_place_is_seen(change, what):
    rollout = make_rollout(statistics=["x"]).replace(moments={"x": (0.0, 1.0)})
    with (
        pytest.raises(HandoverError, match=rf"^it changed {what} in place; it must work on a copy"),
        read_only("it", vars(rollout)),
    ):
        change(rollout)
    with read_only("it", vars(rollout), contents=True):
        rollout.rewards.mul(2)


def test_a_change_behind_the_count_of_changes_is_seen_where_contents_are_compared():
    for change in (lambda r: r.rewards.data.add_(1), lambda r: r.rewards.numpy().__setitem__((0, 0), 7.0)):
        rollout = make_rollout()
        with pytest.raises(HandoverError, match="changed rewards"), read_only("it", vars(rollout), contents=True):
            change(rollout)


# --- transports, gates, statistics, critics -------------------------------------------------------
class Fixed(Gate):
    """The same number everywhere."""

    number: float = 0.5
    harm: str = ""

    model_config = {"allow_inf_nan": True}

    def __call__(self, rollout):
        if self.harm == "rollout":
            rollout.values.mul_(2)
        if self.harm == "data":
            rollout.rewards.data.add_(1)
        return torch.full_like(rollout.rewards, self.number)


class Mine(Transport):
    """A transport with a fault."""

    fault: str = ""

    def __call__(self, rollout):
        credit = {name: rollout.rewards.clone() for name in ("advantages", "value_targets", "gate")}
        if self.fault in credit:
            credit[self.fault] = torch.full_like(rollout.rewards, NAN)
        elif self.fault == "range":
            credit["gate"] = torch.full_like(rollout.rewards, -1.0)
        elif self.fault == "mask":
            rollout.mask[0] = False
        elif self.fault == "stats":
            rollout.stats["entropy"] = rollout.stats["entropy"] * 2
        return Credit(**credit)


class Broken(TokenEntropy):
    """A statistic that is NaN."""

    def measure(self, forward):
        return forward.entropy * NAN


class OfBroken(EntropyGate):
    """A gate of it."""

    @property
    def statistics(self):
        return {"broken": Broken()}


class Baseline(GroupCritic):
    """A baseline with a fault."""

    fault: str = ""

    def baseline(self, rollout, targets, bounds):
        if self.fault == "place":
            rollout.values.zero_()
        return rollout.replace(values=rollout.values * NAN)


@pytest.fixture(scope="module")
def made():
    recipe = tiny("compo")
    agent, tokenizer, _ = build(recipe)
    return recipe, agent, tokenizer, Held(recipe, agent, tokenizer).sampler.sample(1).rows


def stopped(made, iteration: int = 1, **parts: Any) -> str:
    """What the run says that has these parts."""
    recipe, agent, tokenizer, sampled = made
    with pytest.raises(TrainingStopped) as caught:
        Held(recipe.model_copy(update=parts), agent, tokenizer, rows=sampled).collect(iteration)
    return str(caught.value)


def gated(gate: Gate) -> Transport:
    return transports["comp_gae"](gate=gate)


@pytest.mark.parametrize(
    ("transport", "says"),
    [
        (gated(Fixed(number=2)), "gate 'Fixed' (transport.gate) returned 2 in iteration 1; expected numbers in [0, 1]"),
        (gated(Fixed(number=-1)), "gate 'Fixed' (transport.gate) returned -1 in iteration 1"),
        (gated(Fixed(number=NAN)), "NaN or infinity from gate 'Fixed' (transport.gate) in iteration 1"),
        (gated(ProductGate(parts=["turn", Fixed(number=INF)])), "NaN or infinity from gate 'Fixed' (transport.gate.parts.1)"),
        (gated(Fixed(harm="rollout")), "gate 'Fixed' (transport.gate) changed rollout.values in place in iteration 1"),
        (gated(Fixed(harm="data")), "transport 'comp_gae' changed rollout.rewards in place in iteration 1"),
        (gated(OfBroken()), "NaN or infinity from statistic 'broken' (Broken) in iteration 1"),
        (Mine(fault="advantages"), "NaN or infinity from transport 'Mine' (advantages) in iteration 1"),
        (Mine(fault="value_targets"), "NaN or infinity from transport 'Mine' (value_targets) in iteration 1"),
        (Mine(fault="gate"), "NaN or infinity from transport 'Mine' (gate) in iteration 1"),
        (Mine(fault="range"), "transport 'Mine' returned -1 as gate in iteration 1; expected numbers in [0, 1]"),
        (Mine(fault="mask"), "transport 'Mine' changed rollout.mask in place in iteration 1"),
        (Mine(fault="stats"), "transport 'Mine' changed rollout.stats['entropy'] in place in iteration 1"),
        (
            transports["high_entropy"](of=Mine(fault="advantages")),
            "NaN or infinity from transport 'Mine' (transport.of) (advantages) in iteration 1",
        ),
    ],
)  # fmt: skip
def test_the_part_of_a_transport_that_gave_it_is_named(transport, says, made):
    assert stopped(made, transport=transport).startswith(says)


def test_a_critic_s_values_are_blamed_on_the_critic_and_not_on_who_reads_them(made):
    bias = made[1].critic.out.bias
    try:
        torch.nn.init.constant_(bias, NAN)
        assert stopped(made).startswith("NaN or infinity from critic 'tac' (values) in iteration 1")
    finally:
        torch.nn.init.zeros_(bias)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("place", "critic 'Baseline' (baseline) changed values in place in iteration 1"),
        ("", "NaN or infinity from critic 'Baseline' (baseline) in iteration 1"),
    ],
)
def test_a_critic_s_baseline_is_checked(fault, says, made):
    critic = Baseline(fault=fault)
    type(critic).use = "Baseline"
    assert stopped(made, critic=critic).startswith(says)


class NewRewards(GroupCritic):
    """A baseline that hands back more than values."""

    def baseline(self, rollout, targets, bounds):
        return rollout.replace(rewards=rollout.rewards + 1, groups=None)


def test_nothing_but_the_values_of_a_critic_s_baseline_is_taken(made):
    recipe, agent, tokenizer, sampled = made
    held = Held(recipe.model_copy(update={"critic": NewRewards()}), agent, tokenizer, rows=sampled)
    collected = held.collect(1)
    assert collected.rollout.groups is not None
    assert float(collected.rollout.rewards.sum()) == pytest.approx(sum(sum(row.rewards) for row in sampled))


@pytest.mark.parametrize(
    "error", [StopIteration("x"), GeneratorExit("x"), CancelledError("x"), SystemExit("x"), MemoryError("x")], ids=repr
)
def test_whatever_a_part_raises_stops_the_run_and_names_it(error):
    says = f"^gate 'mine' in iteration 3: {type(error).__name__}: x"
    with pytest.raises(TrainingStopped, match=says), attributed_to("gate 'mine'", 3), read_only("it", {}):
        raise error
    with pytest.raises(TrainingStopped, match=f"^evidence 'raises' failed: {type(error).__name__}: x"):
        judge([Raises(error=error)], [Prompt("p")], [Response("a", (5,), True)])


def test_control_c_within_a_part_passes():
    with pytest.raises(Interrupted), attributed_to("gate 'mine'", 3):
        raise Interrupted


# --- geometries -----------------------------------------------------------------------------------
class Harmful(PPOClip):
    """A geometry with a fault."""

    fault: str = ""

    def surrogate(self, logprobs, old_logprobs, advantages, mask, marked):
        if self.fault == "data":
            advantages.data.add_(1)
        elif self.fault == "logprobs":
            logprobs.data.add_(1)
        elif self.fault == "place":
            advantages.neg_()
        loss, metrics = super().surrogate(logprobs, old_logprobs, advantages, mask, marked)
        if self.fault == "gradient":
            loss = loss.detach()
        elif self.fault == "complex":
            loss = loss.to(torch.complex64)
        elif self.fault == "metric":
            metrics["mine"] = torch.full_like(loss, NAN)
        return loss, metrics


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("place", "geometry 'ppo_clip' changed advantages in place in iteration 1; it must work on a copy"),
        ("data", "geometry 'ppo_clip' changed advantages in place in iteration 1; it must work on a copy"),
        ("logprobs", "geometry 'ppo_clip' changed logprobs in place in iteration 1; it must work on a copy"),
        ("complex", "geometry 'ppo_clip' returned a tensor of torch.complex64"),
        ("gradient", "geometry 'ppo_clip' returned a loss without a gradient in iteration 1; compute it from `logprobs`"),
        ("metric", "NaN or infinity from geometry 'ppo_clip' (metric 'mine') in iteration 1"),
    ],
)
def test_a_geometry_with_a_fault_is_named_in_the_first_iteration(fault, says, tmp_path):
    recipe = tiny("grpo", "evidence.0.pattern=(.)").model_copy(update={"geometry": Harmful(fault=fault)})
    with pytest.raises(TrainingStopped, match=f"^{re.escape(says)}"):
        run(recipe, tmp_path)


# --- evidence -------------------------------------------------------------------------------------
class Gives(Evidence):
    """Whatever it is given, once for each response."""

    verdict: Any = None
    harm: bool = False

    def __call__(self, prompt, response):
        if self.harm:
            prompt.meta["seen"].append(1)
        return self.verdict


class Raises(Evidence):
    """Whatever it is given."""

    use = "raises"
    error: Any = None

    def __call__(self, prompt, response):
        raise self.error


class Odd:
    """Neither a number nor printable."""

    def __float__(self):
        raise RuntimeError("no")

    def __repr__(self):
        raise RuntimeError("neither")


NO_NUMBERS = {
    "huge": 10**400,
    "more digits than Python prints": 10**5000,
    "negative": -(10**400),
    "fraction": Fraction(10**400),
    "decimal": decimal.Decimal("1e400"),
    "decimal NaN": decimal.Decimal("sNaN"),
    "infinite": -INF,
    "numpy NaN": np.float32(NAN),
    "complex": 1j,
    "numpy complex": np.complex64(0.5),
    "complex tensor": torch.tensor(0.5j),
    "text": "0.5",
    "several texts": ["0.5"],
    "bytes": b"1",
    "bytearray": bytearray(b"1"),
    "mapping": {0: 0.5},
    "set": {0.5},
    "matrix": torch.ones(1, 1),
    "outside float32": -1e300,
    "outside float32, of several": [-1e300],
    "no number": Odd(),
}


@pytest.mark.parametrize("verdict", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_what_is_no_number_is_a_failure_of_the_evidence_that_on_error_decides_about(verdict):
    prompts, responses = [Prompt("p")], [Response("a", (5,), True)]
    part = Gives.model_construct(**dict(Gives().__dict__, verdict=verdict))
    type(part).use = "gives"
    with pytest.raises(TrainingStopped, match="^evidence 'gives' failed: it returned .*expected .*, judging 'a'"):
        judge([part], prompts, responses)
    for choice, kept in (("zero", True), ("drop", False)):
        lenient = part.model_copy(update={"on_error": choice})
        assert judge([lenient], prompts, responses) == ([[0.0]], [kept], {"errors/gives": 1})


@pytest.mark.parametrize(
    ("verdict", "number"),
    [
        (True, 1.0),
        (np.bool_(False), 0.0),
        (np.int64(1), 1.0),
        (np.float16(0.5), 0.5),
        (decimal.Decimal("0.25"), 0.25),
        (Fraction(1, 3), 1 / 3),
        (-0.0, 0.0),
        (5e-324, 5e-324),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor([0.5], dtype=torch.bfloat16, requires_grad=True), [0.5]),
        (np.array([0.5], dtype=np.float16), [0.5]),
        ([True, np.float32(0.5), decimal.Decimal(1)], [1.0, 0.5, 1.0]),
        (range(2), [0.0, 1.0]),
    ],
)
def test_what_is_a_number_counts_as_one(verdict, number):
    assert plain(verdict) == number


@pytest.mark.parametrize(("verdict", "total"), [(2.0, "2"), (-1e-3, "-0.001"), ([0.75, 0.75], "1.5"), (1e12, "1e+12")])
def test_evidence_outside_its_own_bounds_is_refused_and_named(verdict, total):
    part = Gives(verdict=verdict)
    type(part).use = "gives"
    says = rf"^evidence 'gives' failed: it returned {re.escape(total)}, outside its bounds \[0, 1\]"
    with pytest.raises(TrainingStopped, match=says):
        judge([part], [Prompt("p")], [Response("ab", (5, 6), True)])
    rounded = Gives(verdict=[0.7, 0.3 + 1e-7])
    assert judge([rounded], [Prompt("p")], [Response("ab", (5, 6), True)])[1] == [True]


def test_evidence_that_adds_to_an_empty_meta_is_refused():
    class Adds(Evidence):
        """A key."""

        use = "adds"

        def __call__(self, prompt, response):
            prompt.meta["seen"] = 1
            return 0.0

    with pytest.raises(TrainingStopped, match="^evidence 'adds' changed the meta"):
        judge([Adds()], [Prompt("p")], [Response("a", (5,), True)])


def test_evidence_that_changes_a_prompt_s_meta_is_refused_and_named():
    prompt = Prompt("p", meta={"seen": []})
    part = Gives(verdict=1.0, harm=True)
    type(part).use = "gives"
    with pytest.raises(TrainingStopped, match="^evidence 'gives' changed the meta of the prompt 'p' in place"):
        judge([part], [prompt], [Response("a", (5,), True)])
    assert judge([Gives(verdict=1.0)], [prompt, prompt], [Response("a", (5,), True)] * 2)[0] == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("verdicts", "says"),
    [
        ([1.0], "ValueError: judge_batch returned 1 verdicts for 2 responses"),
        (None, "TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_a_batch_of_verdicts_that_is_none_or_too_short_is_a_failure_of_the_evidence(verdicts, says):
    class Together(Evidence):
        """All at once."""

        use = "together"

        def judge_batch(self, prompts, responses):
            return verdicts

    prompts, responses = [Prompt("p")] * 2, [Response("a", (5,), True)] * 2
    with pytest.raises(TrainingStopped, match=f"^evidence 'together' failed: {says}"):
        judge([Together()], prompts, responses)
    assert judge([Together(on_error="drop")], prompts, responses)[1] == [False, False]


# --- tasks ----------------------------------------------------------------------------------------
def test_a_task_that_gives_too_few_prompts_is_named(made):
    recipe, agent, tokenizer, _ = made

    class Short(type(recipe.task)):
        """One too few."""

        def prompts(self, seed, start, count):
            return super().prompts(seed, start, count)[:-1]

    short = recipe.model_copy(update={"task": Short(steps=2)})
    count = recipe.training.prompts_per_iteration
    with pytest.raises(TrainingStopped, match=f"in iteration 2: ValueError: it returned {count - 1} prompts; expected {count}"):
        Held(short, agent, tokenizer).sampler.sample(2)


def test_a_task_without_held_out_prompts_is_told_from_one_whose_prompts_are_too_long(made):
    recipe, agent, tokenizer, _ = made

    class Empty(type(recipe.task)):
        """Nothing to evaluate on."""

        def held_out(self):
            return []

    empty = recipe.model_copy(update={"task": Empty(steps=2)})
    with pytest.raises(TrainingStopped, match="^eval: the task has no held-out prompts$"):
        evaluate(Held(empty, agent, tokenizer).sampler)
