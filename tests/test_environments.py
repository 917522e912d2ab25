"""Environments: what they answer, many played at once, and what becomes of one that misbehaves."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from typing import ClassVar

import numpy
import pytest
import torch
from odd_environments import LOG, Obedient, Unmakable
from pydantic import PrivateAttr, ValidationError

from cct.cli import main
from cct.environment import Action, Environment, Episode, EpisodePool, Start, Step
from cct.environment.calculator import Calculator
from cct.environment.checks import total_of
from cct.environment.guess_number import GuessNumber, best_value, hidden_number, value_of
from cct.environment.gym_text import GymText
from cct.environment.textarena import TextArena, why
from cct.environment.tool_calls import FORMATS, Call, calls_in, detect_format
from cct.environment.tools import Tools
from cct.evidence import Failure
from cct.loading import Source, with_bases
from cct.rollout import Prompt
from cct.task.chain_arithmetic import ChainArithmetic
from cct.task.seeds import Seeds
from cct.tools.conformance import check


def say(text: str, finished: bool = True) -> Action:
    return Action(text, text, finished)


def play(episode, *texts):
    """The start, and a step for each text."""
    return [episode.reset(), *(episode.step(say(text)) for text in texts)]


# --- seeds ----------------------------------------------------------------------------------------
def test_seeds_are_prompts_without_text_and_held_out_ones_are_never_trained_on():
    task = Seeds(held_out_size=30)
    held_out = {prompt.meta["seed"] for prompt in task.held_out()}
    stream = [prompt.meta["seed"] for prompt in task.prompts(0, 0, 2000)]
    assert len(held_out) == 30 and not held_out & set(stream) and len(set(stream)) == 2000
    assert all(prompt.text == "" and not prompt.messages for prompt in task.held_out() + task.prompts(0, 0, 5))


def test_seeds_are_a_stream_by_seed_and_position():
    task = Seeds()
    assert task.prompts(3, 5, 4) == task.prompts(3, 0, 9)[5:] and task.prompts(3, 0, 9) != task.prompts(4, 0, 9)


# --- guess_number ---------------------------------------------------------------------------------
def seeded(hidden: int, numbers: int = 15) -> Prompt:
    """A prompt whose number is this one."""
    prompts = (Prompt("", meta={"seed": seed}) for seed in range(10_000))
    return next(prompt for prompt in prompts if hidden_number(prompt, numbers) == hidden)


def test_guess_number_hints_and_rewards_the_find():
    start, first, second, third = play(GuessNumber().open(seeded(6), 0), "8", "4", " 6\n")
    assert start == Start("?", "1-15/4")
    assert (first.observation, first.state, first.reward, first.done) == ("<", "1-7/3", 0.0, False)
    assert (second.observation, second.state) == (">", "5-7/2")
    assert third.done and third.reward == 1.0 and third.observation is None


@pytest.mark.parametrize("text", ["", "0", "16", "-3", "3.0", "8 9", "eight", "9" * 40, "٣"])
def test_what_is_no_number_in_range_costs_a_turn(text):
    _, step, last = play(GuessNumber(max_turns=2).open(seeded(6), 0), text, text)
    assert (step.observation, step.state, step.reward, step.done) == ("x", "1-15/1", 0.0, False)
    assert last.done and last.reward == 0.0 and not last.truncated


def test_a_hint_that_was_known_leaves_the_interval_as_it_is():
    steps = play(GuessNumber().open(seeded(6), 0), "8", "12")
    assert steps[2].observation == "<" and steps[2].state == "1-7/2"


def test_every_episode_of_a_prompt_hides_the_same_number_and_numbers_are_uniform():
    game = GuessNumber()
    assert play(game.open(seeded(3), 1), "8", "2") == play(game.open(seeded(3), 2), "8", "2")
    drawn = [hidden_number(Prompt("", meta={"seed": seed}), 15) for seed in range(3000)]
    assert {*drawn} == {*range(1, 16)} and min(map(drawn.count, range(1, 16))) > 140


def test_guess_number_needs_a_seed():
    with pytest.raises(ValueError, match="task: seeds"):
        GuessNumber().open(Prompt("3+4="), 0)


def test_the_best_value_by_hand():
    assert best_value(1, 15, 4) == best_value(4, 4, 1) == 1.0
    assert best_value(1, 2, 1) == 0.5 and best_value(1, 7, 2) == pytest.approx(3 / 7) and best_value(1, 3, 0) == 0.0


def middle(low, high, turns):
    return {(low + high) // 2: 1.0}


@pytest.mark.parametrize("high, turns", [(1, 1), (6, 2), (7, 3), (15, 4), (20, 4), (15, 3)])
def test_halving_reaches_the_best_value_and_no_other_policy_more(high, turns):
    assert value_of(middle, 1, high, turns) == pytest.approx(best_value(1, high, turns))
    rng = random.Random(high)

    def noisy(low, high, turns):
        weights = [rng.random() for _ in range(low, high + 1)]
        return {guess: weight / sum(weights) for guess, weight in zip(range(low, high + 1), weights, strict=True)}

    assert value_of(noisy, 1, high, turns) <= best_value(1, high, turns) + 1e-12


def test_the_value_of_a_policy_by_hand():
    upwards = value_of(lambda low, high, turns: {low: 1.0}, 1, 3, 2)  # 1, then 2: two of three numbers
    assert upwards == pytest.approx(2 / 3)
    # Half of the time it says nothing: 1/2 * V(1 turn) + 1/2 * (1/3 + 2/3 * 0.5 * 1/2), and V(1 turn) = 1/2 * 1/3.
    stammering = value_of(lambda low, high, turns: {None: 0.5, low: 0.5}, 1, 3, 2)
    assert stammering == pytest.approx(0.5 / 6 + 0.5 * (1 / 3 + 2 / 3 * 0.5 / 2))
    assert value_of(lambda low, high, turns: {99: 1.0}, 1, 3, 5) == 0.0


def test_best_play_always_succeeds_at_the_defaults():
    game = GuessNumber(noise=0.0)
    for hidden in range(1, 16):
        assert played_by_expert(game, seeded(hidden), 0) == 1.0


def played_by_expert(environment, prompt, seed):
    """The total reward of a demonstration, its actions played again."""
    shown = environment.demonstration(prompt, seed)
    episode = environment.open(prompt, seed)
    start, *steps = play(episode, *(text for text, _ in shown.turns))
    assert start.observation == shown.start and [step.observation for step in steps] == [seen for _, seen in shown.turns]
    assert steps[-1].done
    return sum(step.reward for step in steps)


def test_the_expert_succeeds_as_often_as_counting_says():
    game = GuessNumber()
    exact = value_of(game.expert_policy, 1, game.numbers, game.max_turns)
    assert 0.3 < exact < 0.45
    played = [played_by_expert(game, Prompt("", meta={"seed": seed}), seed) for seed in range(2000)]
    assert abs(statistics.mean(played) - exact) < 0.035  # three standard errors
    assert all({*text} <= {*game.alphabet} for text, _ in game.demonstration(seeded(1), 0).turns)


# --- many at once ---------------------------------------------------------------------------------
WORKERS = pytest.mark.parametrize("workers", [0, 2])


def obedient(**knobs) -> Obedient:
    return Obedient(**knobs)


def items(*texts: str) -> list[tuple[Prompt, int]]:
    return [(Prompt(text), seed) for seed, text in enumerate(texts, 10)]


def alone(item: tuple[Prompt, int], *actions: str) -> list:
    """An episode played by itself, in a pool of its own."""
    with EpisodePool(obedient()) as pool:
        return [*pool.start([item]), *(pool.step([0], [say(action)])[0] for action in actions)]


@WORKERS
def test_an_episode_is_the_same_whatever_is_played_beside_it(workers):
    four = items("a", "b", "c", "d")
    expected = [alone(item, "draw", "draw", "draw") for item in four]
    with EpisodePool(obedient(workers=workers)) as pool:
        found = [[start] for start in pool.start(four)]
        for which in ([3, 0, 1, 2], [2, 1, 3], [0, 3, 1], [2, 0]):
            for number, step in zip(which, pool.step(which, [say("draw")] * len(which)), strict=True):
                found[number].append(step)
    assert found == expected
    assert len({step.observation for steps in found for step in steps}) == 16  # each draws its own


@WORKERS
def test_replay_begins_at_a_later_turn(workers):
    item = items("a")[0]
    expected = alone(item, "draw", "draw", "draw")
    with EpisodePool(obedient(workers=workers)) as pool:
        played = [(*item, [say("draw")] * turns) for turns in (0, 2, 1)]
        assert pool.replay(played) == [expected[0], expected[2], expected[1]]
        assert pool.step([1, 2], [say("draw")] * 2) == [expected[3], expected[2]]
        assert pool.replay([(*item, [say("done"), say("draw")])])[0].reason == "episode 0 is over"


def test_the_trainer_draws_as_if_no_episode_were_played():
    def drawn(play_beside: bool):
        random.seed(1)
        numpy.random.seed(1)
        first = random.random(), numpy.random.random()
        if play_beside:
            alone(items("a")[0], "draw", "seed_globals", "draw", "done")
        return first, random.random(), numpy.random.random()

    assert drawn(True) == drawn(False)


@WORKERS
def test_what_fails_is_one_episode_of_many(workers):
    with EpisodePool(obedient(workers=workers)) as pool:
        starts = pool.start(items("a", "cannot open", "b"))
        assert isinstance(starts[1], Failure) and starts[1].reason.startswith("KeyError: 'no such level'")
        failed, fine = pool.step([0, 2], [say("fail"), say("draw")])
        assert failed.reason.startswith("RuntimeError: the game crashed (") and "odd_environments.py" in failed.reason
        assert fine == alone((Prompt("b"), 12), "draw")[1]
        assert pool.step([2, 0], [say("draw")] * 2)[1].reason == failed.reason  # and stays so
        assert pool.step([2], [say("exit")])[0].reason.startswith("SystemExit: 3")


@pytest.mark.parametrize("workers", [2])
def test_a_worker_that_dies_or_hangs_costs_its_episode_only(workers):
    four = items("a", "b", "c", "d")
    expected = [alone(item, "draw", "draw", "draw") for item in four]
    with EpisodePool(obedient(workers=workers, time_limit=1.5)) as pool:
        pool.start(four)
        pool.step([0, 1, 2, 3], [say("draw")] * 4)
        found = pool.step([0, 1, 2, 3], [say("draw"), say("die"), say("draw"), say("draw")])
        assert found[1] == Failure("its worker process ended (exit code 7)")
        assert [found[0], *found[2:]] == [expected[number][2] for number in (0, 2, 3)]
        found = pool.step([3, 2, 0], [say("draw"), say("hang"), say("draw")])
        assert found[1] == Failure("took longer than time_limit, 1.5 s", timed_out=True)
        assert [found[0], found[2]] == [expected[3][3], expected[0][3]]


def test_the_time_limit_is_of_one_step_and_workers_run_side_by_side():
    with EpisodePool(obedient(workers=3, time_limit=2.0)) as pool:
        pool.start(items("a", "b", "c", "d", "e", "f"))
        since = time.monotonic()
        steps = pool.step(range(6), [say("sleep 1.2")] * 6)  # two after one another in each worker
        assert [step.observation for step in steps] == ["rested"] * 6 and 2.3 < time.monotonic() - since < 5


def test_workers_stay_from_batch_to_batch():
    with EpisodePool(obedient(workers=2)) as pool:
        seen = []
        for _ in range(2):
            pool.start(items("a", "b", "c"))
            seen.append([step.observation for step in pool.step([0, 1, 2], [say("process")] * 3)])
        assert seen[0] == seen[1] and len({*seen[0]}) == 2 and seen[0][0] == seen[0][2]
        pids = [int(pid) for pid in {*seen[0]}]
    for pid in pids:  # and end with the pool
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_environment_that_cannot_be_made_in_a_worker_says_so():
    with EpisodePool(Unmakable(workers=1)) as pool:
        for _ in range(2):
            assert "no licence here" in pool.start(items("a"))[0].reason


def test_an_episode_that_does_not_follow_from_its_seed_is_found_out_when_it_is_played_again():
    with EpisodePool(obedient(workers=1)) as pool:
        pool.start(items("a", "b"))
        pool.step([0, 1], [say("process"), say("draw")])  # its answer is another one in a new worker
        pool.step([1], [say("die")])
        assert "must follow from its prompt, seed and actions" in pool.step([0], [say("draw")])[0].reason


@WORKERS
def test_every_episode_is_closed_once(workers, tmp_path):
    os.environ[LOG] = str(tmp_path / "log")
    try:
        with EpisodePool(obedient(workers=workers)) as pool:
            pool.start(items("done", "failed", "ended", "living", "cannot close"))
            pool.step([0, 1, 4], [say("done"), say("fail"), say("draw")])
            pool.end([2, 4, 4])
            pool.end([2])
        pool.close()
    finally:
        del os.environ[LOG]
    closed = sorted((tmp_path / "log").read_text().splitlines())
    assert closed == ["cannot close 1", "done 1", "ended 0", "failed 1", "living 0"]


def test_control_c_ends_the_workers():
    with EpisodePool(obedient(workers=1)) as pool:
        pool.start(items("a"))
        pid = int(pool.step([0], [say("process")])[0].observation)
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.step([0], [say("hang")])
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert isinstance(pool.start(items("a"))[0], Start)  # a later start begins anew


def test_a_step_takes_each_episode_once():
    with EpisodePool(obedient()) as pool:
        pool.start(items("a"))
        with pytest.raises(ValueError, match="one turn at a time"):
            pool.step([0, 0], [say("draw")] * 2)


# --- answers --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "action, says",
    [
        ("not a step", "step returned a value of type dict; expected a cct.environment.Step"),
        ("no observation", "the observation None but the episode is not over"),
        ("no messages", "the observation [] but the episode is not over"),
        ("number", "the observation a value of type int; expected text, or messages"),
        ("no role", "message 1 of the observation has no role; its keys are 'content'"),
        ("no mapping", "message 1 of the observation is a value of type str"),
        ("content", "'content' is None; expected text"),
        ("surrogate", "'\\ud800', which no UTF-8 text can"),
        ("nan", "the reward as nan; expected a finite number"),
        ("inf", "the reward 'a' as inf; expected a finite number"),
        ("huge", "the reward as 10000000000000.0; expected a finite number of at most 1e+12 in size"),
        ("text reward", "the reward as a value of type str"),
        ("unknown", "a reward named 'c'; its property `components` names a, b"),
        ("beyond", "the episode's rewards add up to 3, outside the environment's bounds [-1, 1]"),
        ("state", "the state as a value of type int; expected a name, or None"),
        ("done?", "done as a value of type str; expected True or False"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_answer_that_cannot_be_used_is_a_failure_that_says_why(action, says, workers):
    if workers and action != "nan":
        workers = 0  # the same function; once is enough
    with EpisodePool(obedient(workers=workers)) as pool:
        pool.start(items("a"))
        step = pool.step([0], [say(action)])[0]
    assert isinstance(step, Failure) and step.reason.startswith("environment 'obedient': ") and says in step.reason


@pytest.mark.parametrize(
    "prompt, says",
    [("nothing", "the observation None; expected text"), ("number", "a value of type int"), ("state", "the state")],
)
def test_so_is_a_start(prompt, says):
    assert says in alone(items(prompt)[0])[0].reason


def test_rewards_of_all_steps_count_towards_the_bounds():
    start, first, second = alone(items("a")[0], "plus", "done")
    assert (start.state, first.reward) == ("first", 0.75) and "add up to 1.75" in second.reason


def test_what_can_be_used_is_made_plain():
    assert alone(items("messages")[0])[0] == Start("")
    assert alone(items("a")[0], "named")[1] == Step("x", {"a": 0.25, "b": 0.5})
    assert alone(items("a")[0], "empty")[1] == Step("")
    messages = alone(items("a")[0], "messages")[1].observation
    assert messages == ({"role": "user", "content": "a"}, {"role": "tool", "content": "b", "name": "c"})
    assert alone(items("a")[0], "cut")[1] == Step(truncated=True)  # nobody reads what follows
    assert alone(items("a")[0], "numpy flag")[1] == Step(done=True)


# --- tools ----------------------------------------------------------------------------------------
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, null]}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2, null]\n</parameter>\n"
    "</function>\n</tool_call>"
)
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": [2, null]}}'
MISTRAL = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": [2, null]}}]'
ADD = Call("add", {"a": 1, "b": [2, None]})


@pytest.mark.parametrize(
    "format, turn",
    [
        ("hermes", HERMES),
        ("hermes", f"Let me see. {HERMES}"),
        ("hermes", HERMES.removesuffix("</tool_call>")),  # its end was the token that ended the turn
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": [2, null]}"}</tool_call>'),
        ("hermes", f"<think>Perhaps <tool_call>{{}}</tool_call>?</think>{HERMES}"),
        ("qwen3_coder", CODER),
        ("llama3", LLAMA),
        ("llama3", f"<|python_tag|>{LLAMA}"),
        ("mistral", MISTRAL),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, null]}'),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1, "b": [2, null]}'),
    ],
)
def test_a_call_is_read_as_its_format_says(format, turn):
    assert calls_in(turn, format) == calls_in(turn, "auto") == [ADD]


@pytest.mark.parametrize(
    "format, turn",
    [
        ("hermes", f"{HERMES}\n{HERMES}"),
        ("qwen3_coder", f"{CODER}\n{CODER}"),
        ("llama3", f"{LLAMA}; {LLAMA}"),
        ("mistral", MISTRAL.replace("}]", "}, ") + MISTRAL.removeprefix("[TOOL_CALLS][")),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, null]}' * 2),
    ],
)
def test_a_turn_may_make_several_calls(format, turn):
    assert calls_in(turn, format) == calls_in(turn, "auto") == [ADD, ADD]


@pytest.mark.parametrize("format", ["auto", *FORMATS])
@pytest.mark.parametrize("turn", ["", "The answer is 3.", "a { b", f"<think>{HERMES}{MISTRAL}</think>None needed."])
def test_a_turn_without_a_call_has_none(format, turn):
    assert calls_in(turn, format) == []


@pytest.mark.parametrize(
    "format, turn, says",
    [
        ("hermes", "<tool_call>{add}</tool_call>", "not valid JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'expected an object with "name" and "arguments"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', '"arguments" of add must be an object'),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "not valid JSON (RecursionError)"),
        ("qwen3_coder", "<tool_call>add</tool_call>", "without <function=NAME>"),
        ("llama3", '{"name": "add", "parameters": {', "not valid JSON"),
        ("llama3", "<|python_tag|>add(1, 2)", "not valid JSON"),
        ("mistral", "[TOOL_CALLS]add", "not valid JSON"),
        ("mistral", "[TOOL_CALLS][3]", "expected an object"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(format, turn, says):
    (call,) = calls_in(turn, format)
    assert says in call.problem and not call.name


@pytest.mark.parametrize(
    "format, template",
    [
        ("hermes", '{% for tool in tools %}{% endfor %}{{- \'<tool_call>\\n{"name": <function-name>, "arguments": \' }}'),
        ("hermes", '{% if tools %}{{- "<tool_call>\\n{\\"name\\": <function-name>" }}'),
        ("qwen3_coder", "{% if tools %}<tool_call>\n<function=example>\n<parameter=one>"),
        ("llama3", '{% if tools %}Environment: ipython {"name": function name, "parameters": dictionary'),
        ("mistral", "{% if tools is not none %}[AVAILABLE_TOOLS] [TOOL_CALLS] ["),
    ],
)
def test_the_format_follows_from_the_template(format, template):
    assert detect_format(template) == format


def test_a_template_without_tools_is_refused():
    with pytest.raises(ValueError, match="the chat template does not support tools"):
        detect_format("{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(ValueError, match="asks for calls in none of the supported formats"):
        detect_format("{% for tool in tools %}<tool_call>{function-name}{% endfor %}")
    with pytest.raises(ValueError, match="a policy with a chat template"):
        Tools(tools=["json:loads"]).fitted(None)


TOOLS = '''
import sys

def search(query: str, limit: int = 2) -> list[str]:
    """Find pages.

    Args:
        query: What to look for.
        limit: How many pages.
    """
    return [f"{query} {number}" for number in range(limit)]

def say(text: str) -> str:
    """Say it back.

    Args:
        text: What to say.
    """
    if text == "raise":
        raise KeyError("no such page")
    if text == "leave":
        sys.exit(1)
    return text

def undescribed(x):
    return x

NUMBER = 3
'''


@pytest.fixture
def my_tools(tmp_path):
    (tmp_path / "my_tools.py").write_text(TOOLS)
    return lambda *names, **knobs: Tools(tools=[f"{tmp_path}/my_tools.py:{name}" for name in names], **knobs)


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def contents(step) -> list[str]:
    return [message["content"] for message in step.observation]


def test_functions_become_tools_by_their_signatures(my_tools):
    search, say_ = my_tools("search", "say").tool_schemas
    assert search["function"]["name"] == "search" and search["function"]["description"] == "Find pages."
    assert search["function"]["parameters"]["required"] == ["query"]
    assert say_["function"]["parameters"]["properties"]["text"] == {"type": "string", "description": "What to say."}
    assert Tools(tools=["json:dumps"]).functions["dumps"] is json.dumps


@WORKERS
def test_tools_answer_calls_and_a_turn_without_one_is_the_answer(my_tools, workers):
    with EpisodePool(my_tools("search", "say", workers=workers).fitted('{{ tools }}<tool_call>{"name"')) as pool:
        assert pool.start([(Prompt("Who?"), 0)]) == [Start("")]
        (step,) = pool.step([0], [say(call("search", query="x") + call("say", text="hé"))])
        assert step == Step(
            (
                {"role": "tool", "name": "search", "content": '["x 0", "x 1"]', "tool_call_id": "000000001"},
                {"role": "tool", "name": "say", "content": "hé", "tool_call_id": "000000002"},
            )
        )
        assert pool.step([0], [Action("said", raw=call("say", text="raw"))])[0].observation[0]["content"] == "raw"
        assert pool.step([0], [say("It was x 0.")]) == [Step(done=True)]
        pool.start([(Prompt("Who?"), 0)])
        assert pool.step([0], [say("It was", finished=False)]) == [Step(truncated=True)]


@pytest.mark.parametrize(
    "turn, says",
    [
        (call("say", text="raise"), "Error: say raised KeyError: 'no such page'"),
        (call("say", text="leave"), "Error: say raised SystemExit: 1"),
        (call("say"), "Error: say: missing a required argument: 'text'"),
        (call("say", text="a", loud=True), "Error: say: got an unexpected keyword argument 'loud'"),
        (call("sya", text="a"), "Error: no tool is called 'sya' (did you mean 'say'?); there are: say"),
        ("<tool_call>say</tool_call>", "Error: this call cannot be read: not valid JSON (Expecting value): say"),
        (call("say", text="a" * 40), "a" * 16 + "\n[cut at 16]"),
    ],
)
def test_what_goes_wrong_is_said_to_the_policy(my_tools, turn, says):
    episode = my_tools("say", max_characters=16).open(Prompt("Who?"), 0)
    assert contents(episode.step(say(turn))) == [says]


@pytest.mark.parametrize(
    "names, says",
    [
        (["undescribed"], "tool 'undescribed' cannot be described to the policy"),
        (["serach"], "did you mean 'search'"),
        (["NUMBER"], "NUMBER is a value of type int; expected a function"),
        (["say", "say"], "two tools are called 'say'"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(my_tools, names, says):
    with pytest.raises(ValueError, match=says):
        my_tools(*names).ready()


def test_tools_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ValueError, match="none.py does not exist"):
        Tools(tools=[f"{tmp_path}/none.py:search"]).ready()
    with pytest.raises(ValueError, match="no such module is installed"):
        Tools(tools=["no_such_package.tools:search"]).ready()
    with pytest.raises(ValidationError, match="pattern"):
        Tools(tools=["search"])


# --- calculator -----------------------------------------------------------------------------------
SUM = Prompt("3+5-7=", "1")


def test_the_calculator_answers_steps_and_the_answer_ends_the_episode():
    start, first, second, last = play(Calculator().open(SUM, 0), "3+5?", "8-7?", "#1")
    assert start == Start("", "3+5-7=")
    assert first == Step("8;", {"call": -0.01}, state="8-7=") and second == Step("1;", {"call": -0.01}, state="1=")
    assert last == Step(reward={"correct": 1.0}, done=True)


@pytest.mark.parametrize("turn, correct", [("3+5=8;8-7=1#1", 1.0), ("3+5=9;9-7=2#2", 0.0), ("#1", 1.0), (" #0\n", 0.0)])
def test_a_turn_may_work_all_steps_itself(turn, correct):
    assert play(Calculator().open(SUM, 0), turn)[1] == Step(reward={"correct": correct}, done=True)


def test_steps_may_be_worked_before_a_call():
    _, step = play(Calculator().open(SUM, 0), "3+5=9;9-7?")
    assert (step.observation, step.state) == ("2;", "2=")


@pytest.mark.parametrize("turn", ["", "3+5", "3+?", "13 5?", "#", "#12 ", "?"])
def test_anything_else_costs_a_turn(turn):
    _, step = play(Calculator().open(SUM, 0), turn)
    assert step == Step("!", 0.0, state="3+5-7=")


def test_the_calculator_takes_sums_only():
    with pytest.raises(ValueError, match="task chain_arithmetic"):
        Calculator().open(Prompt("What is 3+5?"), 0)


def test_the_expert_that_asks_for_every_step_is_right_and_the_one_that_errs_is_not():
    task = ChainArithmetic(steps=6)

    def rewards(**knobs):
        calculator = Calculator(**knobs)
        return [
            sum(total_of(step.reward) for step in play(calculator.open(prompt, 0), *shown)[1:])
            for seed, prompt in enumerate(task.prompts(0, 0, 100))
            for shown in [[text for text, _ in calculator.demonstration(prompt, seed).turns]]
        ]

    assert rewards(call_rate=1.0, call_cost=0.01) == pytest.approx([0.94] * 100)
    assert rewards(call_rate=0.0, noise=0.0) == [1.0] * 100
    assert 0.2 < statistics.mean(rewards(call_rate=0.0, call_cost=0)) < 0.6  # some errors cancel out, or meet no noisy operand
    assert 0.4 < statistics.mean(rewards(call_cost=0)) < 0.8


def test_demonstrations_keep_to_the_alphabet_and_the_rewards_to_the_bounds():
    calculator, task = Calculator(), ChainArithmetic(steps=8, operators="+-*")
    for seed, prompt in enumerate(task.prompts(0, 0, 50)):
        shown = calculator.demonstration(prompt, seed)
        text = prompt.text + "".join(said + (seen or "") for said, seen in shown.turns)
        assert {*text} <= {*calculator.alphabet} and text.count("#") == 1
    low, high = Calculator(call_cost=0.1, max_turns=5).bounds
    assert (low, high) == (-0.5, 1.0)


# --- textarena ------------------------------------------------------------------------------------
def guess_by_halving(seen: list[str]) -> str:
    low, high = 1, 20
    for text in seen[1:]:
        if "lower" in text:
            high = (low + high) // 2 - 1
        else:
            low = (low + high) // 2 + 1
    return f"[{(low + high) // 2}]"


def walk_round_the_holes(seen: list[str]) -> str:
    """The first step of a shortest way, by breadth."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in seen[-1].splitlines() if line.startswith("|")]
    cells = {(r, c): cell for r, row in enumerate(rows) for c, cell in enumerate(row)}
    here = next(place for place, cell in cells.items() if cell == "P")
    ways, visited = [(here, "")], {here}
    for (r, c), first in ways:
        if cells[r, c] == "G":
            return f"[{first}]"
        for move, place in {"up": (r - 1, c), "down": (r + 1, c), "left": (r, c - 1), "right": (r, c + 1)}.items():
            if cells.get(place, "H") != "H" and place not in visited:
                visited.add(place)
                ways.append((place, first or move))
    raise AssertionError("there is no way")


