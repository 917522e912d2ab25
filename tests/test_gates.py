"""Gates: the attention gate by hand, and what each control keeps and destroys of it."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from conftest import make_mask, make_rollout, padded, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.testing import assert_close

from cct.agent.agent import Agent
from cct.geometry import geometries
from cct.rollout import Credit, Rollout
from cct.statistic import TokenEntropy
from cct.tools.conformance import check
from cct.transport import Gate, gates, transports

AttentionGate = gates["attention"]
NAN = float("nan")


def of_statistic(gate: Gate, statistic: list[list[float]] | torch.Tensor, **fields) -> Rollout:
    """A rollout whose statistic of this gate is given; every token a step unless a mask is given."""
    (name,) = gate.statistics
    statistic = torch.as_tensor(statistic, dtype=torch.float32)
    mask = fields.pop("mask", torch.ones(statistic.shape, dtype=torch.bool))
    return make_rollout(mask=mask, stats={name: statistic}, **fields)


def moments(gate: Gate, mean: float, std: float) -> dict[str, tuple[float, float]]:
    return dict.fromkeys(gate.statistics, (mean, std))


def linear_gate(**knobs) -> Gate:
    """A gate from 0.5 to 1, for a statistic of mean 0 and deviation 1 in `linear_rollout`."""
    return AttentionGate(low=0.5, high=1.0, **knobs)


def linear_rollout(statistic, **fields) -> Rollout:
    gate = linear_gate()
    return of_statistic(gate, statistic, moments=moments(gate, 0.0, 1.0), **fields)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# --- the attention gate ---------------------------------------------------------------------------
def test_attention_gate_by_hand():
    gate = AttentionGate(low=0.9, high=1.0)
    rollout = of_statistic(gate, [[0.2, 0.5, 0.8]], moments=moments(gate, 0.5, 0.3))
    assert_close(gate(rollout), torch.tensor([[0.9268941, 0.95, 0.9731059]]))  # z = -1, 0, 1


def test_slope_and_sign():
    steep, reversed_ = AttentionGate(low=0.9, slope=4.0), AttentionGate(low=0.9, slope=4.0, sign=-1)
    rollout = of_statistic(steep, [[0.2, 0.5, 0.8]], moments=moments(steep, 0.5, 0.3))
    assert_close(steep(rollout), torch.tensor([[0.9 + 0.1 * sigmoid(-4), 0.95, 0.9 + 0.1 * sigmoid(4)]]))
    assert_close(reversed_(rollout), steep(rollout).flip(1))
    assert steep(rollout).diff().gt(0).all()  # concentrated attention retains more


@given(
    seed=st.integers(0, 10**6),
    low=st.floats(0.01, 1),
    spread=st.floats(0, 1),
    slope=st.floats(0.01, 100),
    sign=st.sampled_from([1, -1]),
)
def test_gates_stay_between_their_bounds(seed, low, spread, slope, sign):
    gate = AttentionGate(low=low, high=low + (1 - low) * spread, slope=slope, sign=sign)
    statistic = torch.randn(3, 20, generator=torch.Generator().manual_seed(seed)) * 5
    result = gate(of_statistic(gate, statistic))
    assert result.min() >= gate.low - 1e-6 and result.max() <= gate.high + 1e-6


def test_half_lives_are_bounds():
    gate = AttentionGate(half_life=(10, 100))
    result = gate(of_statistic(gate, [[-1e6, 0.0, 1e6]], moments=moments(gate, 0.0, 1.0)))[0]
    assert result[0] ** 10 == pytest.approx(0.5, rel=1e-5) and result[2] ** 100 == pytest.approx(0.5, rel=1e-4)
    assert result[1] == pytest.approx((0.5**0.1 + 0.5**0.01) / 2)


@pytest.mark.parametrize(
    "knobs", [{"low": 0.9, "high": 0.8}, {"half_life": (20, 10)}, {"half_life": (0, 10)}, {"low": 0.0}, {"sign": 0}]
)
def test_bounds_that_make_no_sense_are_refused(knobs):
    with pytest.raises(ValidationError):
        AttentionGate(**knobs)


def test_without_earlier_iterations_the_batch_s_own_moments_of_steps_are_taken():
    gate = AttentionGate(low=0.9)
    mask = make_mask("111", "100")
    result = gate(of_statistic(gate, [[1, 2, 3], [2, NAN, 1e9]], mask=mask))
    z = 1 / math.sqrt(0.5)  # 1 2 3 2: mean 2, variance 1/2
    assert_close(result[mask], torch.tensor([0.9 + 0.1 * sigmoid(-z), 0.95, 0.9 + 0.1 * sigmoid(z), 0.95]))


def test_moments_of_earlier_iterations_go_before_the_batch_s_own():
    gate = AttentionGate(low=0.9)
    first = of_statistic(gate, [[1, 2, 3], [9, 9, 9]], moments=moments(gate, 2.0, 1.0))
    second = of_statistic(gate, [[1, 2, 3], [-70, 0, 5]], moments=moments(gate, 2.0, 1.0))
    assert torch.equal(gate(first)[0], gate(second)[0])  # what other responses do now does not matter
    assert_close(gate(first)[0], torch.tensor([0.9 + 0.1 * sigmoid(-1), 0.95, 0.9 + 0.1 * sigmoid(1)]))


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.0])
def test_a_statistic_that_does_not_vary_gives_the_middle(value):
    gate = AttentionGate(low=0.9)
    assert_close(gate(of_statistic(gate, torch.full((3, 7), value))), torch.full((3, 7), 0.95), atol=1e-3, rtol=0)


@given(seed=st.integers(0, 10**6), gamma=st.floats(0.3, 1.0), low=st.floats(0.3, 0.999))
def test_match_gamma_matches_the_mean_logarithm_over_steps(seed, gamma, low):
    gate = AttentionGate(low=low, match_gamma=gamma)
    rollout = make_rollout(6, 30, seed=seed, statistics=gate.statistics)
    matched, mask = gate(rollout), rollout.mask
    assert matched[mask].log().mean().item() == pytest.approx(math.log(gamma), rel=1e-3, abs=1e-6)
    plain = AttentionGate(low=low)(rollout)[mask]
    if gamma < 0.999:  # still the same order of tokens
        assert matched[mask][plain.argsort()].diff().ge(0).all()


def test_match_gamma_of_a_gate_without_decay():
    gate = AttentionGate(low=1.0, high=1.0, match_gamma=0.9)
    assert_close(gate(of_statistic(gate, [[0.1, 0.2]])), torch.full((1, 2), 0.9))


def test_statistics_are_named_by_their_knobs():
    parts = [{}, {"statistic": "renyi2"}, {"layers": "all"}, {"layers": (0, -1)}, {"layers": (0, 1)}, {"sinks": 2}]
    names = [name for knobs in parts for name in AttentionGate(**knobs).statistics]
    assert len(set(names)) == len(parts)
    assert AttentionGate(low=0.5, slope=3).statistics == AttentionGate().statistics  # one forward serves both
    asked = AttentionGate(statistic="renyi2", layers=(0, -1), sinks=2).statistics.popitem()[1]
    assert (asked.statistic, asked.layers, asked.sinks) == ("renyi2", (0, -1), 2)


class Undetached(Gate):
    """Its discounts carry the graph of whatever the statistic came from."""

    @property
    def statistics(self):
        return {"entropy": TokenEntropy()}

    def __call__(self, rollout):
        return rollout.stats["entropy"].sigmoid()


@pytest.mark.parametrize("gate", [AttentionGate(match_gamma=0.95), Undetached()])
def test_no_gradient_of_a_loss_reaches_what_a_gate_or_a_transport_read(gate):
    assert "FAILED" not in {verdict.outcome for verdict in check(gate, examples=5)}
    rollout = make_rollout(statistics=gate.statistics)
    live = {name: getattr(rollout, name).requires_grad_() for name in ("values", "bootstrap", "logprobs", "rewards")}
    stats = {name: x.requires_grad_() for name, x in rollout.stats.items()}
    credit = transports["comp_gae"](gate=gate)(rollout.replace(moments=moments(gate, 0.5, 0.3)))
    assert not credit.gate.requires_grad and not credit.advantages.requires_grad and not credit.value_targets.requires_grad
    logprobs = (rollout.logprobs.detach() + 0.01).requires_grad_()
    loss, _ = geometries["ppo_clip"]()(logprobs, live["logprobs"].detach(), credit.advantages, rollout.mask, None)
    loss.sum().backward()
    assert logprobs.grad is not None and all(x.grad is None for x in [*live.values(), *stats.values()])


def test_credit_is_detached_when_it_is_made_and_cannot_be_given_another_graph():
    live = torch.ones(1, 2, requires_grad=True)
    credit = Credit(2 * live, live + 1, gate=live.sigmoid())
    assert not any(x.requires_grad for x in (credit.advantages, credit.value_targets, credit.gate))
    assert credit.advantages.tolist() == [[2.0, 2.0]]
    with pytest.raises(FrozenInstanceError):
        credit.advantages = live


# --- controls: shuffle ----------------------------------------------------------------------------
@given(seed=st.integers(0, 10**6))
def test_shuffle_keeps_each_response_s_values_and_moves_nothing_else(seed):
    rollout = make_rollout(5, 40, seed=seed, statistics=linear_gate().statistics)
    plain, shuffled, mask = linear_gate()(rollout), gates["shuffle"](of=linear_gate())(rollout), rollout.mask
    assert torch.equal(shuffled[~mask], plain[~mask])
    for row in range(5):
        assert torch.equal(shuffled[row, mask[row]].sort().values, plain[row, mask[row]].sort().values)
        assert shuffled[row, mask[row]].prod().item() == pytest.approx(plain[row, mask[row]].prod().item(), rel=1e-4)
    assert not torch.equal(shuffled[0], plain[0])


def test_shuffle_of_a_response_does_not_know_the_others():
    statistic = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    other = statistic.clone()
    other[1:] += 1
    mask, other_mask = torch.ones(2, 3, 20, dtype=torch.bool)
    other_mask[1, 4:] = False
    shuffle = gates["shuffle"](of=linear_gate())
    assert torch.equal(shuffle(linear_rollout(statistic, mask=mask))[0], shuffle(linear_rollout(other, mask=other_mask))[0])


def test_shuffle_reaches_every_place():
    """Over seeds, the first gate of a response goes to each of its places about equally often."""
    shuffle, counts = gates["shuffle"](of=linear_gate()), torch.zeros(4)
    marked = linear_rollout([[9.0, 0, 0, 0]])
    for seed in range(400):
        counts[shuffle(marked.replace(seed=seed)).argmax()] += 1
    assert counts.min() > 60


# --- controls: position ---------------------------------------------------------------------------
def test_position_is_the_batch_s_mean_at_each_position():
    rollout = linear_rollout([[0, 1, 2], [4, -3, 1], [5, 5, 5]], mask=make_mask("111", "111", "000"))
    plain, profile = linear_gate()(rollout), gates["position"](of=linear_gate())(rollout)
    assert_close(profile[:2], plain[:2].mean(0).expand(2, 3))


@pytest.mark.parametrize("lengths", [(8, 8), (8, 9), (30, 31, 37), (64, 65), (100, 150), (7, 200)])
def test_position_destroys_what_is_particular_to_a_response(lengths):
    """Gates that differ between responses but not within one: nearly nothing of the difference is left."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    level = torch.arange(len(lengths)).float().unsqueeze(1).expand(mask.shape)
    rollout = linear_rollout(level, mask=mask)

    def spread(gate):
        return torch.stack([row[kept].mean() for row, kept in zip(gate(rollout), mask, strict=True)]).std()

    assert spread(gates["position"](of=linear_gate())) < 0.1 * spread(linear_gate())


