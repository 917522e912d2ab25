"""Pairs of parts that would run and silently mean something else: refused, with what would keep the meaning."""

from __future__ import annotations

import pytest
from test_recipe import NO_CRITIC, over, the_problem

from cct.geometry import geometries
from cct.loading import load_recipe
from cct.rollout import Credit
from cct.transport import Transport, transports


def test_every_part_declares_its_grain():
    assert {name for name in geometries.names() if geometries[name].grain == "sequence"} == {"gspo", "gmpo", "luspo"}
    for name in geometries.names():
        form = geometries[name].token_form
        assert bool(form) == (geometries[name].grain == "sequence")
        assert not form or geometries[form].grain == "token"
    assert transports["grpo"]().grain == "sequence" and transports["gae"]().grain == "token"
    assert transports["gae"]().whitens == "token" and transports["gae"](whiten=False).whitens is None


@pytest.mark.parametrize("name", ["gspo", "gmpo", "luspo"])
@pytest.mark.parametrize("transport", ["comp_gae", "gae"])
def test_a_geometry_that_would_erase_token_level_credit_is_refused_with_those_that_keep_it(tmp_path, name, transport):
    found = the_problem(over(tmp_path, f"transport: {transport}\ngeometry: {{use: {name}, aggregation: sequence_mean}}"))
    assert "line 3" in found and name in found and transport in found and "gspo_token, its token form" in found
    assert "ppo_clip" in found and found.count("gspo_token") == 1
    assert load_recipe(over(tmp_path, "geometry: gspo_token")).geometry.use == "gspo_token"


@pytest.mark.parametrize("name", geometries.names())
def test_one_number_per_response_goes_with_every_geometry(tmp_path, name):
    assert load_recipe(over(tmp_path, f"geometry: {name}", NO_CRITIC)).geometry.use == name


def test_the_kl_counts_once(tmp_path):
    found = the_problem(over(tmp_path, "geometry: {kl_coef: 0.1, kl_in_reward: 0.2}", NO_CRITIC))
    assert "geometry.kl_in_reward" in found and "twice" in found and "0.1" in found and "0.2" in found
    for knob in ("kl_coef", "kl_in_reward"):
        recipe = load_recipe(over(tmp_path, f"geometry: {{{knob}: 0.1}}", NO_CRITIC))
        assert recipe.geometry.needs == {"reference"} and recipe.providers("reference") == ["policy"]


def test_a_ratio_to_the_engine_takes_no_correction(tmp_path):
    found = the_problem(over(tmp_path, "geometry: {ratio_to: engine, correction: truncate}"))
    assert "geometry.correction" in found and "twice" in found and "ratio_to to trainer" in found
    for knobs in ("ratio_to: engine", "correction: truncate"):
        assert load_recipe(over(tmp_path, f"generation: {{top_p: 0.9}}\ngeometry: {{{knobs}}}"))


@pytest.mark.parametrize("transport", ["vtrace", "{use: rhythm, of: vtrace}"])
def test_vtrace_holds_the_token_s_own_ratio_so_that_nothing_else_may_weigh_by_it(tmp_path, transport):
    for knobs in ("correction: truncate", "correction: mask, correction_level: sequence"):
        found = the_problem(over(tmp_path, f"transport: {transport}\ngeometry: {{{knobs}}}"))
        assert "geometry.correction" in found and "would count twice" in found and "set correction to none" in found
    found = the_problem(over(tmp_path, f"transport: {transport}\ngeometry: {{ratio_to: engine}}"))
    assert "geometry.ratio_to" in found and "would count twice" in found and "set ratio_to to trainer" in found
    assert load_recipe(over(tmp_path, f"transport: {transport}\ngeneration: {{top_p: 0.9}}"))  # it is the correction


def test_retrace_holds_the_ratios_of_later_tokens_so_that_only_the_token_s_own_may_come_in(tmp_path):
    for knobs in ("correction: truncate", "ratio_to: engine", "use: topr, level: token, ratio_to: engine"):
        assert load_recipe(over(tmp_path, f"transport: retrace\ngeometry: {{{knobs}}}\ngeneration: {{top_p: 0.9}}"))
    found = the_problem(over(tmp_path, "transport: retrace\ngeometry: {correction: mask, correction_level: sequence}"))
    assert "later tokens" in found and "would count twice" in found and "set correction_level to token" in found
    for use in ("topr", "gspo_token"):
        found = the_problem(over(tmp_path, f"transport: retrace\ngeometry: {{use: {use}, ratio_to: engine}}"))
        assert "later tokens" in found and "set ratio_to to trainer" in found


