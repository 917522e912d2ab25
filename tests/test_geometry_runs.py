"""Geometries in runs: what is chosen per minibatch, KL as a cost in rewards, the ratio to the engine."""

from __future__ import annotations

import pytest
import torch
from held import Held
from test_training import build, collected, final_state, run, tiny
from torch.testing import assert_close

from cct.geometry import kl_estimate, mark_top_covariances
from cct.run_folder import RunFolder
from cct.training.minibatches import PolicyBatch

COVARIANCE = ["geometry={use: kl_cov, share: 0.2, coef: 5}", "training.epochs=2"]


@pytest.mark.parametrize(
    "name", ["gspo", "gmpo", "policy_gradient", "cispo", "sapo", "topr", "dppo", "clip_cov", "kl_cov", "dis", "vespo", "luspo"]
)
def test_every_geometry_trains_two_iterations(name, tmp_path):
    folder = run(tiny("grpo", f"geometry={name}", "evidence.0.pattern=(.)"), tmp_path)
    events = RunFolder(folder).metrics
    assert [e["iteration"] for e in events if e["iteration"] > 0] == [1, 2]
    assert "policy/loss" in events[-1] and "policy/ratio" in events[-1]
    assert ("policy/marked" in events[-1]) == name.endswith("_cov")


def emitted(ids, attention_mask):
    """A row's tokens without padding."""
    return tuple(ids[attention_mask.bool()].tolist())


def test_what_is_chosen_is_of_the_whole_minibatch_however_it_is_divided():
    chosen = {}
    for size in (8, 2):
        recipe = tiny("compo", *COVARIANCE, f"training.micro_batch_size={size}")
        _, iteration = collected(recipe)
        rollout, policy = iteration.rollout, [batch for batch in iteration.updates if isinstance(batch, PolicyBatch)]
        number_of = {emitted(*row): n for n, row in enumerate(zip(rollout.input_ids, rollout.attention_mask, strict=True))}
        assert len(number_of) == 16
        for start in range(0, 16, 8):
            rows = slice(start, start + 8)
            whole = mark_top_covariances(
                rollout.logprobs[rows], iteration.credit.advantages[rows], rollout.mask[rows], share=0.2
            )
            assert whole.any()
            parts = [b for b in policy if start <= number_of[emitted(b.input_ids[0], b.attention_mask[0])] < start + 8]
            assert len(parts) == 2 * 8 // size  # two epochs
            for part in parts:
                for ids, attention_mask, marked in zip(part.input_ids, part.attention_mask, part.marked, strict=True):
                    number = number_of[emitted(ids, attention_mask)]
                    assert start <= number < start + 8
                    assert torch.equal(marked, whole[number - start, : len(marked)])
        chosen[size] = sum(int(batch.marked.sum()) for batch in policy)
    assert chosen[8] == chosen[2] > 0


def test_the_micro_batch_split_changes_no_weight_where_tokens_are_chosen(tmp_path):
    recipes = [tiny("compo", *COVARIANCE, "training.iterations=1", *split) for split in ([], ["training.micro_batch_size=2"])]
    a, b = (final_state(run(recipe, tmp_path))["optimizer_states"][0]["state"] for recipe in recipes)
    for index in a:
        assert_close(a[index]["exp_avg"], b[index]["exp_avg"], rtol=1e-4, atol=1e-7)


def moved(agent):
    """The policy, away from the reference."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in agent.actor.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize("estimator", [None, "k3"])
def test_the_kl_is_each_token_s_cost_before_the_transport(estimator):
    knobs = ["transport={use: gae, whiten: false}", "critic.output=scalar"]
    with_kl = [*knobs, "geometry.kl_in_reward=0.5", f"geometry.kl_estimator={estimator or 'null'}"]
    rewards = {}
    for weight in (0.0, 0.5):
        recipe = tiny("gae", *(with_kl if weight else knobs))
        agent, tokenizer, reference = build(tiny("gae", *with_kl))
        moved(agent)
        iteration = Held(recipe, agent, tokenizer, reference).collect(1)
        rewards[weight] = iteration.rollout.rewards
    rollout = iteration.rollout
    kl = kl_estimate(rollout.logprobs, rollout.reference_logprobs, rollout.mask, estimator or "k1")
    assert kl[rollout.mask].abs().min() > 0
    assert_close(rewards[0.5], rewards[0.0] - 0.5 * kl)
    assert iteration.metrics["train/reference_kl"] == pytest.approx(float(kl[rollout.mask].mean()), rel=1e-4)
    assert iteration.metrics["train/reward"] == pytest.approx(float(rewards[0.0].sum(1).mean()), abs=1e-6)  # the evidence's
    last = rollout.mask.sum(1, keepdim=True) - 1  # the target there is the reward there
    ended = ~rollout.truncated
    targets = iteration.credit.value_targets.gather(1, last)[ended]
    assert_close(targets, rollout.rewards.gather(1, last)[ended])


def test_a_run_with_the_kl_in_rewards_reports_it(tmp_path):
    knobs = ["training.learning_rate=1.0e-2", "evidence.0.pattern=(.)", "geometry.kl_in_reward=0.5"]
    knobs += ["training.iterations=3", "training.responses_per_prompt=16"]
    kl = [e["train/reference_kl"] for e in RunFolder(run(tiny("grpo", *knobs), tmp_path)).metrics if "train/reference_kl" in e]
    assert len(kl) == 3 and kl[0] == 0 and kl[-1] != 0


def test_the_correction_of_a_run_weighs_the_surrogate_and_leaves_the_loss_s_other_weights():
    knobs = ["generation.top_k=3", "geometry.kl_coef=0.1", "geometry.aggregation=token_mean"]
    _, corrected = collected(tiny("grpo", *knobs, "geometry.correction=mask", "geometry.correction_bound=1.1"))
    rollout = corrected.rollout
    ratio = (rollout.logprobs - rollout.rollout_logprobs).exp()[rollout.mask]
    outside = (ratio > 1.1) | (ratio < 1 / 1.1)
    assert outside.any()
    assert sum(int((b.correction[b.mask] == 0).sum()) for b in corrected.updates) == int(outside.sum())
    assert all(torch.equal(b.loss_weights, b.token_weights) for b in corrected.updates)
    _, plain = collected(tiny("grpo", *knobs, "geometry.ratio_to=engine"))
    assert all(batch.correction is None for batch in plain.updates)


@pytest.mark.parametrize("to, correction", [("trainer", "truncate"), ("engine", "none")])
def test_the_ratio_is_to_what_is_asked_for(to, correction):
    knobs = [f"geometry.ratio_to={to}", "generation.top_k=3", f"geometry.correction={correction}"]
    reads = "transport={use: high_entropy, of: grpo, fraction: 1.0}"  # so that there is a forward before the update
    _, iteration = collected(tiny("grpo", reads, *knobs))
    rollout = iteration.rollout
    old = torch.cat([batch.logprobs for batch in iteration.updates]).sum()
    assert (rollout.logprobs - rollout.rollout_logprobs).abs().max() > 0.1
    assert_close(old, (rollout.rollout_logprobs if to == "engine" else rollout.logprobs).sum())