def test_position_is_the_same_function_for_responses_of_other_lengths():
    """A gate that depends on the relative position only is kept."""
    lengths = torch.tensor([[60], [40], [20]])
    place = (torch.arange(60) + 0.5) / lengths
    rollout = linear_rollout(4 * place, mask=place < 1)
    plain, profile = linear_gate()(rollout), gates["position"](of=linear_gate())(rollout)
    assert (profile - plain)[rollout.mask].abs().max() < 0.03


def test_position_ignores_gaps_and_padding():
    rollout = linear_rollout([[0, NAN, 1, 2], [4, -3, 1, NAN]], mask=make_mask("1011", "1110"))
    without = linear_rollout([[0, 1, 2], [4, -3, 1]])
    position = gates["position"](of=linear_gate())
    assert_close(position(rollout)[rollout.mask], position(without).flatten())


# --- controls: swap -------------------------------------------------------------------------------
def test_swap_takes_another_response_s_gates():
    rollout = linear_rollout([[0, 1, 2], [4, -3, 1], [7, 7, 7], [5, 6, 7]], mask=make_mask("111", "111", "000", "111"))
    plain, swapped = linear_gate()(rollout), gates["swap"](of=linear_gate())(rollout)
    assert torch.equal(swapped[[0, 1, 3]], plain[[1, 3, 0]])  # the one without tokens is passed over


