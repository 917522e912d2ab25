"""What becomes of responses that are empty, that evidence abstains from, or that it fails on; and what a person sees of it."""

import pickle

import pytest
from held import Held
from test_training import tiny

from cct.agent.building import build
from cct.evidence import Evidence, close_workers, evidences
from cct.evidence.exact_match import ExactMatch
from cct.evidence.python import PythonFunction
from cct.evidence.shape import Format, Length
from cct.policy.generation import Completion
from cct.rollout import Prompt, Response
from cct.training.evaluation import evaluate, evaluate_sampled
from cct.training.judge import Failures, judge
from cct.training.sampler import Sampler


def said(text: str, tokens: int = 2) -> Response:
    return Response(text, tuple(range(5, 5 + tokens)), True)


EMPTY = Response("", (), True)


class Dense(Evidence):
    """One reward for each token, never none."""

    def __call__(self, prompt, response):
        return [0.5] * max(1, len(response.tokens))


class Batch(Evidence):
    """Judges in batches, and takes no empty response."""

    def judge_batch(self, prompts, responses):
        assert all(response.tokens for response in responses)
        return [1.0] * len(responses)


class Fails(Evidence):
    """Raises on everything."""

    def __call__(self, prompt, response):
        raise KeyError("gold")


# --- empty responses ----------------------------------------------------------------------------
@pytest.mark.parametrize("part", [ExactMatch(), Format(pattern=".*"), Length(max_tokens=4, buffer=2), Dense(), Batch()])
def test_an_empty_response_has_no_reward_is_not_kept_and_is_no_error(part):
    rewards, keep, failures = judge([part], [Prompt("p", "1")] * 2, [EMPTY, said("#1")])
    assert rewards[0] == [] and len(rewards[1]) == 2 and keep == [False, True] and not failures


def test_only_empty_responses_are_no_error_in_workers_either(tmp_path):
    (tmp_path / "own.py").write_text("def score(prompt, response):\n    return 1 / len(response.tokens)\n")
    try:
        found = judge([PythonFunction(path=tmp_path / "own.py", workers=1)], [Prompt("p")] * 2, [EMPTY, said("a")])
        assert found == ([[], [0.0, 0.5]], [False, True], {})
    finally:
        close_workers()


class Silent:
    """An engine that emits nothing."""

    def __init__(self, engine):
        self.actor = engine.actor

    def generate(self, prompts, seeds, limits=None):
        return [Completion((), True) for _ in prompts]


@pytest.fixture(scope="module")
def silent():
    recipe = tiny("grpo", "evidence=[{use: length, max_tokens: 4, buffer: 1}]")
    agent, tokenizer, _ = build(recipe)
    engine = recipe.generation.open(agent.actor, tokenizer)
    return Sampler(recipe, agent.actor, tokenizer, engine), Sampler(recipe, agent.actor, tokenizer, Silent(engine))


def test_empty_responses_are_wherever_responses_are(silent):
    talkative, silent = silent
    scored = silent.greedy_scores(silent.recipe.prompts(1, 1), 1)
    assert all(score != score for score in scored) and not silent.failures  # NaN: not to be compared with
    metrics = evaluate(silent)
    assert (metrics["eval/accuracy"], metrics["eval/reward"], metrics["eval/length"]) == (0, 0, 0)
    assert evaluate_sampled(silent, 2, [1])["eval/pass@1"] == 0  # though 0 is the best that length gives
    rows = talkative.sample(1).rows
    states = [(rows[0].group, rows[0].response.tokens[:1])]
    found, cost = silent.continue_from(rows, states, 2, 0)
    assert found == [[]] and cost["branch/tokens"] == 0


# --- evidence that fails ------------------------------------------------------------------------
def failing(count: int, of: int) -> list[str]:
    failures = Failures()
    for number in range(count):
        failures.add("errors/math_verify", f"reason {number}")
    return failures.lines(of, "iteration 3")


def test_evidence_that_fails_for_many_responses_is_a_line_with_count_name_and_first_reason():
    (line,) = failing(8, 8)
    assert line == "warning: iteration 3: evidence 'math_verify' failed for 8 of 8 responses, first: reason 0"
    assert "failed for 1 of 10 responses" in failing(1, 10)[0] and failing(1, 11) == [] == failing(0, 8)