def move_the_tower(seen: list[str]) -> str:
    return ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"][len(seen) - 1]


def pegs(code, guess) -> tuple[int, int]:
    black = sum(a == b for a, b in zip(code, guess, strict=True))
    return black, len({*code} & {*guess}) - black


def guess_what_fits(seen: list[str]) -> str:
    """The first code without duplicates that is in line with all feedback."""
    shown = [re.search(r"\[(.*)\]. Feedback: (\d) black peg\(s\), (\d) white", text) for text in seen[1:]]
    known = [(tuple(match[1].split()), (int(match[2]), int(match[3]))) for match in shown]
    fits = (code for code in itertools.permutations("123456", 4) if all(pegs(code, guess) == n for guess, n in known))
    return f"[{' '.join(next(fits))}]"


def put_out_the_lights(seen: list[str]) -> str:
    """The first press of the shortest solution: the top row's presses decide all others."""
    lit = [line.split(":")[1].split() for line in seen[-1].splitlines() if re.match(r"\d:", line)]

    def solution(top) -> list[tuple[int, int]] | None:
        on, presses = {(r, c) for r in range(5) for c in range(5) if lit[r][c] == "O"}, []
        for r in range(5):
            for c in range(5):
                if top[c] if r == 0 else (r - 1, c) in on:
                    presses.append((r, c))
                    on ^= {(r, c), (r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)} & {*itertools.product(range(5), repeat=2)}
        return None if on else presses

    found = [presses for top in itertools.product((0, 1), repeat=5) if (presses := solution(top)) is not None]
    r, c = min(found, key=len)[0]
    return f"[{r} {c}]"