def test_swap_stretches_to_the_own_length():
    rollout = linear_rollout([[1, 2, NAN, NAN], [3, 4, 5, 6], [7, NAN, 8, 9]], mask=make_mask("1100", "1111", "1011"))

    def gate(*z):
        return torch.tensor([0.5 + 0.5 * sigmoid(x) for x in z])

    swapped = gates["swap"](of=linear_gate())(rollout)
    assert_close(swapped[0, :2], gate(4, 6))  # 3 4 5 6 at a quarter and three quarters of their length
    assert_close(swapped[1], gate(7, 8, 8, 9))
    assert_close(swapped[2, [0, 2, 3]], gate(1, 2, 2))


@given(seed=st.integers(0, 10**6), rows=st.integers(2, 5), width=st.integers(1, 30))
def test_swap_gives_only_values_of_one_other_response(seed, rows, width):
    rollout = make_rollout(rows, width, seed=seed, statistics=linear_gate().statistics)
    plain, swapped, mask = linear_gate()(rollout), gates["swap"](of=linear_gate())(rollout), rollout.mask
    assert torch.equal(swapped[~mask], plain[~mask])
    for row in mask.any(1).nonzero().flatten().tolist():
        sources = [set(plain[other, mask[other]].tolist()) for other in range(rows) if other != row]
        assert any(set(swapped[row, mask[row]].tolist()) <= source for source in sources)


