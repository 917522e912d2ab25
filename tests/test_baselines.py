"""Baselines by gradient, by reward, by earlier iterations, and a teacher: literal values, reductions, and what a run does."""

from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import make_mask, make_rollout
from rich.console import Console
from test_training import RECIPES, TINY, assert_same_tensors, final_state, run, tiny
from torch.testing import assert_close

from cct.agent.building import teacher as teacher_of
from cct.loading import load_recipe
from cct.preflight import preflight
from cct.recipe import RecipeError
from cct.rollout import Prompt, Response
from cct.run_folder import RunFolder
from cct.statistic import Collision
from cct.tools.replay import compare
from cct.training.judge import apart, names
from cct.training.rows import Row, scores_by_prompt, with_components
from cct.training.run import resume
from cct.transport import distillation_advantage, optimal_token_advantage, transports
from cct.transport.functional import tracked

NAN = float("nan")


def scored(scores, groups, width=1, **fields):
    """A rollout of one trainable token a response, unless wider, with its score at the last."""
    rewards = torch.zeros(len(scores), width)
    rewards[:, -1] = torch.tensor(scores)
    mask = torch.ones(len(scores), width, dtype=torch.bool)
    return make_rollout(mask=mask, rewards=rewards, groups=torch.tensor(groups), **fields)


def outcomes(name, rollout, **knobs):
    return transports[name](**knobs)(rollout).advantages[:, 0]


# --- by hand --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("scores", "groups", "expected"),
    [
        ([1.0, 0, 0, 0], [0] * 4, [3.0, -1, -1, -1]),  # mean 1/4
        ([1.0, 1, 1, 0], [0] * 4, [1 / 3, 1 / 3, 1 / 3, -1]),
        ([1.0, 1, 0, 0], [0, 0, 1, 1], [0.0, 0, 0, 0]),  # all right, all wrong
        ([-2.0, 1.0], [0, 0], [0.0, 0.0]),  # a mean below 0 is no rate of success
        ([2.0, 6.0], [0, 0], [-0.5, 0.5]),
    ],
)
def test_maxrl(scores, groups, expected):
    assert_close(outcomes("maxrl", scored(scores, groups)), torch.tensor(expected), atol=2e-5, rtol=0)


def test_maxrl_is_dr_grpo_in_units_of_the_mean():
    rollout = scored([1.0, 0, 1, 1, 0, 0, 0, 1], [0, 0, 0, 0, 1, 1, 1, 1])
    means = torch.tensor([0.75] * 4 + [0.25] * 4)
    assert_close(outcomes("maxrl", rollout), outcomes("dr_grpo", rollout) / means, atol=2e-5, rtol=0)


def energies():
    """Two responses. Squared gradients 1 - 2 pi + collision: 0.5 - 0 = 0.5 and 1.5 at the first; 1.5 and 0.5 at the second."""
    logprobs = torch.tensor([[0.5, 0.25], [0.25, 0.5]]).log()
    return logprobs, torch.tensor([[0.5, 1.0], [1.0, 0.5]])


def test_otb():
    """First step: weights 0.5 and 1.5, so B = (0.5 * 1 + 1.5 * 0) / 2 = 1/4. Second: 2 and 2, B = 1/2."""
    logprobs, collision = energies()
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), make_mask("11", "11")
    found = optimal_token_advantage(rewards, logprobs, collision, mask, torch.zeros(2, dtype=torch.long))
    assert_close(found, torch.tensor([[0.75, 0.5], [-0.25, -0.5]]))


def test_otb_compares_the_t_th_trainable_tokens():
    """The second response has a gap: its second token is at the third position. Rewards before t no longer count."""
    logprobs = torch.tensor([[0.5, 0.25, 0.9], [0.25, NAN, 0.5]]).log()
    collision = torch.tensor([[0.5, 1.0, 9.0], [1.0, NAN, 0.5]])
    rewards = torch.tensor([[3.0, 1.0, 7.0], [0.0, NAN, 0.0]])
    mask = make_mask("110", "101")
    found = optimal_token_advantage(rewards, logprobs, collision, mask, torch.zeros(2, dtype=torch.long))
    assert_close(found, torch.tensor([[3.0, 0.5, 0.0], [-1.0, 0.0, -0.5]]))  # returns 4 and 1; B = 0.5 * 4 / 2 and 1/2