GAMES = [
    ("GuessTheNumber-v0", guess_by_halving),
    ("FrozenLake-v0", walk_round_the_holes),
    ("TowerOfHanoi-v0", move_the_tower),
    ("Mastermind-v0", guess_what_fits),
    ("LightsOut-v0", put_out_the_lights),
]


def scripted(pool, starts, player, seeds):
    """Play all episodes to their ends; rewards and everything that was seen, and what was done."""
    seen = {number: [start.observation] for number, start in enumerate(starts)}
    said: dict[int, list[str]] = {number: [] for number in seen}
    rewards: dict[int, float] = {}
    while living := [number for number in seen if number not in rewards]:
        actions = [player(seen[number]) for number in living]
        for number, action, step in zip(living, actions, pool.step(living, [say(a) for a in actions]), strict=True):
            assert isinstance(step, Step), step
            said[number].append(action)
            if step.over:
                rewards[number] = step.reward
            else:
                seen[number].append(step.observation)
    return rewards, seen, said


@pytest.mark.parametrize("game, player", GAMES, ids=[game for game, _ in GAMES])
def test_a_scripted_player_wins(game, player):
    pytest.importorskip("textarena")
    environment = TextArena(game=game, workers=0)
    environment.ready()
    levels = [Prompt("", meta={"seed": seed}) for seed in (3, 4, 5)]
    with EpisodePool(environment) as pool:
        starts = pool.start([(prompt, 7) for prompt in levels])
        rewards, seen, said = scripted(pool, starts, player, levels)
        assert rewards == {0: 1.0, 1: 1.0, 2: 1.0}
        own = [
            action in text.splitlines() for number in seen for text, action in zip(seen[number][1:], said[number], strict=False)
        ]
        assert not any(own)  # the policy knows what it said
        # The same level and seed start and go the same way, alone and from a later turn.
        assert pool.start([(levels[1], 7)]) == [starts[1]]
        assert len({start.state for start in starts}) > 1 or game == "TowerOfHanoi-v0"
        played = [say(action) for action in said[1][:-1]]
        assert pool.replay([(levels[1], 7, played)])[0].observation == seen[1][-1]
        assert pool.step([0], [say(said[1][-1])]) == [Step(reward=1.0, done=True)]