def test_swap_of_one_response_changes_nothing():
    rollout = linear_rollout([[0, 1, 2], [5, 5, 5]], mask=make_mask("111", "000"))
    assert torch.equal(gates["swap"](of=linear_gate())(rollout), linear_gate()(rollout))


# --- controls: random and constant ----------------------------------------------------------------
def test_random_draws_from_the_values_of_steps():
    statistic = torch.tensor([[0.0, 1.0, 2.0, NAN]]).repeat(500, 1)
    rollout = linear_rollout(statistic, mask=make_mask("1110").expand(500, 4), seed=3)
    plain, drawn = linear_gate()(rollout), gates["random"](of=linear_gate())(rollout)
    for value in plain[0, :3]:  # each of the three equally often, at every position
        share = (drawn[:, :3] == value).float().mean(0)
        assert (share - 1 / 3).abs().max() < 0.08
    assert drawn[:, 3].isnan().all()
    assert not torch.equal(drawn[:, 0], drawn[:, 1])


def test_constant_takes_the_geometric_mean_of_steps():
    gate = gates["constant"](of=linear_gate())
    rollout = linear_rollout([[0, 2, NAN], [-1, 50, 50]], mask=make_mask("110", "100"))
    plain = [0.5 + 0.5 * sigmoid(z) for z in (0, 2, -1)]
    assert_close(gate(rollout), torch.full((2, 3), math.prod(plain) ** (1 / 3)))