@pytest.mark.parametrize(("single", "at_the_end"), [("zero", 0.0), ("raw", 1.0)])
def test_otb_where_no_other_response_is_that_long(single, at_the_end):
    mask = make_mask("11", "10")
    rewards, where = torch.tensor([[0.0, 1.0], [1.0, 5.0]]), (*energies(), mask, torch.zeros(2, dtype=torch.long))
    assert_close(optimal_token_advantage(rewards, *where, single=single), torch.tensor([[0.0, at_the_end], [0.0, 0.0]]))


def test_otb_of_equal_gradients_is_dr_grpo():
    rollout = scored([1.0, 0, 0, 3], [0, 0, 1, 1], width=3, stats={"collision": torch.full((4, 3), 0.5)})
    rollout = rollout.replace(logprobs=torch.full((4, 3), math.log(0.25)))
    assert_close(transports["otb"]()(rollout).advantages, transports["dr_grpo"]()(rollout).advantages)


def test_otb_where_every_token_was_certain_takes_the_plain_mean():
    rollout = scored([1.0, 0], [0, 0], stats={"collision": torch.ones(2, 1)}).replace(logprobs=torch.zeros(2, 1))
    assert_close(outcomes("otb", rollout), torch.tensor([0.5, -0.5]))


def test_collision_is_the_chance_that_two_draws_agree():
    distribution = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]]).log()
    assert_close(Collision().measure(SimpleNamespace(distribution=distribution)), torch.tensor([[0.375, 1.0]]))


def several(weights, **components):
    """Rewards by name, [B], with their weights."""
    parts = {name: torch.tensor(numbers).unsqueeze(1) for name, numbers in components.items()}
    total = sum(weights[name] * x.nan_to_num(0.0) for name, x in parts.items())
    rollout = scored([0.0] * len(total), [0, 0, 1, 1])
    return rollout.replace(rewards=total, components=parts, weights=weights)


def test_gdpo():
    """In units of sqrt(1/2), its deviation with ddof 1, `right` is 1, -1, 0, 0, and `short`, however large, 1, -1, -1, 1."""
    rollout = several({"right": 1.0, "short": 0.5}, right=[1.0, 0, 1, 1], short=[100.0, 0, 0, 100])
    unit = math.sqrt(0.5)
    sums = torch.tensor([1.5, -1.5, -0.5, 0.5]) * unit  # sum of squares 5 / 2
    assert_close(outcomes("gdpo", rollout), sums / math.sqrt(2.5 / 3), atol=1e-5, rtol=0)
    verl = sums / math.sqrt(2.5 / 3 + 1e-8)
    assert_close(outcomes("gdpo", rollout, like="verl"), verl, atol=1e-5, rtol=0)
    trl = torch.tensor([1.0, -1, 0, 0]) * 0.5 / (unit + 1e-4) + 0.5 * torch.tensor([1.0, -1, -1, 1]) * 50 / (50 / unit + 1e-4)
    assert_close(outcomes("gdpo", rollout, like="trl"), trl / (trl.std() + 1e-4), atol=1e-5, rtol=0)


def test_gdpo_takes_the_sign_of_a_weight_and_leaves_out_what_was_not_judged():
    rollout = several({"right": 1.0, "long": -1.0}, right=[1.0, 0, NAN, NAN], long=[1.0, 0.0, 3.0, 5.0])
    found = outcomes("gdpo", rollout)
    assert found[0] == found[1] == 0  # right and long cancel
    assert_close(found[2:], torch.tensor([1.0, -1.0]) * math.sqrt(1.5))  # +-c, over the deviation of 0, 0, c, -c


def test_gdpo_of_one_reward_is_grpo_over_the_batch_s_deviation():
    rollout = scored([1.0, 0, 0, 5, 1, 1], [0, 0, 1, 1, 2, 2])
    named = rollout.replace(components={"a": rollout.rewards}, weights={"a": 3.0})
    grpo = outcomes("grpo", rollout)
    assert_close(outcomes("gdpo", rollout), grpo / grpo.std())
    assert_close(outcomes("gdpo", named), grpo / grpo.std())


def test_gdpo_depends_on_neither_order_nor_what_is_masked():
    rollout = several({"right": 1.0, "short": 0.5}, right=[1.0, 0, 1, 1], short=[3.0, 0, 0, 4])
    names = [name for name, x in vars(rollout).items() if isinstance(x, torch.Tensor)]
    flipped = rollout.replace(
        components={name: x.flip(0) for name, x in rollout.components.items()},
        **{name: getattr(rollout, name).flip(0) for name in names},
    )
    assert_close(outcomes("gdpo", flipped).flip(0), outcomes("gdpo", rollout))
    mask = rollout.mask.clone()
    mask[3] = False
    dropped = rollout.replace(mask=mask, components={name: x.where(mask, NAN) for name, x in rollout.components.items()})
    assert outcomes("gdpo", dropped)[2:].tolist() == [0.0, 0.0] and bool(outcomes("gdpo", dropped)[0] > 0)


def test_tracked():
    """alpha = S, beta = N - S: 1, 1, then 0.5 + 1 and 0.5 + 0, then 0.75 + 0 and 0.25 + 1."""
    once = tracked((1.0, 2.0), [1.0], 0.5)
    twice = tracked(once, [0.0], 0.5)
    assert once == (1.5, 2.0) and twice == (0.75, 2.0)
    assert tracked((1.0, 2.0), [1.0, 0.0, 1.0], 0.5) == (2.5, 4.0)


def test_single_stream():
    """Scores minus values are 0.5, -0.25, 0.25, -0.5; their mean is 0, their deviation sqrt(0.625 / 3)."""
    rollout = scored([1.0, 0, 1, 0], [0, 1, 2, 3], prompt_values=torch.tensor([0.5, 0.25, 0.75, 0.5]))
    expected = torch.tensor([0.5, -0.25, 0.25, -0.5]) / math.sqrt(0.625 / 3)
    assert_close(outcomes("single_stream", rollout), expected)
    operator = transports["single_stream"](prior=0.25, prior_weight=4.0, decay=0.5)
    assert operator.expected(None) == 0.25
    past = operator.remembered(None, [1.0])
    assert past == (1.5, 3.0) and operator.expected(past) == 0.5


def test_single_stream_without_memory_is_reinforce_pp_over_responses():
    rollout = scored([1.0, 0, 1, 0], [0, 0, 1, 1], prompt_values=torch.full((4,), 0.3))
    plain = transports["reinforce_pp"](unit="responses", ddof=1)(rollout).advantages
    assert_close(transports["single_stream"]()(rollout).advantages, plain)


def test_distill():
    own, teacher = torch.tensor([[0.5, 0.25, 0.9]]).log(), torch.tensor([[0.25, 0.5, NAN]]).log()
    mask = make_mask("110")
    found = distillation_advantage(own, teacher, mask)
    assert_close(found, torch.tensor([[-math.log(2), math.log(2), 0.0]]))
    assert_close(distillation_advantage(own, teacher, mask, bound=0.5), torch.tensor([[-0.5, 0.5, 0.0]]))
    assert distillation_advantage(own, own, mask).eq(0).all()


def test_the_mean_of_distill_is_minus_the_kl():
    """Over all tokens of a vocabulary, weighted by the policy's probabilities."""
    policy, teacher = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    found = distillation_advantage(policy.log()[None], teacher.log()[None], make_mask("111"))
    assert_close((policy * found[0]).sum(), -(policy * (policy / teacher).log()).sum())