def test_textarena_plays_in_a_worker_by_default_and_invalid_moves_lose():
    pytest.importorskip("textarena")
    environment = TextArena(game="FrozenLake-v0", time_limit=60)
    assert environment.workers == 1
    with EpisodePool(environment) as pool, EpisodePool(TextArena(game="FrozenLake-v0", workers=0)) as here:
        items = [(Prompt("", meta={"seed": 3}), 0), (Prompt("", meta={"seed": 4}), 1)]
        assert pool.start(items) == here.start(items)
        for text in ("fly", "fly"):
            steps = pool.step([0, 1], [say(text)] * 2)
            assert steps == here.step([0, 1], [say(text)] * 2)
    assert all(step.done and step.reward <= 0 for step in steps)


@pytest.mark.parametrize(
    "game, says",
    [
        ("FrozenLake-v9", "no textarena game is called 'FrozenLake-v9' (did you mean 'FrozenLake-v0'?)"),
        ("TicTacToe-v0", "cannot be played: it is for several players"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused(game, says):
    pytest.importorskip("textarena")
    with pytest.raises(ValueError, match=re.escape(says)):
        TextArena(game=game).ready()


def test_a_missing_corpus_is_named():
    missing = LookupError("Resource \x1b[93mwords\x1b[0m not found.\n  Please use the NLTK Downloader to obtain the resource:")
    assert why(missing) == "it needs a corpus that is not there: python -m nltk.downloader words"


# --- gym_text -------------------------------------------------------------------------------------
MINE = '''
import random

class Count:
    """Count to the gold answer, as SkyRL-gym's environments are written."""

    def __init__(self, env_config=None, extras={}):
        assert env_config.step == env_config["step"] and env_config.get("more") is None
        self.by, self.goal = env_config.step, int(extras["reward_spec"]["ground_truth"])
        self.max_turns, self.level = extras["max_turns"], extras.get("level")
        self.turns = 0

    def init(self, prompt):
        hint = {"role": "user", "content": f"By {self.by}, level {self.level}, at random {random.random()}."}
        return prompt + [hint], {"level": self.level}

    def step(self, action):
        self.turns += 1
        right = action == str(self.turns * self.by)
        done = not right or self.turns * self.by == self.goal or self.turns >= self.max_turns
        said = [] if done else [{"role": "user", "content": "go on"}, {"role": "user", "content": "please"}]
        return {"observations": said, "reward": float(right) / 2, "done": done, "metadata": {}, "postprocessed_action": "x"}

class Rewrites(Count):
    def init(self, prompt):
        return [{"role": "system", "content": "Count."}] + prompt, {}

class Alone(Count):
    def init(self, prompt):
        return prompt

class Bare(Count):
    def step(self, action):
        return {"observations": []}

class Silent(Count):
    def step(self, action):
        return {"observations": [], "reward": 0.0, "done": False, "metadata": {}}

class NoSteps:
    def init(self, prompt):
        return prompt, {}

MADE = 3
'''


@pytest.fixture
def gym(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return lambda name, **knobs: GymText(env=f"{tmp_path}/mine.py:{name}", arguments={"step": 2}, **knobs)


ASKED = Prompt(
    "Count.", "4", {"level": 9}, ({"role": "system", "content": "You count."}, {"role": "user", "content": "Count."})
)


@WORKERS
def test_an_environment_of_skyrl_gyms_runs_as_it_is(gym, workers):
    with EpisodePool(gym("Count", workers=workers)) as pool:
        start, short = pool.start([(ASKED, 1), (ASKED, 1)])
        assert start == short and start.observation[0]["content"].startswith("By 2, level 9, at random 0.134364244112")
        first, wrong = pool.step([0, 1], [say("2"), say("3")])
        assert first == Step(({"role": "user", "content": "go on"}, {"role": "user", "content": "please"}), 0.5)
        assert wrong == Step(reward=0.0, done=True)
        assert pool.step([0], [say("4")]) == [Step(reward=0.5, done=True)]


def test_a_prompt_without_text_is_left_to_the_environment(gym):
    with EpisodePool(gym("Rewrites")) as pool:
        assert pool.start([(Prompt("", "4", {"seed": 1}), 1)])[0].observation == ({"role": "system", "content": "Count."},)


@pytest.mark.parametrize(
    "name, says",
    [
        ("Rewrites", "init changed the messages of the prompt"),
        ("Alone", "init returned a value of type list; expected (messages, info)"),
        ("Bare", "step returned the keys 'observations'; expected a mapping with observations, reward and done"),
        ("Silent", "the observation [] but the episode is not over"),
    ],
)
def test_what_a_gym_does_wrong_is_said(gym, name, says):
    with EpisodePool(gym(name)) as pool:
        found = pool.start([(ASKED, 1)]) + pool.step([0], [say("2")])
    assert any(isinstance(each, Failure) and says in each.reason for each in found)


@pytest.mark.parametrize(
    "name, says", [("NoSteps", "lacks step; expected"), ("MADE", "type int; expected"), ("Cuont", "'Count'")]
)
def test_what_is_no_gym_is_refused(gym, name, says):
    with pytest.raises(ValueError, match=says):
        gym(name).ready()


def test_constructor_arguments_that_are_not_there_are_named(gym):
    environment = gym("Count").model_copy(update={"arguments": {"stride": 2}})
    with EpisodePool(environment) as pool:
        assert "hold no 'step'; they are stride" in pool.start([(ASKED, 1)])[0].reason


# --- recipes --------------------------------------------------------------------------------------
def test_files_of_tools_and_gyms_are_relative_to_the_recipe_that_names_them(tmp_path):
    recipe = tmp_path / "deep" / "recipe.yaml"
    tools = {"environment": {"use": "tools", "tools": ["../my.py:search", "json:loads"]}}
    gym = {"environment": {"use": "gym_text", "env": "./mine.py:Mine"}}
    assert with_bases(Source(tools, {}), recipe).data["environment"]["tools"] == [f"{tmp_path}/my.py:search", "json:loads"]
    assert with_bases(Source(gym, {}), recipe).data["environment"]["env"] == f"{tmp_path}/deep/mine.py:Mine"


# --- conformance ----------------------------------------------------------------------------------
class Plain(Environment):
    """Right: says how many turns there were, by the seed, and ends after three."""

    _offset: int = PrivateAttr(0)

    def open(self, prompt, seed):
        return Counting(self, prompt, seed)


class Counting(Episode):
    def __init__(self, environment, prompt, seed):
        self.environment, self.prompt, self.seed, self.turn = environment, prompt, seed, 0

    def reset(self):
        return Start(f"{self.seed} {random.random()}")

    def says(self, action):
        return f"{self.turn + self.environment._offset} {random.random()} {numpy.random.random()} {action.text}"

    def step(self, action):
        self.turn += 1
        return Step(done=True, reward=1.0) if self.turn == 3 else Step(self.says(action))


def wrong(**changed):
    """An environment whose episodes differ from the right ones in these methods."""
    episode = type("Wrong", (Counting,), changed)
    return type("WrongEnvironment", (Plain,), {"open": lambda self, prompt, seed: episode(self, prompt, seed)})()


SEEN: list[str] = []


def notes(self, action):
    """Tells of the last turn of whichever episode."""
    SEEN.append(f"{self.seed} {self.turn} {action.text}")
    return SEEN[-2] if len(SEEN) > 1 and self.turn > 1 else "first"


def writes_into_the_prompt(self, action):
    self.prompt.meta["turn"] = self.turn
    return "x"


def closes_once(self):
    assert not hasattr(self, "closed")
    self.closed = True


class Impatient(Plain):
    """Its knobs do not say what it does."""

    def model_post_init(self, _):
        self._offset = Impatient.offset

    offset: ClassVar[int] = 0


class Lost(GuessNumber):
    """Its expert uses letters that its alphabet lacks."""

    def expert(self, prompt, seen, said, rng):
        return "eight"


class Mute(GuessNumber):
    """It promises an expert and has none."""

    def expert(self, prompt, seen, said, rng):
        raise NotImplementedError


class Unbounded(Plain):
    """Its bounds are upside down."""

    @property
    def bounds(self):
        return 1.0, 0.0


FAULTS = {
    "tells the time": (lambda: wrong(says=lambda self, action: str(time.time() // 1000)), {"determinism"}),
    "draws from torch": (lambda: wrong(says=lambda self, action: str(torch.rand(1))), {"determinism"}),
    "draws from the system": (lambda: wrong(says=lambda self, action: os.urandom(8).hex()), {"determinism"}),
    "writes into its prompt": (lambda: wrong(says=writes_into_the_prompt), {"determinism"}),
    "sees its neighbours": (lambda: wrong(says=notes), {"neighbours"}),
    "says nothing": (lambda: wrong(says=lambda self, action: None), {"form", "odd"}),
    "pays too much": (lambda: wrong(step=lambda self, action: Step("x", 0.6)), {"form"}),
    "raises at strange turns": (lambda: wrong(says=lambda self, action: action.text.encode("ascii").decode()), {"form", "odd"}),
    "raises at unfinished turns": (lambda: wrong(says=lambda self, action: ["", "x"][1 if action.finished else 2]), {"odd"}),
    "closes once": (lambda: wrong(close=closes_once), {"close"}),
    "has letters of its own": (Lost, {"expert"}),
    "has no expert": (Mute, {"expert"}),
    "has bounds upside down": (Unbounded, {"form"}),
}


def failures(environment) -> dict[str, str]:
    return {
        verdict.property: verdict.why
        for verdict in check(environment, examples=30, shrink=False)
        if verdict.outcome == "FAILED"
    }


def test_a_right_environment_conforms():
    assert failures(Plain()) == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_conformance_suite_finds_a_fault(fault):
    make, expected = FAULTS[fault]
    found = failures(make())
    assert found and set(found) <= expected, found


def test_a_state_that_the_knobs_do_not_hold_is_found():
    environment = Impatient()
    Impatient.offset = 5  # what another process would find
    try:
        assert set(failures(environment)) == {"remade"}
    finally:
        Impatient.offset = 0


@pytest.mark.parametrize("name", ["tools", "gym_text"])
def test_tools_and_gyms_conform(name, my_tools, gym):
    environment = my_tools("search", "say") if name == "tools" else gym("Count").model_copy(update={"max_turns": 3})
    assert failures(environment) == {}


def test_check_operator_takes_an_environment_and_finds_its_faults(capsys, tmp_path):
    assert main(["check-operator", "guess_number", "--axis", "environment", "--examples", "6"]) == 0
    assert capsys.readouterr().out.endswith("environment guess_number: ok\n")
    (tmp_path / "late.py").write_text(LATE)
    with contextlib.chdir(tmp_path):
        assert main(["check-operator", "late.py:late", "--examples", "6"]) == 1
    assert "environment late: failed: form" in capsys.readouterr().out


LATE = '''
from cct.environment import Environment, Episode, Step, environments

@environments.register("late")
class Late(Environment):
    """Ends before it begins, and says nothing."""

    def open(self, prompt, seed):
        return Silent()

class Silent(Episode):
    def reset(self):
        return ""

    def step(self, action):
        return Step()
'''


# --- cct new --------------------------------------------------------------------------------------
def test_new_environment_writes_three_files_whose_test_passes(capsys, tmp_path):
    with contextlib.chdir(tmp_path):
        assert main(["new", "environment", "greater"]) == 0
        assert "cct check-operator greater.py:greater" in capsys.readouterr().out
        assert main(["new", "environment", "guess_number"]) == 2
        assert "environment 'guess_number' exists already" in capsys.readouterr().err
    names = ["greater.py", "greater.yaml", "test_greater.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout
