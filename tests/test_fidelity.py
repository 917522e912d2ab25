"""How good credit is: the scores by hand, the truth against a process that is known, and whole runs."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from held import Held
from scipy import stats
from test_training import RECIPES, run, scattered, tiny

from cct.agent.building import restore
from cct.cli import main
from cct.environment.guess_number import HIGHER, LOWER, hidden_number, narrowed, value_of
from cct.loading import dump_recipe, load_recipe
from cct.policy.generation import Completion, Engine
from cct.recipe import Recipe, RecipeError
from cct.rollout import Prompt, Response
from cct.run_folder import RunFolder
from cct.tools.fidelity.branching import advantages_at
from cct.tools.fidelity.measure import measure
from cct.tools.fidelity.scores import (
    Truth,
    bias,
    branched_advantage,
    ceiling,
    difference,
    rank_correlation,
    scale,
    sign_agreement,
    split_half,
    true_variance,
    variance,
    with_interval,
)
from cct.tools.fidelity.table import summary
from cct.training.rows import Row
from cct.training.sampler import Sampler
from cct.transport import transports

POSITIONS = ["--positions", "24", "--continuations", "8", "--batches", "2"]


def truth(advantage, *, p=None, cluster=None, halves=None) -> Truth:
    a = np.asarray(advantage, dtype=float)
    return Truth(
        a,
        halves or (a, a),
        np.zeros(len(a)) if p is None else np.asarray(p, dtype=float),
        np.arange(len(a)) if cluster is None else np.asarray(cluster),
    )


# --- the advantage of continuations -----------------------------------------------------------------
def test_an_advantage_by_hand():
    # With the token: 1 1 0 1 and the two that chose it, 1 1: mean 5/6. Without: 0 0, half of those from before it.
    advantage, p = branched_advantage([1, 1, 0, 1], [1, 0, 0, 1], [True, False, False, True])
    assert advantage == pytest.approx(5 / 12)
    assert p == pytest.approx(stats.ttest_ind([1, 1, 0, 1, 1, 1], [0, 0]).pvalue)


def test_a_token_that_was_never_avoided_is_worth_nothing():
    assert branched_advantage([1, 0, 1, 1], [0, 0, 1, 0], [True] * 4) == (0.0, 1.0)


@pytest.mark.parametrize(("after", "before", "p"), [([1, 1], [0, 0], 0.0), ([1, 1], [1, 1], 1.0)])
def test_returns_that_do_not_vary_are_sure(after, before, p):
    assert branched_advantage(after, before, [False, False])[1] == p


def test_the_advantage_is_unbiased_and_less_noisy_than_the_difference_of_two_means():
    rng, share, with_it, without, n = np.random.default_rng(0), 0.8, 0.7, 0.2, 16
    found, naive = [], []
    for _ in range(4000):
        chose = rng.random(n) < share
        before = rng.random(n) < np.where(chose, with_it, without)
        after = rng.random(n) < with_it
        found.append(branched_advantage(after, before, chose)[0])
        naive.append(after.mean() - before.mean())
    error = np.std(found) / math.sqrt(len(found))
    assert np.mean(found) == pytest.approx((1 - share) * (with_it - without), abs=4 * error)
    assert np.var(found) < np.var(naive) / 2


class Coins(Engine):
    """A fair coin at each place; the seed decides."""

    ZERO, ONE = 5, 6

    def __init__(self):
        pass

    def generate(self, prompts, seeds, limits=None):
        drawn = [np.random.default_rng(seed).integers(0, 2, limit) for seed, limit in zip(seeds, limits, strict=True)]
        return [Completion(tuple((self.ZERO + coins).tolist()), False) for coins in drawn]


class Decoder:
    def decode(self, tokens, skip_special_tokens):
        return "#" + "".join(str(token - Coins.ZERO) for token in tokens)


def test_the_truth_of_a_known_process():
    """Success is three ones in a row of three, by coins: V = 1/8 before the first, 1/4 after a one, 0 after a zero."""
    recipe = tiny("rloo", "generation.max_new_tokens=3")
    right, late, wrong = (6, 6, 6), (6, 6, 5), (5, 6, 6)
    rows = [
        Row(Prompt("", "111"), (1,), Response("", tokens, False), (0.0, 0.0, float(tokens == right)), True, 0)
        for tokens in (right, late, wrong)
    ]
    places = [(0, 0, 1), (0, 1, 1), (0, 2, 1), (1, 2, 1), (2, 0, 1), (2, 1, 1)]
    found, tokens = advantages_at(Sampler(recipe, None, Decoder(), Coins()), rows, places, 4000, 3)
    expected = [1 / 8, 1 / 4, 1 / 2, -1 / 2, -1 / 8, 0]
    assert [whole for whole, *_ in found] == pytest.approx(expected, abs=0.02)
    assert all(half == pytest.approx(whole, abs=0.03) for whole, *halves, _ in found for half in halves)
    assert [p < 0.01 for *_, p in found] == [True] * 5 + [False]
    # Distinct states: none, 1, 11, 0, 01, which leave 3, 2, 1, 2 and 1 tokens.
    assert tokens == 4000 * (3 + 2 + 1 + 2 + 1)


# --- scores ---------------------------------------------------------------------------------------
def test_rank_correlation_by_hand():
    assert rank_correlation(np.array([1.0, 2, 3, 4]), truth([10, 30, 20, 40])) == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)
    assert math.isnan(rank_correlation(np.ones(4), truth([1, 2, 3, 4])))


def test_sign_agreement_by_hand():
    t = truth([0.5, -0.5, 0.5, 0.1], p=[0.001, 0.001, 0.001, 0.5])
    assert sign_agreement(np.array([1.0, -2, 0, -1]), t) == pytest.approx(2 / 3)  # a zero agrees with neither
    assert math.isnan(sign_agreement(np.ones(1), truth([0.1], p=[0.5])))


def test_scale_bias_and_variance_by_hand():
    t = truth([-1.0, 0, 0, 1])
    credit = np.array([-2.0, 2, 0, 4])  # 3 A + 1, and noise of +-1 where A is 0
    assert true_variance(t) == pytest.approx(2 / 3)
    assert scale(credit, t) == pytest.approx(3) and bias(credit, t) == pytest.approx(1 / 3)
    assert variance(credit, t) == pytest.approx(2 / 3 / 9)
    assert math.isnan(bias(-credit, t)) and variance(-credit, t) == math.inf


def noisy(n=20_000, noise=1.0):
    rng = np.random.default_rng(1)
    a = rng.normal(size=n)
    halves = a + noise * rng.normal(size=n), a + noise * rng.normal(size=n)
    return a, truth((halves[0] + halves[1]) / 2, halves=halves), rng


def test_the_noise_of_the_truth_counts_neither_as_scale_nor_as_variance():
    a, t, rng = noisy()
    credit = 2 * a + 3 * rng.normal(size=len(a))
    assert true_variance(t) == pytest.approx(1, abs=0.05)
    assert scale(credit, t) == pytest.approx(2, abs=0.1) and variance(credit, t) == pytest.approx(9 / 4, abs=0.3)


def test_the_ceiling_is_what_exact_knowledge_reaches():
    a, t, _ = noisy()
    assert split_half(a, t) == pytest.approx(6 / math.pi * math.asin(0.5 / 2), abs=0.02)  # Spearman's of normals with r = 1/2
    assert rank_correlation(a, t) == pytest.approx(ceiling(a, t), abs=0.02)
    assert ceiling(a, truth([1.0, 2], halves=(np.array([1.0, 2]), np.array([2.0, 1])))) == 0


# --- intervals --------------------------------------------------------------------------------------
def test_positions_that_share_a_prompt_do_not_narrow_the_interval():
    rng = np.random.default_rng(2)
    a, credit = rng.normal(size=60), rng.normal(size=60)
    once = with_interval(rank_correlation, credit, truth(a), resamples=300)
    thrice = with_interval(
        rank_correlation, np.repeat(credit, 3), truth(np.repeat(a, 3), cluster=np.repeat(np.arange(60), 3)), resamples=300
    )
    as_if_independent = with_interval(rank_correlation, np.repeat(credit, 3), truth(np.repeat(a, 3)), resamples=300)
    assert (thrice.low, thrice.high) == pytest.approx((once.low, once.high)) and once.low < once.value < once.high
    assert as_if_independent.high - as_if_independent.low < 0.8 * (once.high - once.low)


def test_an_interval_that_reaches_what_has_no_value_is_none():
    rng = np.random.default_rng(3)
    a, credit = rng.normal(size=30), rng.normal(size=30)  # sometimes of positive scale, sometimes not
    assert with_interval(variance, credit, truth(a), resamples=200).high == math.inf
    assert math.isnan(with_interval(bias, credit, truth(a), resamples=200).low)
    assert math.isnan(with_interval(rank_correlation, credit, truth(a, cluster=np.zeros(30, int)), resamples=200).low)


def test_the_difference_of_two_is_paired():
    rng = np.random.default_rng(4)
    a = rng.normal(size=200)
    credit = a + rng.normal(size=200)
    same = difference(credit, credit, truth(a), resamples=200)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    better = difference(credit, credit + rng.normal(size=200), truth(a), resamples=200)
    assert better.low > 0 and better.value == pytest.approx(better.value)


# --- runs -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two iterations of CompPO on scores that differ between responses."""
    folder = tmp_path_factory.mktemp("runs")
    return run(scattered(folder, "compo", "training.critic_warmup=1"), folder)