def test_constant_keeps_the_mean_decay_of_the_batch():
    rollout = make_rollout(8, 30, statistics=linear_gate().statistics)
    rates = [gate(rollout)[rollout.mask].log().mean() for gate in (linear_gate(), gates["constant"](of=linear_gate()))]
    assert_close(*rates)


@pytest.mark.parametrize("knobs", [{}, {"gamma": 0.9, "of": "attention"}])
def test_constant_takes_its_rate_from_exactly_one_place(knobs):
    with pytest.raises(ValidationError, match="exactly one"):
        gates["constant"].model_validate(knobs)


# --- all controls ---------------------------------------------------------------------------------
CONTROLS = ("constant", "position", "random", "shuffle", "swap")


@pytest.mark.parametrize("name", ["shuffle", "random"])
def test_what_is_drawn_depends_on_the_rollout_s_seed_alone(name):
    rollout = make_rollout(4, 30, statistics=AttentionGate().statistics)
    gate = gates[name]()
    torch.manual_seed(1)
    first = gate(rollout)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(gate(rollout), first) and torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(gate(rollout.replace(seed=rollout.seed + 1)), first)


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("noise", [NAN, float("inf"), -7.0])
def test_a_control_never_reads_a_masked_token(name, noise):
    gate = gates[name](of=linear_gate(match_gamma=0.9))
    rollout = make_rollout(5, 30, statistics=gate.statistics)
    noisy = rollout.replace(stats={key: x.where(rollout.mask, noise) for key, x in rollout.stats.items()})
    assert torch.equal(gate(noisy)[rollout.mask], gate(rollout)[rollout.mask])


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_asks_for_what_its_gate_needs(name):
    inner = AttentionGate(statistic="renyi2", sinks=3)
    gate = gates[name](of=inner)
    assert gate.statistics == inner.statistics and gate.needs == inner.needs == {"attention"}


def test_controls_nest():
    shuffled = gates["shuffle"].model_validate({"of": {"use": "position", "of": {"use": "attention", "low": 0.5}}})
    rollout = make_rollout(4, 12, statistics=shuffled.statistics)
    profile = gates["position"](of=AttentionGate(low=0.5))(rollout)
    assert torch.equal(shuffled(rollout)[0, rollout.mask[0]].sort().values, profile[0, rollout.mask[0]].sort().values)