# --- what a run hands over ------------------------------------------------------------------------
def test_evidence_is_told_apart_by_name_and_place():
    evidence = tiny(
        "grpo", "evidence=[exact_match, {use: length, weight: -0.5, max_tokens: 4, buffer: 4}, exact_match]"
    ).evidence
    assert names(evidence) == ["evidence/exact_match/0", "evidence/length", "evidence/exact_match/2"]
    responses = [Response("a", (5, 6), True), Response("b", (7,), True)]
    scores = [[[0.0, 1.0], None], [[0.0, 2.0], []], [[0.0, 0.0], [3.0]]]
    first, second = apart(evidence, scores, responses)
    assert list(first.values()) == [[0.0, 1.0], [0.0, 2.0], [0.0, 0.0]]
    assert second["evidence/exact_match/0"] == [0.0] and math.isnan(second["evidence/length"][0])
    rows = [
        Row(
            Prompt("p"),
            (1,),
            response,
            (0.0,) * len(response.tokens),
            True,
            0,
            components={k: tuple(v) for k, v in own.items()},
        )
        for response, own in zip(responses, (first, second), strict=True)
    ]
    rollout = with_components(make_rollout(mask=make_mask("11", "10")), rows, evidence)
    assert rollout.weights == {"evidence/exact_match/0": 1.0, "evidence/length": -0.5, "evidence/exact_match/2": 1.0}
    assert rollout.components["evidence/exact_match/2"].tolist() == [[0.0, 0.0], [3.0, 0.0]]


def test_scores_are_gathered_by_prompt_and_episode():
    def row(text, episode):
        return Row(Prompt(text), (1,), Response("a", (5,), True), (0.0,), True, 0, episode=episode)

    rows = [row("p", 0), row("q", 1), row("p", 2), row("p", 0), row("q", 3)]
    found = scores_by_prompt(rows, [1.0, 2.0, 3.0, 4.0, 5.0], [True, True, True, True, False])
    assert found == {row("p", 0).key: [5.0, 3.0], row("q", 1).key: [2.0]}
    assert row("p", 0).key != Row(Prompt("p", "1"), (1,), Response("a", (5,), True), (0.0,), True, 0).key


def single_stream(folder, *sets):
    """A recipe of four problems, all of which return in each iteration, to which every response may be right."""
    folder.mkdir(exist_ok=True)
    lines = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(1, 5)]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "test.jsonl").write_text('{"prompt": "0+0=", "answer": "0"}\n')
    (folder / "recipe.yaml").write_text(
        f"base: {RECIPES}/grpo.yaml\nname: stream\n"
        f"task: {{use: jsonl, path: {folder}/train.jsonl, held_out_path: {folder}/test.jsonl}}\n"
        "policy: {alphabet: '0123456789+='}\nevidence: [{use: exact_match, pattern: '([0-9])'}]\n"
        "transport: {use: single_stream, prior: 0.2}\n"
    )
    return load_recipe(folder / "recipe.yaml", [*(knob for knob in TINY if "held_out_size" not in knob), *sets])


def test_values_of_prompts_are_tracked_and_resume_to_the_bit(tmp_path):
    recipe = single_stream(tmp_path / "r", "training.iterations=4", "training.checkpoint_every=2")
    whole = run(recipe, tmp_path)
    cut = Path(shutil.copytree(whole, tmp_path / "cut"))
    RunFolder(cut).checkpoints[-1].unlink()
    resume(cut, None, [], console=Console(file=io.StringIO()))
    a, b = final_state(whole), final_state(cut)
    assert_same_tensors(a["state_dict"], b["state_dict"])
    assert a["RolloutData"]["history"] == b["RolloutData"]["history"]
    values = [RunFolder(folder).rollout(4).prompt_values for folder in (whole, cut)]
    assert torch.equal(*values) and not torch.equal(values[0], torch.full((16,), 0.2))


def test_a_prompt_s_value_is_what_its_earlier_scores_say(tmp_path):
    folder = run(single_stream(tmp_path / "r", "training.iterations=3"), tmp_path)
    operator, past = transports["single_stream"](prior=0.2), dict[tuple[int, ...], tuple[float, float]]()
    for rollout in (RunFolder(folder).rollout(n) for n in (1, 2, 3)):
        prompts = [tuple(row.tolist()) for row in rollout.input_ids[:, : rollout.prompt_width]]
        assert_close(rollout.prompt_values, torch.tensor([operator.expected(past.get(prompt)) for prompt in prompts]))
        for prompt in set(prompts):
            scores = [score for score, of in zip(rollout.scores.tolist(), prompts, strict=True) if of == prompt]
            past[prompt] = operator.remembered(past.get(prompt), scores)
    history = final_state(folder)["RolloutData"]["history"]
    assert len(past) == 4 and sorted(past.values()) == sorted(history.values())