def test_an_oracle_scores_one_and_noise_nothing(finished):
    knobs = {"batches": 4, "positions": 200, "continuations": 16}
    own = "comp_gae (the run's own)"
    first = measure(finished, [], **knobs)
    assert (first.critic, first.iteration, first.responses, len(first.places)) == ("tac", 2, 64, 200)
    assert list(first.credit) == [own] and true_variance(first.truth) > 0
    again = measure(finished, ["grpo"], **knobs)
    np.testing.assert_array_equal(first.truth.advantage, again.truth.advantage)  # one seed, one result
    np.testing.assert_array_equal(first.credit[own], again.credit[own])
    assert not np.array_equal(first.truth.advantage, measure(finished, [], **knobs, seed=5).truth.advantage)
    draws = np.random.default_rng(0).normal(size=200)
    credit, none = {"oracle": first.truth.advantage, "noise": draws}, {"oracle": None, "noise": None}
    made = replace(first, credit=credit, critics=none, explained=none)
    scores = summary(made)["transports"]
    oracle, noise = scores["oracle"]["rank_correlation"], scores["noise"]["rank_correlation"]
    assert oracle["value"] == pytest.approx(1) and scores["oracle"]["sign_agreement"]["value"] == 1
    assert noise["low"] < 0 < noise["high"] and abs(noise["value"]) < 0.2
    assert scores["noise"]["rank_correlation_minus_own"]["high"] < 0


