"""Prompts without contrast and the fresh ones in their place: which they are, how they count, what a resumed run draws."""

import io
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from test_episode_runs import game
from test_training import assert_same_tensors, final_state, run, scattered, tiny

from cct.agent.building import build
from cct.evidence import Evidence
from cct.policy.generation import Completion
from cct.prompts import drawn, training_prompts
from cct.run_folder import RunFolder
from cct.training.judge import judged, without_contrast
from cct.training.run import resume
from cct.training.sampler import Sampler


def test_contrast_is_two_different_totals():
    totals = [1.0, 0.0, 1.0, 1.0, None, 0.0, None, None, 0.5, None]
    assert without_contrast([4, 4, 1, 1, 2, 2, 7, 7, 3, 3], totals) == [1, 2, 7, 3]
    assert without_contrast([0, 1, 0, 1], [0.0, 0.0, 0.1, 0.0]) == [1]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([None, 0.0, 0.25, 1.0])), max_size=20))
def test_a_group_has_contrast_if_two_of_its_totals_differ(pairs):
    groups, totals = [group for group, _ in pairs], [total for _, total in pairs]
    flat = without_contrast(groups, totals)
    for group in set(groups):
        of_group = [total for other, total in pairs if other == group and total is not None]
        assert (group in flat) == all(a == b for a in of_group for b in of_group)


class Coins(Evidence):
    """By the response's first token: 0 or 1; by the prompt: always 0 for two prompts of three. Keeps what it has judged."""

    def __call__(self, prompt, response):
        assert response.tokens
        return 0.0 if self.flat(prompt.text) else float(response.tokens[0] % 2)

    def flat(self, text):
        return sum(map(ord, text)) % 3 > 0


class Shaped(Evidence):
    """Longer responses get more; no evidence of contrast."""

    def __call__(self, prompt, response):
        return min(1.0, len(response.tokens) / 50)


class Answers:
    """An engine whose responses are of any length, by their seeds; it keeps the prompts that it was asked, in order."""

    def __init__(self, tokenizer):
        self.tokenizer, self.asked = tokenizer, []

    def generate(self, prompts, seeds, limits=None):
        self.asked += [self.tokenizer.decode(prompt) for prompt in prompts]
        return [Completion((5 + seed % 2,) * (1 + seed % 40), True, (-0.7,) * (1 + seed % 40)) for seed in seeds]


def sampler_of(refill, *sets):
    recipe = tiny("grpo", f"training.refill={refill}", *sets).model_copy(update={"evidence": [Coins(), Shaped()]})
    actor, tokenizer = recipe.policy.load(alphabet=recipe.alphabet, seed=0)
    return Sampler(recipe, actor, tokenizer, Answers(tokenizer))


@pytest.mark.parametrize("refill", [1, 3])
def test_prompts_come_in_the_task_s_order_each_once(refill):
    sampler, each = sampler_of(refill), 4
    for iteration in range(1, 31):
        before = len(sampler.engine.asked)
        samples = sampler.sample(iteration)
        assert [row.group for row in samples.rows] == [group for group in range(4) for _ in range(each)]
        assert [row.episode for row in samples.rows] == list(range(16))
        by_group = [
            {row.rewards[-1] - Shaped()(row.prompt, row.response) for row in samples.rows if row.group == g} for g in range(4)
        ]
        left = sum(max(some) - min(some) < 0.5 for some in by_group)
        sampled = (len(sampler.engine.asked) - before) // each
        assert samples.counts["refill/without_contrast"] == left / 4
        assert samples.counts["refill/prompts"] == sampled - 4 == sum(map(len, samples.replaced))
        assert samples.counts["refill/rounds"] == len(samples.replaced) <= refill
        assert len(samples.replaced) == refill or left == 0
    asked = sampler.engine.asked[::each]
    assert asked == [prompt.text for prompt in sampler.recipe.task.prompts(sampler.recipe.seed, 0, len(asked))]
    assert len(asked) == 120 + sampler.extra > 180


def test_what_was_sampled_quickly_is_not_preferred():
    """Every prompt with contrast that was ever sampled is learnt from, whatever the lengths of its responses."""
    sampler, seen = sampler_of(2), []

    class Keeps(Coins):
        def __call__(self, prompt, response):
            found = super().__call__(prompt, response)
            seen.append((prompt.text, len(response.tokens), found))
            return found

    sampler.recipe = sampler.recipe.model_copy(update={"evidence": [Keeps(), Shaped()]})
    learnt = []
    for iteration in range(1, 31):
        rows = sampler.sample(iteration).rows
        for group in range(4):
            of_group = [row for row in rows if row.group == group]
            if len({row.response.tokens[0] % 2 for row in of_group}) > 1 and not Keeps().flat(of_group[0].prompt.text):
                learnt.append((of_group[0].prompt.text, sum(len(row.response.tokens) for row in of_group)))
    groups = [seen[start : start + 4] for start in range(0, len(seen), 4)]
    contrast = [(some[0][0], sum(length for _, length, _ in some)) for some in groups if len({x for *_, x in some}) > 1]
    assert sorted(learnt) == sorted(contrast) and len(contrast) > 30


def test_the_first_evidence_decides_and_not_the_sum():
    sampler = sampler_of(1)
    both = sampler.sample(1)
    sampler = sampler_of(1)
    sampler.recipe = sampler.recipe.model_copy(update={"evidence": [Shaped(), Coins()]})
    assert both.replaced and not sampler.sample(1).replaced  # lengths differ in every group


def test_the_critic_s_warm_up_and_a_refill_of_0_replace_nothing():
    sampler = sampler_of(2)
    before = sampler.sample(0)
    assert before.replaced == [] and "refill/rounds" not in before.counts and sampler.extra == 0
    off, on = sampler_of(0).sample(1), sampler_of(1).sample(1)
    assert "refill/rounds" not in off.counts and on.replaced
    assert [row for row in on.rows if row.group not in on.replaced[0]] == [
        row for row in off.rows if row.group not in on.replaced[0]
    ]


def test_a_failed_response_counts_0_and_one_that_is_left_out_not_at_all():
    class Fails(Coins):
        def __call__(self, prompt, response):
            raise ValueError

    sampler = sampler_of(0)
    prompts = sampler.recipe.prompts(1, 1)[:1]
    responses = [one.response for one in sampler.respond(prompts, [1])]
    assert judged([Fails(on_error="zero")], prompts, responses, 1).totals == [0.0]
    for on_error, replaced in (("zero", [[0, 1, 2, 3]]), ("drop", [[0, 1, 2, 3]])):
        sampler = sampler_of(1)
        sampler.recipe = sampler.recipe.model_copy(update={"evidence": [Fails(on_error=on_error), Shaped()]})
        assert sampler.sample(1).replaced == replaced


def test_a_refill_leaves_out_prompts_that_are_too_long_as_a_first_draw_does():
    recipe = tiny("grpo", "generation.overlong=drop", "training.refill=1")
    agent, tokenizer, _ = build(recipe)
    prompts, overlong = training_prompts(recipe, agent.actor, tokenizer, 2, 3, [[1, 3], [0]])
    stream = recipe.task.prompts(recipe.seed, 0, 20)
    assert prompts == [stream[13], stream[11], stream[9], stream[12]] and overlong == 0
    assert len(drawn(recipe)) == 2 * 2 * 4  # iterations, a refill of all prompts in each


@pytest.mark.parametrize("what", ["checksum", "game"])
def test_a_resumed_run_draws_the_prompts_that_it_would_have_drawn(what, tmp_path):
    sets = ["training.iterations=4", "training.checkpoint_every=2", "training.refill=1"]
    if what == "game":
        recipe = game(*sets)
    else:
        (tmp_path / "half.py").write_text("def score(p, r):\n    return (sum(map(ord, p.text)) % 2) * len(r.text) / 99\n")
        recipe = scattered(tmp_path, "grpo", *sets, f"evidence.0.path={tmp_path}/half.py")
    whole = run(recipe, tmp_path)
    cut = Path(shutil.copytree(whole, tmp_path / "cut"))
    RunFolder(cut).checkpoints[-1].unlink()
    resume(cut, None, [], console=Console(file=io.StringIO()))
    a, b = final_state(whole), final_state(cut)
    assert_same_tensors(a["state_dict"], b["state_dict"])
    assert a["RolloutData"]["extra"] == b["RolloutData"]["extra"] > 0
    refilled = [[e["refill/prompts"] for e in RunFolder(path).metrics if "refill/prompts" in e] for path in (whole, cut)]
    assert refilled[0] == refilled[1] and sum(refilled[0]) == a["RolloutData"]["extra"]