def test_gdpo_trains_on_the_recipe_s_evidence_and_is_replayed_from_what_was_stored(tmp_path):
    evidence = "evidence=[{use: exact_match, pattern: (.)}, {use: length, weight: 0.5, max_tokens: 8, buffer: 8}]"
    folder = run(tiny("grpo", "transport=gdpo", evidence), tmp_path)
    rollout = RunFolder(folder).rollout(1)
    assert rollout.weights == {"evidence/exact_match": 1.0, "evidence/length": 0.5}
    total = sum(weight * rollout.components[name] for name, weight in rollout.weights.items())
    assert_close(total, rollout.rewards)
    compare(folder, ["gdpo"])
    plain = run(tiny("grpo", evidence), tmp_path / "plain")
    assert RunFolder(plain).rollout(1).components == {}
    with pytest.raises(RecipeError, match="needs the rewards of each evidence"):
        compare(plain, ["gdpo"])


TEACHER = [
    "transport=distill",
    "teacher={use: scratch, hidden_size: 32, intermediate_size: 32, layers: 2, heads: 2, kv_heads: 1}",
]


def test_a_teacher_that_is_the_policy_teaches_nothing_at_first(tmp_path):
    folder = run(tiny("grpo", *TEACHER), tmp_path)
    rollout = RunFolder(folder).rollout(1)
    assert_close(rollout.teacher_logprobs[rollout.mask], rollout.logprobs[rollout.mask], atol=1e-5, rtol=0)
    later = RunFolder(folder).rollout(2)
    assert bool(later.teacher_logprobs.isfinite().all())
    assert [event["iteration"] for event in RunFolder(folder).metrics][-1] == 2


def test_the_kl_to_another_teacher_falls(tmp_path):
    other = TEACHER[1].replace("layers: 2", "layers: 1, warm_start: {steps: 60, batch_size: 16, learning_rate: 0.01}")
    knobs = ["training.iterations=20", "training.learning_rate=0.003", "training.schedule=constant", "logging.rollouts=always"]
    folder = run(tiny("grpo", TEACHER[0], other, *knobs), tmp_path)
    kl = []
    for n in (1, 20):
        rollout = RunFolder(folder).rollout(n)
        kl.append(float((rollout.logprobs - rollout.teacher_logprobs)[rollout.mask].mean()))
    assert kl[1] < 0.8 * kl[0]


def test_a_teacher_is_frozen_and_not_exported_or_saved(tmp_path):
    recipe = tiny("grpo", *TEACHER)
    model = teacher_of(recipe)
    assert model is not None and not model.training and not any(p.requires_grad for p in model.parameters())
    assert teacher_of(tiny("grpo")) is None


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["transport=distill"], "set `teacher` to a policy with the same vocabulary"),
        ([TEACHER[1]], "transport 'grpo' has no use for a teacher"),
        ([TEACHER[0], TEACHER[1].replace("layers: 2", "layers: 2, lora: {rank: 2}")], "a teacher does not learn"),
        (["transport=gdpo", "geometry.kl_in_reward=0.1"], "reads the rewards of each evidence"),
    ],
)
def test_what_does_not_fit_is_refused_in_the_recipe(sets, message):
    with pytest.raises(RecipeError, match=message):
        tiny("grpo", *sets)


def test_a_teacher_of_another_vocabulary_is_refused_before_the_run():
    recipe = tiny("grpo", TEACHER[0], TEACHER[1].replace("layers: 2", 'layers: 2, alphabet: "0123456789+-=;#x"'))
    with pytest.raises(RecipeError, match="teacher: 'scratch' has another vocabulary than the policy .* use a teacher of"):
        preflight(recipe)