def test_credit_is_what_the_next_iteration_would_have_been_trained_on(finished):
    found = measure(finished, ["grpo"], batches=1, positions=20, continuations=4)
    recipe, agent, tokenizer, moments, iteration = restore(finished)
    collector = Held(recipe, agent, tokenizer)
    collector.estimator.moments = moments
    collected = collector.collect(iteration + 1)
    expected = [float(collected.credit.advantages[row, t]) for _, row, t in found.places]
    np.testing.assert_allclose(found.credit["comp_gae (the run's own)"], expected, atol=1e-6)
    assert all(collected.rows[row].response.logprobs[t] < math.log(0.95) for _, row, t in found.places)
    grpo = transports["grpo"]()(collected.rollout).advantages
    np.testing.assert_allclose(found.credit["grpo"], [float(grpo[row, t]) for _, row, t in found.places], atol=1e-6)


def test_what_the_critic_learnt_is_read_in_other_ways(finished):
    """Around the run's own critic; the group's mean alone is a baseline that needs no critic."""
    ways = ["group_level", "{use: group_mean, weight: 0}"]
    found = measure(finished, ["grpo", "gae"], critics=ways, batches=1, positions=50, continuations=4)
    own = "comp_gae (the run's own)"
    assert list(found.credit) == [own, "grpo", "gae", *(f"{t}, {c}" for c in ways for t in ("comp_gae", "gae"))]
    assert list(found.critics.values()) == ["tac", None, "tac", "group_level", "group_level", "group_mean", "group_mean"]
    recipe, agent, tokenizer, moments, iteration = restore(finished)
    for way, critic in zip(ways, ({"use": "group_level"}, {"use": "group_mean", "weight": 0.0}), strict=True):
        variant = recipe.model_dump() | {"transport": {"use": "gae"}, "critic": critic | {"of": recipe.critic.model_dump()}}
        collector = Held(Recipe.model_validate(variant), agent, tokenizer)
        collector.estimator.moments = moments
        credit = collector.collect(iteration + 1).credit.advantages
        np.testing.assert_allclose(
            found.credit[f"gae, {way}"], [float(credit[row, t]) for _, row, t in found.places], atol=1e-6
        )
        metrics = collector.collect(iteration + 1).metrics
        assert found.explained[f"gae, {way}"] == pytest.approx(metrics["baseline/explained_variance"], abs=1e-6)
        assert found.explained["gae"] == pytest.approx(metrics["critic/explained_variance"], abs=1e-6)
    assert len({found.credit[name].tobytes() for name in found.credit}) == 7
    assert math.isnan(found.explained["grpo"]) and summary(found)["transports"]["grpo"]["explained_variance"] is None


