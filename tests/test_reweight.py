"""Other uses of attention: what they read off tiny models against attention maps, and what they do with it by hand."""

from __future__ import annotations

import pytest
import torch
from conftest import eager_twin, make_mask, make_rollout, padded, tiny_model
from pydantic import ValidationError
from torch.testing import assert_close

from cct.agent.agent import Agent
from cct.transport import transports
from cct.transport.functional import largest_share, redistribute
from cct.transport.reweight import Anchor, OutcomeAttention, Preplan

NAN = float("nan")
PROMPTS, RESPONSES = [[3, 4, 5, 6, 7], [8], [9, 10, 11]], [[12, 13, 14, 15], [16, 17, 18, 19, 3, 4, 1], [5]]


def T(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def read(family, statistic):
    """The statistic of each response's tokens as lists, and the heads' mean attention maps [S, S] without padding."""
    model = tiny_model(family, layers=3)
    ids, mask, width = padded(PROMPTS, RESPONSES, left=1, right=2)
    stats = Agent(model, None)(ids, mask, width, statistics={"s": statistic}).stats["s"]
    assert not stats.requires_grad and stats.isfinite().all()
    found = []
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        with torch.no_grad():
            maps = eager_twin(model)(input_ids=torch.tensor([prompt + response]), output_attentions=True).attentions
        layers = statistic.layer_indices(3)
        maps = torch.stack([maps[layer][0].mean(0) for layer in layers]).mean(0)
        found.append((stats[row, : len(response)], maps, len(prompt)))
    return found


each_family = pytest.mark.parametrize("family", ["qwen3", "opt"])


@each_family
def test_outcome_attention_is_the_last_token_s(family):
    for measured, maps, prompt in read(family, OutcomeAttention(layers=(0, 2))):
        assert_close(measured, maps[-1, prompt:], atol=1e-5, rtol=0)


@each_family
@pytest.mark.parametrize("window", [2, 64])
def test_preplan_is_the_mean_distance_back_of_the_query_that_emits(family, window):
    for measured, maps, prompt in read(family, Preplan(layers=(1, 2), window=window)):
        for t, got in enumerate(measured.tolist()):
            query = prompt + t - 1
            expected = sum(maps[query, key].item() * min(query - key, window) for key in range(query + 1))
            assert got == pytest.approx(expected, abs=1e-4)


@each_family
@pytest.mark.parametrize("near, far", [(1, 3), (2, 64)])
def test_anchor_is_the_mean_attention_from_later_tokens(family, near, far):
    for measured, maps, prompt in read(family, Anchor(layers=(1,), near=near, far=far)):
        for t, got in enumerate(measured.tolist()):
            key = prompt + t
            later = [maps[query, key].item() for query in range(len(maps)) if near <= query - key <= far]
            assert got == pytest.approx(sum(later) / max(1, len(later)), abs=1e-5)


# --- attention-based credit -----------------------------------------------------------------------
def test_redistribute_by_hand():
    rewards, weights, mask = T([0, NAN, 0, 4, 9]), T([1, NAN, 2, 1, 7]), make_mask("10110")
    assert_close(redistribute(rewards, weights, mask, 1.0), T([1, 0, 2, 1, 0]))
    assert_close(redistribute(rewards, weights, mask, 0.5), T([0.5, 0, 1, 2.5, 0]))
    assert_close(redistribute(rewards, weights, mask, 0.0), T([0, 0, 0, 4, 0]))
    assert_close(redistribute(rewards, torch.zeros(1, 5), mask, 1.0), T([4, 0, 4, 4, 0]) / 3)


def test_redistribution_keeps_each_total():
    rollout = make_rollout(6, 40)
    spread = redistribute(rollout.rewards, torch.rand(6, 40), rollout.mask, 0.7)
    assert_close(spread.sum(1), rollout.scores)


def test_abc_without_spreading_is_gae_and_with_it_follows_the_attention():
    abc = transports["abc"](beta=0.0, gamma=0.9, lam=0.8, lam_value=0.7, whiten=False)
    rollout = make_rollout(5, 20, statistics=abc.statistics)
    gae = transports["gae"](gamma=0.9, lam=0.8, lam_value=0.7, whiten=False)(rollout)
    assert_close(abc(rollout).advantages, gae.advantages)
    assert_close(abc(rollout).value_targets, gae.value_targets)
    (name,) = abc.statistics
    one = make_rollout(
        mask=make_mask("1111"),
        rewards=T([0, 0, 0, 1]),
        values=torch.zeros(1, 4),
        bootstrap=torch.zeros(1),
        stats={name: T([0.1, 0.2, 0, 0.1])},
    )
    spread = transports["abc"](beta=1.0, lam=0.0, whiten=False)(one)
    assert_close(spread.advantages, T([0.25, 0.5, 0, 0.25]))
    assert_close(spread.value_targets, T([1, 0.75, 0.25, 0.25]))


# --- preplan and anchor ---------------------------------------------------------------------------
def test_the_largest_share_by_hand():
    x, mask = T([3, NAN, 1, 2, 2], [5, 5, 5, 5, 5], [NAN] * 5), make_mask("10111", "11111", "00000")
    assert largest_share(x, mask, 0.5).tolist() == [[True, False, False, True, False], [True] * 3 + [False] * 2, [False] * 5]
    assert torch.equal(largest_share(x, mask, 1.0), mask)
    assert largest_share(x, mask, 0.2).sum(1).tolist() == [1, 1, 0]


@pytest.mark.parametrize("measure", ["preplan", "anchor"])
def test_rhythm_amplifies_the_advantages_of_its_tokens_and_no_others(measure):
    rhythm = transports["rhythm"].model_validate(
        {"of": {"use": "gae", "lam": 0.9}, "measure": measure, "factor": 3, "share": 0.3}
    )
    rollout = make_rollout(5, 30, statistics=rhythm.statistics)
    (name,) = rhythm.statistics
    plain, got = transports["gae"](lam=0.9)(rollout), rhythm(rollout)
    chosen = largest_share(rollout.stats[name], rollout.mask, 0.3)
    assert torch.equal(got.advantages[chosen], 3 * plain.advantages[chosen])
    assert torch.equal(got.advantages[~chosen], plain.advantages[~chosen])
    assert torch.equal(got.value_targets, plain.value_targets) and name.startswith(measure)


def test_rhythm_asks_for_what_it_and_its_transport_need():
    plain, around = transports["rhythm"](), transports["rhythm"].model_validate({"of": "comp_gae"})
    assert plain.needs == {"groups", "attention"} and around.needs == {"values", "attention"}
    assert len(plain.statistics) == 1 and len(around.statistics) == 2
    assert set(around.of.statistics) < set(around.statistics)
    rollout = make_rollout(4, 9, statistics=around.statistics)
    assert around(rollout).gate is not None


def test_disagreement_leaves_out_the_tokens_that_critics_agree_on_most():
    """Of ten tokens the two of least deviation, over the whole batch; what stands in the padding is none."""
    mask = make_mask("11111", "11110", "10000")
    deviation = T([5, 1, 6, 7, 8], [2, 9, 3, 4, 0], [10, 0, 0, 0, NAN])
    rollout = make_rollout(mask=mask, stats={"value_disagreement": deviation})
    plain, got = (
        transports["gae"](lam=0.9)(rollout),
        transports["disagreement"].model_validate({"of": {"use": "gae", "lam": 0.9}})(rollout),
    )
    left_out = mask & (deviation <= 2)
    assert left_out.sum() == 2 and plain.advantages[left_out].ne(0).all()
    assert torch.equal(got.advantages, plain.advantages.masked_fill(left_out, 0.0))
    assert torch.equal(got.value_targets, plain.value_targets)
    whole = transports["disagreement"](share=0.0)(rollout)
    assert torch.equal(whole.advantages, transports["gae"]()(rollout).advantages)


def test_a_window_that_is_none_is_refused():
    with pytest.raises(ValidationError, match="near"):
        transports["rhythm"](near=9, far=8)