# --- gates by other statistics --------------------------------------------------------------------
CAUSAL = {
    "attention": {},
    "attention max": {"statistic": "max", "heads": [0, 1], "sinks": 1},
    "entropy": {},
    "logprob": {},
    "hidden_change": {},
    "profile": {"tokens": 2},
    "turn": {},
    "product": {"parts": ["attention", "entropy", "logprob", "hidden_change", "profile", "turn"]},
    "mixture": {"parts": ["attention", "logprob"], "weights": [1, 2]},
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_gate_at_t_knows_nothing_of_token_t_or_later(name):
    """Through the actor's forward: other tokens from t on leave the gates up to t as they are, and change one after."""
    gate = gates[name.split()[0]].model_validate(CAUSAL[name])
    agent, t = Agent(tiny_model(), None), 3
    ids, attention_mask, width = padded([[3, 4], [5, 6]], [[7, 8, 9, 10, 11, 12], [12, 13, 14, 15, 16, 17]])
    other = ids.clone()
    other[:, -width + t :] = torch.tensor([[17, 18, 3], [19, 3, 7]])

    def of(tokens):
        reading = agent(tokens, attention_mask, width, statistics=gate.statistics)
        rollout = make_rollout(mask=torch.ones(2, width, dtype=torch.bool), stats=reading.stats)
        result = gate(rollout.replace(moments=moments(gate, 0.0, 2.0)))
        assert not result.requires_grad
        return result

    a, b = of(ids), of(other)
    assert_close(a[:, : t + 1], b[:, : t + 1], atol=1e-6, rtol=0)
    if name not in ("profile", "turn"):
        assert (a - b)[:, t + 1 :].abs().max() > 1e-4
    assert a.std() > 1e-4 or name == "turn"


def test_sure_tokens_retain_more_under_the_entropy_gate():
    gate = gates["entropy"](low=0.9)
    rollout = of_statistic(gate, [[0.2, 0.5, 0.8]], moments=moments(gate, 0.5, 0.3))
    assert_close(gate(rollout), torch.tensor([[0.9731059, 0.95, 0.9268941]]))


def test_the_logprob_gate_reads_the_token_before():
    gate = gates["logprob"](low=0.9)
    rollout = of_statistic(gate, [[-1.0, 50, -2, -3], [50, -1, -3, 50]], mask=make_mask("1011", "0110"))
    rollout = rollout.replace(moments=moments(gate, -2.0, 1.0))
    middle, high = 0.95, 0.9 + 0.1 * sigmoid(1)
    assert_close(gate(rollout)[0, [0, 2, 3]], torch.tensor([middle, high, middle]))
    assert_close(gate(rollout)[1, [1, 2]], torch.tensor([middle, high]))


def test_a_jump_of_the_hidden_state_holds_credit_up():
    gate = gates["hidden_change"](low=0.5)
    assert gate(of_statistic(gate, [[0.1, 0.2, 0.9]], moments=moments(gate, 0.3, 0.2)))[0].diff().lt(0).all()


def test_profiles_by_hand():
    rollout = make_rollout(mask=make_mask("110111"))

    def profile(shape, tokens):
        return gates["profile"](start=0.5, end=1.0, shape=shape, tokens=tokens)(rollout)[0, [0, 1, 3, 4, 5]]

    assert_close(profile("linear", 2), torch.tensor([0.5, 0.75, 1, 1, 1]))
    assert_close(profile("step", 3), torch.tensor([0.5, 0.5, 0.5, 1, 1]))
    assert_close(profile("exponential", 2), 1 - 0.5 * (-torch.arange(5) / 2).exp())


def test_the_turn_gate_charges_each_crossing_once():
    rollout = make_rollout(mask=make_mask("0110011010", "1111111111"))
    gate = gates["turn"](within=0.99, boundary=0.5)(rollout)
    expected = torch.full((2, 10), 0.99)
    expected[0, 5] = expected[0, 8] = 0.5
    assert_close(gate[rollout.mask], expected[rollout.mask])
    assert gate[0][rollout.mask[0]].eq(0.5).sum() == 2  # three turns


def test_products_and_mixtures_by_hand():
    rollout = make_rollout(mask=make_mask("11"))
    parts = [{"use": "constant", "gamma": 0.8}, {"use": "constant", "gamma": 0.5}]
    assert_close(gates["product"].model_validate({"parts": parts})(rollout), torch.full((1, 2), 0.4))
    assert_close(gates["mixture"].model_validate({"parts": parts})(rollout), torch.full((1, 2), 0.65))
    weighted = gates["mixture"].model_validate({"parts": parts, "weights": [2, 1]})
    assert_close(weighted(rollout), torch.full((1, 2), 0.7))


@pytest.mark.parametrize("knobs", [{"weights": [1.0]}, {"weights": [1.0, 0.0]}, {"parts": []}])
def test_mixtures_that_make_no_sense_are_refused(knobs):
    with pytest.raises(ValidationError):
        gates["mixture"].model_validate(knobs)


def test_several_gates_ask_for_all_that_they_read():
    gate = gates["product"].model_validate({"parts": ["attention", "hidden_change", "turn"]})
    assert gate.needs == {"attention", "hidden_states"} and len(gate.statistics) == 2
    assert gates["shuffle"](of=gate).statistics == gate.statistics


def test_a_control_of_a_product_keeps_its_values():
    product = gates["product"]()
    rollout = make_rollout(4, 20, statistics=product.statistics)
    plain, shuffled = product(rollout)[0], gates["shuffle"](of=product)(rollout)[0]
    mask = rollout.mask[0]
    assert torch.equal(plain[mask].sort().values, shuffled[mask].sort().values) and not torch.equal(plain, shuffled)


def test_the_gate_of_the_docs_works_as_it_is_written_there():
    text = (Path(__file__).parents[1] / "docs" / "transport.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "class ExponentialGate" in block]
    names = gates.names()
    exec(compile(code, "docs", "exec", dont_inherit=True), {"__name__": "docs"})
    try:
        gate = transports["comp_gae"].model_validate({"gate": {"use": "shuffle", "of": "exponential"}, "whiten": False})
        plain = gates["exponential"]()
        ids, attention_mask, width = padded([[3, 4], [5, 6]], [[7, 8, 9, 10], [12, 13, 14]])
        stats = Agent(tiny_model(), None)(ids, attention_mask, width, statistics=gate.statistics).stats
        rollout = make_rollout(mask=attention_mask[:, -width:].bool(), stats=stats)
        credit = gate(rollout)
        assert credit.gate[rollout.mask].max() < 1 and credit.gate[rollout.mask].std() > 0
        assert not torch.equal(credit.gate, plain(rollout)) and not credit.advantages.requires_grad
    finally:
        del gates._classes["exponential"]
    assert gates.names() == names


# --- any statistic --------------------------------------------------------------------------------
NAMED = [
    ("attention", {"sinks": 2, "layers": "all"}, {"use": "concentration", "sinks": 2, "layers": "all"}, 1),
    ("entropy", {}, "entropy", -1),
    ("logprob", {}, "logprob", 1),
    ("hidden_change", {"distance": "relative"}, {"use": "hidden_change", "distance": "relative"}, -1),
]


@pytest.mark.parametrize(("name", "knobs", "of", "sign"), NAMED)
def test_a_gate_by_the_name_of_its_statistic_is_the_gate_of_that_statistic(name, knobs, of, sign):
    named = gates[name].model_validate({**knobs, "low": 0.8})
    free = gates["statistic"].model_validate({"of": of, "sign": sign, "low": 0.8})
    assert free.statistics == named.statistics and free.needs == named.needs
    rollout = make_rollout(4, 12, statistics=free.statistics)
    later = rollout.replace(moments=moments(free, 0.2, 0.5))
    assert torch.equal(free(rollout), named(rollout)) and torch.equal(free(later), named(later))


@pytest.mark.parametrize("name", ["anchor", "outcome_attention"])
def test_a_statistic_of_later_tokens_is_no_discount(name):
    with pytest.raises(ValidationError, match=f"'{name}' depends on later tokens.*concentration, entropy"):
        gates["statistic"].model_validate({"of": name})


def test_a_statistic_of_the_token_itself_counts_one_token_later():
    gate = gates["statistic"].model_validate({"of": "logprob", "low": 0.9})
    found = gate(of_statistic(gate, [[-1.0, 1.0, 0.0]]).replace(moments=moments(gate, 0.0, 1.0)))
    assert_close(found, torch.tensor([[0.95, 0.9 + 0.1 * sigmoid(-1), 0.9 + 0.1 * sigmoid(1)]]))