def test_a_critic_inside_another_is_looked_at_by_itself_and_a_run_without_one_has_none(tmp_path):
    inside = "critic={use: group_level, of: {use: tac, output: hl_gauss}}"
    knobs = {"batches": 1, "positions": 20, "continuations": 4}
    folder = run(scattered(tmp_path, "gae", "training.critic_warmup=1", inside), tmp_path / "with")
    found = measure(folder, critics=["tac", "group_mean"], **knobs)
    assert list(found.critics.values()) == ["group_level", "tac", "group_mean"] and len(set(found.explained.values())) == 3
    assert list(measure(run(scattered(tmp_path, "rloo"), tmp_path / "without"), critics=["group_level"], **knobs).credit) == [
        "rloo (the run's own)"
    ]


def test_a_critic_of_scalars_is_at_no_level_and_a_window_is_left_out_with_the_critic(tmp_path):
    knobs = ["training.critic_warmup=1", "critic={use: tac, output: scalar}", "training.critic_window=2"]
    folder = run(scattered(tmp_path, "gae", *knobs), tmp_path)
    with pytest.raises(RecipeError, match="^--critic group_level: group_level shifts log-odds"):
        measure(folder, critics=["group_level"])
    found = measure(folder, ["grpo"], critics=["group_mean"], batches=1, positions=20, continuations=4)
    assert list(found.credit) == ["gae (the run's own)", "grpo", "gae, group_mean"]


def test_a_transport_gets_what_it_asks_to_be_sampled(finished):
    others = ["remax", "{use: vineppo, samples: 2, separator: '+'}", "{use: comp_gae, gate: entropy}"]
    found = measure(finished, others, batches=1, positions=20, continuations=4)
    assert list(found.credit)[1:] == others and all(np.isfinite(credit).all() for credit in found.credit.values())
    assert all(np.ptp(found.credit[name]) > 0 for name in others)


def test_the_command_writes_what_it_prints(finished, tmp_path, capsys):
    assert main(["fidelity", str(finished), "--transport", "grpo", *POSITIONS, "-o", str(tmp_path / "all.json")]) == 0
    printed = capsys.readouterr().out
    found = json.loads((finished / "fidelity.json").read_text())
    assert json.loads((tmp_path / "all.json").read_text()) == [found]
    assert (found["positions"], found["continuations"], found["responses"]) == (24, 8, 32)
    assert found["trained_tokens"] >= found["undecided_tokens"] >= 24 and "24 of the" in printed
    assert [scores["critic"] for scores in found["transports"].values()] == ["tac", None]  # who reads it
    scores, at = found["transports"]["grpo"], found["at_positions"]
    expected = stats.spearmanr(at["credit"]["grpo"], at["advantage"]).statistic
    assert scores["rank_correlation"]["value"] == pytest.approx(expected)
    value = scores["rank_correlation"]["value"]
    assert (f"{value:.2g}" if abs(value) < 0.1 else f"{value:.2f}") in printed


