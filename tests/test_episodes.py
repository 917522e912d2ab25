"""Episodes of several rows: joined by hand and split again, and who sees them as one."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from conftest import make_mask, make_rollout
from torch.testing import assert_close

from cct.critic import critics
from cct.loading import load_recipe
from cct.rollout import Credit, Rollout
from cct.training.credit import Estimator
from cct.training.minibatches import CriticData
from cct.transport import Transport, gates, group_advantage, transports
from cct.transport.functional import join, jointly, masked_mean_std

NAN = float("nan")
RECIPES = Path(__file__).parents[1] / "recipes"


def T(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def episodes() -> Rollout:
    """Rows 3, 0 (in this order) are episode 8, row 1 is episode 2, row 2 was dropped: its own, episode 5."""
    return make_rollout(
        mask=make_mask("0110", "1011", "0000", "1100"),
        rewards=T([9, 1, 2, NAN], [3, 9, 4, 5], [9, 9, 9, 9], [6, 7, 8, 8]),
        groups=torch.tensor([1, 0, 0, 1]),
        truncated=torch.tensor([True, False, False, False]),
        bootstrap=torch.tensor([0.5, 0, 0, 0]),
        greedy_scores=torch.tensor([0.1, 0.2, 0.3, 0.1]),
        input_ids=torch.tensor([[91, 92, 1, 2, 3, 4], [93, 94, 5, 6, 7, 8], [95, 96, 0, 0, 0, 0], [97, 98, 9, 10, 11, 12]]),
        attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0], [1] * 6, [0, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0]]),
        episodes=torch.tensor([8, 2, 5, 8]),
        order=torch.tensor([1, 0, 0, 0]),
        turns=torch.tensor([[-1, 1, 1, -1], [0, -1, 1, 1], [-1] * 4, [0, 0, -1, -1]]),
        stats={"entropy": torch.arange(16.0).view(4, 4)},
        components={"env": torch.arange(16.0).view(4, 4)},
    )


# --- joining --------------------------------------------------------------------------------------
def test_rows_of_an_episode_are_joined_by_hand():
    joined, split = join(episodes())
    assert split is not None
    # Episodes by their first rows: 8 (row 0), 2, 5. Of row 3 two tokens, one masked position, then row 0.
    assert torch.equal(joined.mask, make_mask("110011", "101100", "000000"))
    assert joined.rewards.tolist() == [[6, 7, 0, 9, 1, 2], [3, 9, 4, 5, 0, 0], [0] * 6]
    assert joined.turns.tolist() == [[0, 0, -1, -1, 1, 1], [0, -1, 1, 1, -1, -1], [-1] * 6]
    assert joined.stats["entropy"].tolist() == [[12, 13, 0, 0, 1, 2], [4, 5, 6, 7, 0, 0], [0] * 6]
    assert joined.components["env"].tolist() == joined.stats["entropy"].tolist()
    assert joined.groups.tolist() == [1, 0, 0] and joined.episodes.tolist() == [8, 2, 5] and joined.order.tolist() == [0] * 3
    assert joined.truncated.tolist() == [True, False, False] and joined.bootstrap.tolist() == [0.5, 0, 0]
    assert joined.input_ids.tolist() == [[97, 98, 9, 10, 0, 1, 2, 3], [93, 94, 5, 6, 7, 8, 0, 0], [95, 96] + [0] * 6]
    assert joined.attention_mask.tolist() == [[0, 1, 1, 1, 0, 1, 1, 1], [1] * 6 + [0] * 2, [0, 1] + [0] * 6]
    assert joined.scores.tolist() == [16, 12, 0] and joined.valid.tolist() == [True, True, False]
    assert split(torch.arange(1, 19).view(3, 6)).tolist() == [[4, 5, 6, 0], [7, 8, 9, 10], [0] * 4, [1, 2, 0, 0]]
    assert split.at_ends(T([7, 8, 9])[0]).tolist() == [7, 8, 9, 0]


def test_what_is_split_is_what_was_joined():
    rollout = episodes()
    joined, split = join(rollout)
    for field in fields(rollout):
        x = getattr(rollout, field.name)
        if isinstance(x, torch.Tensor) and x.shape == rollout.mask.shape:
            assert torch.equal(split(getattr(joined, field.name))[rollout.mask], x[rollout.mask]), field.name
            assert torch.equal(split.join(x), getattr(joined, field.name)), field.name
    with pytest.raises(ValueError, match=r"shape \(3, 6\); got \(4, 4\)"):
        split(rollout.rewards)


@pytest.mark.parametrize("numbers", [None, torch.arange(6).flip(0)])
def test_where_each_row_is_an_episode_nothing_is_copied(numbers):
    rollout = make_rollout(episodes=numbers)
    assert join(rollout) == (rollout, None) and join(rollout)[0] is rollout
    credit = Credit(rollout.rewards)

    class Same(Transport):
        def __call__(self, rollout):
            return credit

    assert Same().checked(rollout) is credit
    assert jointly(rollout, lambda same: same.mask) is rollout.mask


def test_rows_that_cannot_be_one_episode_are_refused():
    with pytest.raises(ValueError, match="the same place"):
        join(episodes().replace(order=torch.zeros(4).long()))
    with pytest.raises(ValueError, match="the same place"):
        join(episodes().replace(order=None))
    with pytest.raises(ValueError, match="different groups"):
        join(episodes().replace(groups=torch.tensor([1, 0, 0, 0])))


def test_episodes_of_empty_rows_stay():
    rollout = episodes().replace(mask=torch.zeros(4, 4).bool(), truncated=torch.zeros(4).bool())
    joined, split = join(rollout)
    assert joined.mask.shape == (3, 1) and not joined.mask.any() and split(joined.rewards).eq(0).all()
    assert transports["grpo"]().checked(rollout).advantages.eq(0).all()


# --- who sees one row -----------------------------------------------------------------------------
def test_an_episode_counts_once_in_a_baseline_by_hand():
    rollout = episodes().replace(rewards=T([0, 0, 3, 0], [0, 0, 0, 1], [0] * 4, [2, 0, 0, 0]), groups=torch.zeros(4).long())
    # scores: 2 + 3 of episode 8, 1 of episode 2; the dropped one does not count
    expected = group_advantage(T([5, 1])[0], torch.zeros(2).long(), baseline="leave_one_out", scale="none")
    assert expected.tolist() == [4, -4]
    got = transports["rloo"]().checked(rollout).advantages
    assert got.tolist() == [[0, 4, 4, 0], [-4, 0, -4, -4], [0] * 4, [4, 4, 0, 0]]


def test_a_trace_goes_on_across_a_cut_by_hand():
    rollout = episodes().replace(rewards=T([9, 0, 2, 9], [0] * 4, [0] * 4, [0, 1, 9, 9]), values=torch.full((4, 4), 0.5))
    credit = transports["gae"](gamma=0.5, whiten=False).checked(rollout)
    # from the end: 2 + .5 * .5 = 2.25; 1.125; 1 + .5625 = 1.5625; .78125, each minus V
    assert credit.advantages[[0, 3]].tolist() == [[0, 0.625, 1.75, 0], [0.28125, 1.0625, 0, 0]]
    assert credit.value_targets[[0, 3]].tolist() == [[0, 1.125, 2.25, 0], [0.78125, 1.5625, 0, 0]]


def test_a_transport_within_another_sees_one_row_as_well():
    rollout = episodes()
    inner, outer = transports["rloo"](), transports["high_entropy"](of="rloo", fraction=1.0)
    assert torch.equal(outer.checked(rollout).advantages, inner.checked(rollout).advantages)


def test_what_a_transport_gives_for_an_episode_is_checked():
    class Wide(Transport):
        def __call__(self, rollout):
            return Credit(rollout.rewards[:, :-1])

    with pytest.raises(ValueError, match=r"expected a float tensor of shape \(3, 6\)"):
        Wide().checked(episodes())


@pytest.mark.parametrize("critic", ["group_mean", "group_level"])
def test_a_group_critic_counts_an_episode_once_and_from_its_start(critic):
    recipe = load_recipe(RECIPES / "compo.yaml", [f"critic={{use: {critic}}}", "transport={use: gae, whiten: false}"])
    whole = make_rollout(
        mask=make_mask("110011", "111000"), groups=torch.zeros(2).long(), bootstrap=torch.tensor([0.25, 0.0])
    ).replace(truncated=torch.tensor([True, False]))
    cut = make_rollout(
        mask=make_mask("11000", "11000", "11100"),
        rewards=torch.stack([whole.rewards[0, [0, 1, 2, 2, 2]], whole.rewards[0, [4, 5, 2, 2, 2]], whole.rewards[1, :5]]),
        values=torch.stack([whole.values[0, [0, 1, 2, 2, 2]], whole.values[0, [4, 5, 2, 2, 2]], whole.values[1, :5]]),
        groups=torch.zeros(3).long(),
        truncated=torch.tensor([False, True, False]),
        bootstrap=torch.tensor([0, 0.25, 0.0]),
        episodes=torch.tensor([1, 1, 0]),
        order=torch.tensor([0, 1, 0]),
    )
    agent = type("Agent", (), {"critic": recipe.critic, "actor": None})()
    expected, seen = Estimator(recipe, agent).credit(whole, 2)
    got, cut_seen = Estimator(recipe, agent).credit(cut, 2)
    for name in ("advantages", "value_targets"):
        x, y = getattr(expected, name), getattr(got, name)
        assert_close(torch.cat([y[0, :2], y[1, :2], y[2, :3]]), torch.cat([x[0, :2], x[0, 4:], x[1, :3]]))
    assert seen.values is not whole.values and cut_seen.bootstrap.tolist()[::2] == [0, 0]
    assert_close(cut_seen.bootstrap[1], seen.bootstrap[0])
    assert critics[critic] is type(recipe.critic)


def test_the_rows_of_an_episode_have_one_rank_in_their_group():
    rollout = episodes().replace(groups=torch.tensor([1, 1, 1, 1]))
    assert CriticData.of(rollout, rollout.rewards, [4]).numbers.tolist() == [0, 1, 2, 0]
    assert CriticData.of(rollout.replace(episodes=None), rollout.rewards, [4]).numbers.tolist() == [0, 1, 2, 3]


# --- gates and moments over the policy's tokens ---------------------------------------------------
@pytest.mark.parametrize("first", [True, False], ids=["the batch's own moments", "moments of earlier iterations"])
@pytest.mark.parametrize("whiten", [True, False])
def test_comp_gae_measures_its_gate_on_the_policys_tokens_only(first, whiten):
    """An observation's attention, however unlike the policy's, changes neither gate nor moments nor whitening."""
    transport = transports["comp_gae"](gate=gates["attention"](), whiten=whiten)
    (name,) = transport.statistics
    mask = make_mask("1100011011", "1110000000")
    rollout = make_rollout(mask=mask, statistics=[name], moments={} if first else {name: (0.4, 0.2)})
    there = mask.nonzero(as_tuple=True)
    packed = make_rollout(mask=make_mask("111111", "111000"), moments=rollout.moments, bootstrap=rollout.bootstrap)

    def pack(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(2, 6, dtype=x.dtype)
        out[packed.mask] = x[there]
        return out

    packed = packed.replace(rewards=pack(rollout.rewards), values=pack(rollout.values), stats={name: pack(rollout.stats[name])})
    expected = transport.checked(packed)
    for odd in (1e4, -1e4, NAN):
        seen = transport.checked(rollout.replace(stats={name: rollout.stats[name].where(mask, odd)}))
        for kind in ("advantages", "value_targets", "gate"):
            assert_close(getattr(seen, kind)[there], getattr(expected, kind)[packed.mask])


def test_running_moments_are_those_of_the_policys_tokens():
    recipe = load_recipe(RECIPES / "compo.yaml", [])
    (name,) = recipe.transport.statistics
    rollout = make_rollout(statistics=[name])
    estimator = Estimator(recipe, None)
    estimator.remember(rollout.replace(stats={name: rollout.stats[name].where(rollout.mask, 1e6)}))
    mean, std = masked_mean_std(rollout.stats[name], rollout.mask)
    assert estimator.moments[name] == pytest.approx((float(mean), float(std)))