def test_a_lag_needs_a_correction(tmp_path):
    found = the_problem(over(tmp_path, "generation: {lag: 1}"))
    assert "generation.lag" in found and "before the last update" in found and "correction to truncate or mask" in found
    for knobs in ("geometry: {ratio_to: engine}", "geometry: {correction: mask}", "transport: vtrace"):
        assert load_recipe(over(tmp_path, f"{knobs}\ngeneration: {{lag: 1}}")).generation.lag == 1
    found = the_problem(over(tmp_path, "generation: {lag: 1}\ngeometry: {use: policy_gradient, ratio_to: engine}"))
    assert "generation.lag" in found and "ratio_to" not in found
    shared = "generation: {use: vllm, lag: 1, tensor_parallel: 2}\ntraining: {devices: 2}\ngeometry: {correction: truncate}"
    assert "set tensor_parallel to 1, or lag to 0" in the_problem(over(tmp_path, shared))
    asleep = "generation: {use: vllm, lag: 1, sleep: false}\ngeometry: {correction: truncate}"
    assert "never sleeps" in the_problem(over(tmp_path, asleep))


def test_a_refill_needs_responses_that_can_differ(tmp_path):
    alone = "training: {refill: 1, responses_per_prompt: 1, minibatch_size: 16}\ntransport: {use: reinforce_pp}"
    assert "one response to a prompt never has contrast" in the_problem(over(tmp_path, alone, NO_CRITIC))
    assert load_recipe(over(tmp_path, "training: {refill: 1}")).training.refill == 1


def test_a_loss_without_a_ratio_is_not_corrected_by_what_the_ratio_is_to(tmp_path):
    text = "generation: {top_p: 0.9}\ngeometry: {use: policy_gradient, ratio_to: engine"
    found = the_problem(over(tmp_path, f"{text}}}"))
    assert "leaves tokens out" in found and "correction" in found and "ratio_to" not in found
    assert load_recipe(over(tmp_path, f"{text}, correction: truncate}}"))


def test_whitening_over_tokens_of_one_number_per_response_is_refused(tmp_path):
    @transports.register("pairing_whitened")
    class WhitenedScores(Transport):
        """Each response's score, whitened over tokens."""

        @property
        def grain(self):
            return "sequence"

        @property
        def whitens(self):
            return "token"

        def __call__(self, rollout):
            return Credit(rollout.scores.unsqueeze(1) * rollout.mask)

    found = the_problem(over(tmp_path, "transport: pairing_whitened", NO_CRITIC))
    assert "pairing_whitened" in found and "whiten over responses" in found
    found = the_problem(over(tmp_path, "transport: {use: high_entropy, of: pairing_whitened}", NO_CRITIC))
    assert "transport.of" in found and "whiten over responses" in found


def test_the_kl_in_rewards_takes_returns_out_of_a_bounded_critic_s_reach(tmp_path):
    geometry = "geometry: {kl_in_reward: 0.1}\n"
    for critic in ("tac", "{use: mini_critics}", "{use: group_mean, of: {use: standard, output: hl_gauss}}"):
        found = the_problem(over(tmp_path, f"{geometry}critic: {critic}"))
        assert "range of the evidence" in found and "scalar" in found and "kl_coef" in found
    for critic in ("{use: tac, output: scalar}", "{use: group_mean, of: {use: tac, output: scalar}}"):
        assert load_recipe(over(tmp_path, f"{geometry}critic: {critic}")).geometry.kl_in_reward == 0.1


@pytest.mark.parametrize("critic", ["group_mean", "group_level"])
def test_a_critic_with_the_group_s_say_needs_a_group(tmp_path, critic):
    text = f"critic: {critic}\ntraining: {{responses_per_prompt: 1, minibatch_size: 16}}"
    assert f"'{critic}' compares responses" in the_problem(over(tmp_path, text))