def test_a_recipe_is_looked_at_before_its_first_update_without_a_critic(tmp_path, capsys):
    recipe = scattered(tmp_path, "rloo")
    (tmp_path / "rloo.yaml").write_text(dump_recipe(recipe))
    assert main(["fidelity", str(tmp_path / "rloo.yaml"), *POSITIONS]) == 0
    assert "rloo" in capsys.readouterr().out and not (tmp_path / "fidelity.json").exists()
    (tmp_path / "compo.yaml").write_text(dump_recipe(tiny()))
    assert main(["fidelity", str(tmp_path / "compo.yaml"), *POSITIONS]) == 2
    assert "has not learnt anything before a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--transport", "gea"], "did you mean 'gae'"),
        (["--continuations", "3"], "at least 4"),
        (["--critic", "standard"], "the run trained only 'tac', with the recipe's knobs"),
        (["--critic", "{use: tac, output: two_hot}"], "the run trained only 'tac'"),
        (["--critic", "{use: group_level, of: {use: tac, ladder: [1, 2]}}"], "the run trained only 'tac'"),
        (["--critic", "mini_critics"], "the run trained only 'tac'"),
        (["--critic", "group_levl"], "did you mean 'group_level'"),
        (["--below", "0"], "must be above 0"),
        (["--below", "1e-9"], "0 tokens were sampled with a probability below 1e-09"),
        (["--iteration", "1"], "no checkpoint of iteration 1; there are those of iterations 2"),
    ],
)
def test_what_cannot_be_measured_is_said(finished, capsys, arguments, says):
    assert main(["fidelity", str(finished), *POSITIONS, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_earlier_checkpoints_may_be_kept_to_look_back(tmp_path):
    sets = ["training.iterations=4", "training.checkpoint_every=1", "training.keep_checkpoints=3"]
    folder = run(scattered(tmp_path, "rloo", *sets), tmp_path)
    assert [int(path.stem) for path in RunFolder(folder).checkpoints] == [2, 3, 4]
    knobs = {"batches": 1, "positions": 20, "continuations": 4}
    earlier, last = measure(folder, iteration=2, **knobs), measure(folder, **knobs)
    assert (earlier.iteration, last.iteration) == (2, 4)
    assert {place[0] for place in earlier.places} == {3} and {place[0] for place in last.places} == {5}


def test_a_transport_that_reads_values_needs_a_run_with_a_critic(tmp_path):
    folder = run(scattered(tmp_path, "rloo"), tmp_path)
    with pytest.raises(RecipeError, match="'gae' needs values, and nothing in this recipe provides it"):
        measure(folder, ["gae"])


# --- turns of episodes ------------------------------------------------------------------------------
class GuessingExpert(Engine):
    """Plays as guess_number's expert; the seed decides."""

    def __init__(self, game, tokenizer):
        self.game, self.tokenizer, self.ends = game, tokenizer, [tokenizer.eos_token_id]

    def generate(self, prompts, seeds, limits=None):
        return [self._guess(self.tokenizer.decode(prompt), seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    def _guess(self, text, seed):
        low, high = 1, self.game.numbers
        for guess, hint in re.findall(r"(\d+)<end>([<>])", text):
            low, high = narrowed(low, high, int(guess), hint)
        chances = self.game.expert_policy(low, high, 1)
        (guess,) = random.Random(seed).choices(list(chances), list(chances.values()))
        return Completion((*self.tokenizer(str(guess), add_special_tokens=False)["input_ids"], *self.ends), True, (-0.7, 0.0))


def knowing(game, hidden, low, high, turns):
    """The expert's success probability where the hidden number is known, as it is to whoever branches: the seed is kept."""
    if not turns:
        return 0.0
    chances = game.expert_policy(low, high, turns).items()
    return sum(p * after(game, hidden, low, high, turns, guess) for guess, p in chances)


def after(game, hidden, low, high, turns, guess):
    hint = LOWER if hidden < guess else HIGHER
    return 1.0 if guess == hidden else knowing(game, hidden, *narrowed(low, high, guess, hint), turns - 1)


def guessing(numbers=7, turns=3):
    """A sampler whose policy is the expert, and a judged episode for each hidden number."""
    knobs = [f"environment={{use: guess_number, numbers: {numbers}, max_turns: {turns}, noise: 0.5}}", "policy.warm_start="]
    recipe = load_recipe(RECIPES / "guess_number_grpo.yaml", knobs)
    tokenizer = recipe.policy.tokenizer(alphabet=recipe.alphabet)
    actor = SimpleNamespace(config=SimpleNamespace(get_text_config=SimpleNamespace))
    sampler = Sampler(recipe, actor, tokenizer, GuessingExpert(recipe.environment, tokenizer))
    of = {hidden_number(Prompt("", meta={"seed": seed}), numbers): seed for seed in range(200)}
    prompts = [Prompt("", meta={"seed": of[hidden]}) for hidden in range(1, numbers + 1)]
    (evidence,) = recipe.evidence
    played = sampler.respond(prompts, list(range(numbers)))
    rows = [one.rows(evidence(one.prompt, one.response), True, n, n, 1)[0] for n, one in enumerate(played)]
    return sampler, rows


def test_advantages_of_turns_are_those_that_counting_gives():
    sampler, rows = guessing()
    game = sampler.recipe.environment
    for low, high, turns in ((1, 7, 3), (5, 7, 2), (2, 3, 1)):
        mean = np.mean([knowing(game, hidden, low, high, turns) for hidden in range(low, high + 1)])
        assert mean == pytest.approx(value_of(game.expert_policy, low, high, turns))
    places, exact = [], []
    for number, row in enumerate(rows):
        for k, turn in enumerate(row.response.turns):
            low, high = map(int, turn.state.split("/")[0].split("-"))
            state = game, number + 1, low, high, game.max_turns - k
            places.append((number, row.turns.index(k), turn.tokens))
            exact.append(after(*state, int(turn.text)) - knowing(*state))
    found, _ = advantages_at(sampler, rows, places, 200, 5)
    whole, half, other, p = np.array(found).T
    error, expected = np.mean((whole - exact) ** 2), np.mean((half - other) ** 2) / 4  # the variance, by the halves
    assert 0.4 * expected < error < 2.5 * expected and expected < 1e-3
    assert np.abs(exact).max() > 0.3 and np.corrcoef(whole, exact)[0, 1] > 0.98
    assert (p[np.abs(exact) < 1e-12] > 1e-4).all() and (p[np.abs(exact) > 0.3] < 0.01).all()


def test_a_turn_that_is_continued_says_what_was_said_in_it():
    sampler, rows = guessing()
    row = next(row for row in rows if len(row.response.turns) > 1)
    begin = row.response.turns[0].tokens
    ((one, *_), (whole, *_)), _ = sampler.continue_from(
        rows, [(row.episode, row.response.tokens[:begin]), (row.episode, ())], 4, 0
    )
    assert len(one.said) == 2 and one.said[-1] == sampler.tokenizer.eos_token_id and len(whole.said) == 2


def test_a_run_is_measured_at_its_turns(tmp_path, capsys):
    folder = run(tiny("guess_number_turn_gae"), tmp_path)
    knobs = ["--batches", "1", "--positions", "8", "--continuations", "4", "--below", "1"]
    assert main(["fidelity", str(folder), "--at", "turns", "--transport", "gae", *knobs]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    found = json.loads((folder / "fidelity.json").read_text())
    assert found["at"] == "turns" and found["responses"] == 16 and found["trained_turns"] == found["undecided_turns"] >= 16
    assert f"8 of the {found['undecided_turns']} turns" in printed and "in 16 episodes" in printed
    assert main(["report", str(folder)]) == 0
    assert f"8 of the {found['undecided_turns']} turns sampled" in (folder / "report.html").read_text()
    tokens = measure(folder, batches=1, positions=4, continuations=4)
    assert tokens.at == "tokens" and tokens.trained > found["trained_turns"]


def test_turns_need_episodes(finished, capsys):
    assert main(["fidelity", str(finished), "--at", "turns", *POSITIONS]) == 2
    assert "--at turns needs episodes" in capsys.readouterr().err


def test_turns_of_a_recipe_are_asked_for_before_its_warm_start(capsys, tmp_path):
    recipe = tmp_path / "steps.yaml"  # of a warm start that would take days
    recipe.write_text(f"base: {RECIPES}/grpo.yaml\npolicy: {{warm_start: {{steps: 100000000}}}}\n")
    assert main(["fidelity", str(recipe), "--at", "turns", *POSITIONS]) == 2
    assert "--at turns needs episodes" in capsys.readouterr().err
