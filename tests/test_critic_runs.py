"""Critics in runs: every kind learns, the baseline between group and critic, and what the value target is."""

from __future__ import annotations

import pytest
import torch
from conftest import make_mask, make_rollout
from test_training import assert_same_tensors, collected, final_state, run, tiny
from torch.testing import assert_close

from cct.critic import critics
from cct.critic.functional import group_mean
from cct.errors import TrainingStopped
from cct.recipe import RecipeError
from cct.run_folder import RunFolder
from cct.training.minibatches import CriticBatch
from cct.training.updates import Updates
from cct.transport import explained_variance, gated_gae, transports

KINDS = {
    "hl_gauss": "critic={use: tac, width: 16, output: hl_gauss}",
    "two_hot": "critic={use: value_head, output: two_hot}",
    "value_clip": "critic={use: tac, width: 16, value_clip: 0.05}",
    "ladder": "critic={use: tac, width: 16, depth: 2, ladder: [1, -1]}",
    "mini_critics": "critic={use: mini_critics, of: {use: tac, width: 16, depth: 1, value_clip: 0.2}}",
    "group_mean": "critic={use: group_mean, of: {use: tac, width: 16}}",
    "group_level": "critic={use: group_level, of: {use: tac, width: 16}}",
    "group_mean of mini_critics": "critic={use: group_mean, of: {use: mini_critics, of: value_head}}",
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_of_critic_trains_two_iterations(kind, tmp_path):
    events = RunFolder(run(tiny("compo", kind), tmp_path)).metrics
    assert [e["iteration"] for e in events if e["iteration"] > 0] == [1, 2]
    assert {"critic/explained_variance", "critic/loss", "critic/value"} <= events[-1].keys()
    assert ("critic/disagreement" in events[-1]) == ("mini_critics" in kind)


def test_the_micro_batch_split_changes_no_weight_of_mini_critics(tmp_path):
    knobs = [KINDS["mini_critics"], "training.iterations=1"]
    recipes = [tiny("compo", *knobs, *split) for split in ([], ["training.micro_batch_size=2"])]
    a, b = (final_state(run(recipe, tmp_path))["optimizer_states"][0]["state"] for recipe in recipes)
    for index in a:
        assert_close(a[index]["exp_avg"], b[index]["exp_avg"], rtol=1e-4, atol=1e-7)


def test_the_disagreement_of_mini_critics_masks_advantages():
    with pytest.raises(RecipeError, match="needs disagreement.*critic: mini_critics"):
        tiny("gae", "transport=disagreement")
    _, iteration = collected(
        tiny("gae", "critic={use: mini_critics, of: value_head}", "transport={use: disagreement, share: 0.4}")
    )
    rollout, advantages = iteration.rollout, iteration.credit.advantages
    deviation, left_out = rollout.stats["value_disagreement"][rollout.mask], advantages[rollout.mask].eq(0)
    assert 0.3 < left_out.float().mean() < 0.5
    assert deviation[left_out].max() < deviation[~left_out].min()


@pytest.mark.parametrize("split", ["responses", "prompts"])
def test_mini_critics_learn_from_different_responses_or_prompts(split):
    """From a minibatch of one prompt both critics learn, each from half of its responses; or only the prompt's own one does."""
    recipe = tiny("gae", f"critic={{use: mini_critics, of: value_head, count: 2, split: {split}}}",
                  "training.prompts_per_iteration=1", "training.responses_per_prompt=8")  # fmt: skip
    agent, iteration = collected(recipe)
    module = Updates(recipe, agent)
    batch = next(batch for batch in iteration.updates if isinstance(batch, CriticBatch))
    module._critic_loss(batch).backward()
    learns = [any(p.grad is not None and p.grad.ne(0).any() for p in tower.parameters()) for tower in agent.critic.members]
    assert sum(learns) == {"responses": 2, "prompts": 1}[split]
    assert sorted(batch.ranks.tolist()) == list(range(8)) and torch.bincount(batch.ranks % 2).tolist() == [4, 4]


@pytest.mark.parametrize("transport", ["gae", "comp_gae"])
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_the_transport_reads_values_between_the_group_s_target_and_the_critic_s(transport, weight):
    """The mean is of the transport's own targets, so of gated ones under a gate."""
    knobs = [f"transport={{use: {transport}, whiten: false}}", "evidence.0.pattern=(.)", "generation.max_new_tokens=4"]
    if transport == "comp_gae":
        knobs.append("transport.gate={use: constant, gamma: 0.8}")
    _, alone = collected(tiny("gae", *knobs, "critic={use: tac, width: 16}"))
    _, mixed = collected(tiny("gae", *knobs, f"critic={{use: group_mean, of: {{use: tac, width: 16}}, weight: {weight}}}"))
    values, targets = alone.rollout.values, alone.credit.value_targets
    mean, count = group_mean(targets[:, 0], alone.rollout.groups, alone.rollout.valid)
    assert (count > 0).all() and alone.rollout.truncated.any()
    assert_close(mixed.rollout.values, weight * values + (1 - weight) * mean.unsqueeze(1))
    returns = gated_gae(mixed.rollout.rewards, torch.zeros_like(values), mixed.rollout.mask, gamma=1.0, lam=1.0)[0]
    assert mixed.metrics["baseline/explained_variance"] == pytest.approx(
        explained_variance(mixed.rollout.values, returns, mixed.rollout.mask), abs=1e-6
    )
    assert "baseline/explained_variance" not in alone.metrics
    assert mixed.metrics["critic/value"] == alone.metrics["critic/value"]  # of the critic by itself
    gamma = 0.8 if transport == "comp_gae" else 1.0
    expected = gated_gae(
        mixed.rollout.rewards, mixed.rollout.values, mixed.rollout.mask, gamma=gamma, lam=1.0, bootstrap=mixed.rollout.bootstrap
    )
    assert_close(mixed.credit.advantages, expected[0])
    assert_close(mixed.credit.value_targets, expected[1])


def test_the_transport_reads_the_critic_s_shape_at_the_group_s_level():
    """Rewards from -1 to 2, so that log-odds are of that range."""
    right, small = "{use: exact_match, pattern: (.), weight: 2}", "{use: format, pattern: '[0-4]', match: contains, weight: -1}"
    knobs = ["transport={use: gae, whiten: false}", "generation.max_new_tokens=4", f"evidence=[{right}, {small}]"]
    _, alone = collected(tiny("gae", *knobs, "critic={use: tac, width: 16}"))
    _, level = collected(tiny("gae", *knobs, "critic={use: group_level, of: {use: tac, width: 16}, prior: 2}"))
    values, targets, rewards = alone.rollout.values, alone.credit.value_targets, alone.rollout.rewards.sum(1)
    assert rewards.min() < 0 or rewards.max() > 1
    for row, group in enumerate(alone.rollout.groups.tolist()):
        others = [float(targets[i, 0]) for i, g in enumerate(alone.rollout.groups.tolist()) if g == group and i != row]
        first = float(values[row, 0])
        wanted = (sum(others) + 2 * first) / (len(others) + 2)
        odds = lambda x: (x + 1) / (2 - x)  # noqa: E731
        shifted = odds(values[row].double()) * odds(wanted) / odds(first)
        assert_close(level.rollout.values[row].double(), (2 * shifted - 1) / (1 + shifted), atol=1e-4, rtol=0)


class Odd(critics["value_head"]):
    """Its baseline is its values alone, which is no rollout."""

    def baseline(self, rollout, targets, bounds):
        return rollout.values


def test_a_baseline_that_is_no_rollout_stops_the_run():
    recipe = tiny("gae", "critic=value_head").model_copy(update={"critic": Odd()})
    with pytest.raises(TrainingStopped, match="'value_head' returned a tensor of .* as its baseline; expected a rollout"):
        collected(recipe)


def test_a_whole_weight_is_the_critic_bit_for_bit(tmp_path):
    plain = run(tiny("gae", "critic={use: tac, width: 16}"), tmp_path)
    mixed = run(tiny("gae", "critic={use: group_mean, of: {use: tac, width: 16}, weight: 1}"), tmp_path)
    assert_same_tensors(final_state(plain)["state_dict"], final_state(mixed)["state_dict"])


@pytest.mark.parametrize("name, knobs", [("gae", {"gamma": 0.5}), ("comp_gae", {"gate": {"use": "constant", "gamma": 0.5}})])
def test_value_targets_by_hand(name, knobs):
    rollout = make_rollout(mask=make_mask("111", "111"), truncated=torch.tensor([False, True]))
    rollout = rollout.replace(
        rewards=torch.tensor([[0.0, 0.0, 1.0]] * 2),
        values=torch.tensor([[0.2, 0.4, 0.6]] * 2),
        bootstrap=torch.tensor([0.0, 2.0]),
    )

    def credit(**more):
        return transports[name].model_validate({**knobs, "whiten": False, **more})(rollout)

    assert_close(credit().value_targets, torch.tensor([[0.25, 0.5, 1.0], [0.5, 1.0, 2.0]]))
    assert_close(credit(target="ungated").value_targets, torch.tensor([[1.0, 1.0, 1.0], [3.0, 3.0, 3.0]]))
    assert_close(credit(lam_value=0.0).value_targets, torch.tensor([[0.2, 0.3, 1.0], [0.2, 0.3, 2.0]]))
    one_step = torch.tensor([[0.4, 0.6, 1.0], [0.4, 0.6, 3.0]])
    assert_close(credit(lam_value=0.0, target="ungated").value_targets, one_step)
    assert torch.equal(credit().advantages, credit(target="ungated", lam_value=0.0).advantages)