def test_failures_of_processes_are_joined_with_the_first_reason():
    parts = [Failures({"errors/a": 1}, {"errors/a": "one"}), Failures({"errors/a": 2, "timeouts/a": 1}, {"errors/a": "two"})]
    joined = Failures.joined(pickle.loads(pickle.dumps(part)) for part in parts)
    assert joined == {"errors/a": 3, "timeouts/a": 1} and joined.reasons == {"errors/a": "one"}


def test_an_iteration_says_what_failed_and_that_nothing_is_left():
    name = "fails_on_everything"
    if name not in evidences.names():
        evidences.register(name)(Fails)
    recipe = tiny("remax", f"evidence=[{{use: {name}, on_error: drop}}]")
    agent, tokenizer, _ = build(recipe)
    loop, warnings = Held(recipe, agent, tokenizer), list[str]()
    loop.sampler.say = warnings.append
    loop.collect(1)
    assert [line.split(" first:")[0] for line in warnings] == [
        f"warning: iteration 1: evidence '{name}' failed for 16 of 16 responses,",
        "warning: iteration 1: all 16 responses were left out, so there is nothing to learn from",
        f"warning: iteration 1, greedy responses: evidence '{name}' failed for 4 of 4 responses,",
    ]
    assert "KeyError: 'gold'" in warnings[0]
    warnings.clear()
    evaluate(loop.sampler, 1)
    assert warnings[0].startswith(f"warning: eval: evidence '{name}' failed for 8 of 8 responses, first: KeyError: 'gold'")


# --- evidence that abstains, and the iteration --------------------------------------------------
def own(folder, body: str, **knobs) -> PythonFunction:
    (folder / "own.py").write_text(body)
    return PythonFunction(path=folder / "own.py", **({"workers": 0, "time_limit": None} | knobs))


def test_evidence_that_abstains_is_left_out_of_the_sum(tmp_path):
    part = own(tmp_path, "def score(prompt, response):\n    return None if response.text == 'a' else 0.25\n")
    rewards, keep, failures = judge([part, Dense()], [Prompt("p")] * 2, [said("a"), said("b")])
    assert rewards == [[0.5, 0.5], [0.5, 0.75]] and keep == [True, True] and failures == {"abstained/python": 1}


def test_a_response_from_which_all_evidence_abstains_is_not_kept(tmp_path):
    part = own(tmp_path, "def score(prompt, response):\n    return None\n")
    rewards, keep, failures = judge([part], [Prompt("p")] * 2, [said("a"), said("b")])
    assert rewards == [[0.0, 0.0]] * 2 and keep == [False, False]
    assert failures.lines(2, "iteration 1") == ["warning: iteration 1: evidence 'python' abstained for 2 of 2 responses"]


def test_who_cannot_count_0_cannot_abstain(tmp_path):
    part = own(tmp_path, "def score(prompt, response):\n    return None\n", low=1, high=2)
    with pytest.raises(ValueError, match=r"score abstained, which counts 0, outside \[1, 2\]"):
        part(Prompt("p"), said("a"))


@pytest.mark.parametrize("last", ["iteration", "*, iteration=None", "**all"])
def test_a_function_with_a_parameter_iteration_gets_it(tmp_path, last):
    named = "all['iteration']" if last == "**all" else "iteration"
    part = own(tmp_path, f"def score(prompt, response, {last}):\n    return {named} / 10\n")
    assert judge([part], [Prompt("p")], [said("a")], 3)[0] == [[0.0, 0.3]]
    assert judge([part], [Prompt("p")], [said("a")], 4)[0] == [[0.0, 0.4]]


def test_workers_and_a_run_know_the_iteration_too(tmp_path):
    part = own(tmp_path, "def score(prompt, response, iteration):\n    return iteration / 10\n", workers=1, time_limit=60)
    try:
        assert judge([part], [Prompt("p")], [said("a")], 7)[0] == [[0.0, 0.7]]
    finally:
        close_workers()
    recipe = tiny("grpo", f"evidence=[{{use: python, path: {tmp_path / 'own.py'}, workers: 0, time_limit: null}}]")
    agent, tokenizer, _ = build(recipe)
    sampler = Sampler(recipe, agent.actor, tokenizer)
    assert {sum(row.rewards) for row in sampler.sample(2).rows} == {0.2}
    assert evaluate(sampler, 5)["eval/accuracy"] == pytest.approx(0.5)
