"""Evidence: which answer is read out of a response, when it counts, and what becomes of judges that raise, hang or die."""

import math
import os
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

from cct.evidence import Failure, close_workers, evidences, verdicts
from cct.evidence.exact_match import ExactMatch
from cct.evidence.math_verify import MathVerify, boxes, normalised
from cct.evidence.python import PythonFunction
from cct.evidence.reasoning_gym import ReasoningGymScore
from cct.evidence.reward_model import RewardModel
from cct.evidence.shape import Format, Length
from cct.policy.models import Scratch
from cct.rollout import Prompt, Response
from cct.task.reasoning_gym import ReasoningGym


def said(text: str, tokens: int = 2) -> Response:
    return Response(text, tuple(range(tokens)), True)


# --- exact match ------------------------------------------------------------------------------
def score(text: str, gold: str, **knobs) -> float:
    return ExactMatch(**knobs)(Prompt("?", gold), said(text))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3+5=8;8-7=1#1", "1"),
        ("#1", "1"),
        ("#  42  ", "42"),
        ("#1\n", "1"),
        ("#1#2", "1#2"),  # `#\s*(\S+)\s*$` takes the first `#` of an unbroken end
        ("#1 so #2", "2"),
        ("#-3.5", "-3.5"),
        ("#1 and more", None),
        ("# 4 2", None),
        ("#", None),
        ("no mark", None),
        ("", None),
    ],
)
def test_the_default_pattern(text, answer):
    assert ExactMatch().extract(text) == answer


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        (r"\d+", "1 then 22 then 333.", "333"),  # no group: the whole of the last match
        (r"answer: (\w+)", "answer: a, answer: b", "b"),
        (r"(\d+)-(\d+)", "1-2", "1"),  # the first group counts
        (r"\\boxed\{(.*?)\}", r"so \boxed{ x+1 } holds", "x+1"),
        (r"=(\d)?$", "1+1=", ""),  # a group that took no part
        (r"(?i)ANSWER (\d)", "answer 3", "3"),
        (r"^(\d)$", "1\n2", None),  # no flag is set behind one's back
        (r"(?m)^(\d)$", "1\n2", "2"),
    ],
)
def test_a_pattern_of_ones_own(pattern, text, answer):
    assert ExactMatch(pattern=pattern).extract(text) == answer


def test_equal_is_one_and_everything_else_is_zero():
    assert score("x#1", "1") == 1.0
    assert score("x#1", " 1\n") == 1.0  # the gold answer is stripped too
    assert score("x#1", "01") == 0.0
    assert score("x#6", "6.0") == score("x#6.50", "6.5") == 1.0  # zeros that end a decimal do not count
    assert score("x#60", "6") == score("x#6.01", "6.0") == score("x#1.2.0", "1.2") == 0.0
    assert score("x#1", "") == 0.0
    assert score("no answer", "") == 0.0  # no answer is never right
    assert score("", "1") == 0.0
    assert isinstance(score("x#1", "1"), float)


def test_case_counts_unless_said_otherwise():
    assert score("#Paris", "paris") == 0.0
    assert score("#Paris", "pARIS", ignore_case=True) == 1.0
    assert score("#Paris", "London", ignore_case=True) == 0.0


@pytest.mark.parametrize("pattern", ["(", "[a", "*", "(?P<x>a)(?P<x>b)", ""])
def test_a_bad_pattern_is_refused_when_the_recipe_is_read(pattern):
    with pytest.raises(ValidationError) as caught:
        ExactMatch(pattern=pattern)
    (problem,) = caught.value.errors()
    assert problem["loc"] == ("pattern",)
    assert "not a regular expression" in problem["msg"] or not pattern


# --- mathematics ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("gold", "text", "right"),
    [
        ("1/2", r"so it is \boxed{0.5}", True),
        (r"\frac{1}{2}", r"\boxed{\frac{2}{4}}", True),
        ("x+1", r"\boxed{1+x}", True),
        ("x+1", r"\boxed{1}", False),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", True),
        (r"2\sqrt{3}", r"\boxed{2}", False),  # the library reads 2 where the gold answer stands bare
        (r"\boxed{7}", r"\boxed{7}", True),
        ("$7$", r"7", True),
        ("(0,1)", r"\boxed{(0,1)}", True),
        ("1,000", r"\boxed{1000}", True),
        ("42", "The answer is 42.", True),
        ("42", "The answer is 43.", False),
        ("42", "", False),
        ("42", "no idea", False),
    ],
)
def test_answers_are_compared_as_mathematics(gold, text, right):
    assert MathVerify()(Prompt("?", gold), said(text)) == float(right)


@pytest.mark.parametrize(
    ("gold", "text", "right"),
    [
        ("7", r"First \boxed{5}. No: \boxed{7}", True),  # the last box counts
        ("7", r"First \boxed{7}. No: \boxed{5}", False),
        ("7", r"\boxed{7} That is, \boxed{x = 7}", True),
        ("7", r"\boxed{7 = x}", True),
        ("7", r"\boxed{\boxed{7}}", True),
        ("7", r"\boxed 7", True),
        ("7", r"\boxed{6} and \boxed{7", False),  # the one that breaks off is none
        ("7,8", r"$\boxed{8}$ and $\boxed{7}$", True),
        ("7", r"\boxed{\text{The answer is } 7}", True),
        (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}", False),
        (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2004 \cdot 2003!}}", True),
        ("2004!", r"\boxed{2006!}", False),
        ("101_2", r"\boxed{101_{2}}", True),
        ("101_2", r"\boxed{101_3}", False),
        ("413_{5}", r"\boxed{413_{8}}", False),
        (r"0.\overline{3}", r"\boxed{\frac13}", True),
        (r"\frac{41}{330}", r"\boxed{0.1\overline{24}}", True),
        (r"0.\overline{3}", r"\boxed{0.3}", False),
        ("1234", "\\boxed{\uff11\uff0c\uff12\uff13\uff14}", True),
        (r"\emptyset", r"\boxed{\varnothing}", True),
        ("10^{-10}", r"\boxed{10^{-11}}", False),
        ("10^{-10}", r"\boxed{1e-10}", True),
        ("2^{-100}", r"\boxed{2^{-101}}", False),
        ("0", r"\boxed{10^{-20}}", False),
        ("0.333333", r"\boxed{\frac{1}{3}}", True),
        (r"\$36", r"\boxed{36}", True),
        (r"\$1,\!320", r"\boxed{1320}", True),
        ("1320", r"\boxed{\$1,\!320}", True),
        ("1320", r"\boxed{1\,320}", True),
        ("1320", r"\boxed{1{,}320}", True),
        ("1320", r"\boxed{1 320 \text{ dollars}}", True),
        ("36 dollars", r"\boxed{36}", True),
        ("120 km/h", r"\boxed{120\text{ km/h}}", True),
        ("3 million", r"\boxed{3}", False),
        ("25%", r"\boxed{25\%}", True),
        (r"16\frac{2}{3}\%", r"\boxed{16\frac{2}{3}\%}", True),
        (r"16\frac{2}{3}\%", r"\boxed{\frac{2}{3}\%}", False),
        ("45°", r"\boxed{45^\circ}", True),
        ("7.", r"\boxed{7}", True),
        ("½", r"\boxed{0.5}", True),
        ("3 1/2", r"\boxed{3.5}", True),
        (r"3\frac12", r"\boxed{\dfrac{7}{2}}", True),
        ("-3", "\\boxed{\u22123}", True),
        ("(1,2)", r"\boxed{(2,1)}", False),
        ("[1,2]", r"\boxed{[1,2)}", False),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", True),
        ("B", r"\boxed{\textbf{(B)}\ 12}", True),
        ("(B)", r"\boxed{\text{B}}", True),
        ("B", r"\boxed{C}", False),
        ("B", r"\boxed{B + 1}", False),
        ("east", r"\boxed{\text{East}}", True),
        ("east", r"\boxed{seat}", False),  # no product of letters
        ("So it is \\boxed{18}.", r"\boxed{18}", True),
    ],
)
def test_golds_and_boxes_as_data_and_models_write_them(gold, text, right):
    assert MathVerify().unreadable(Prompt("?", gold)) is None
    assert MathVerify()(Prompt("?", gold), said(text)) == float(right)


def test_an_answer_outside_of_a_box_counts_where_no_box_is_required():
    text = "so 17 + 25 = 42 and then"
    assert MathVerify()(Prompt("?", "42"), said(text)) == 1.0
    assert MathVerify(require="box")(Prompt("?", "42"), said(text)) == 0.0
    assert MathVerify(require="box")(Prompt("?", "42"), said(text + r" \boxed{42}")) == 1.0


@pytest.mark.parametrize("gold", ["", "???", "-", r"\frac{1}{", r"\boxed{}"])
def test_a_gold_answer_that_cannot_be_read_says_so(gold):
    assert f"the gold answer {gold!r} cannot be read" in MathVerify().unreadable(Prompt("?", gold))


def test_reading_boxes_takes_time_in_proportion_to_the_text():
    started = time.process_time()
    for text in (r"\boxed{" * 20_000, r"\boxed{1} " * 20_000):
        boxes(text)
        normalised(", " * 20_000 + text)
    assert time.process_time() - started < 10


def test_a_gold_answer_that_is_no_mathematics_is_an_error_not_a_wrong_response():
    with pytest.raises(ValueError, match="gold answer ''"):
        MathVerify()(Prompt("?", ""), said("1"))


# --- reasoning-gym ----------------------------------------------------------------------------
def test_reasoning_gym_scores_with_its_own_scorer():
    prompt = ReasoningGym(name="chain_sum").held_out()[0]
    assert ReasoningGymScore()(prompt, said(f" {prompt.answer}\n")) == 1.0
    assert ReasoningGymScore()(prompt, said("none of it")) == 0.0
    assert ReasoningGymScore(pattern="#(.*)$")(prompt, said(f"1+2 #{prompt.answer}")) == 1.0
    assert ReasoningGymScore(pattern="#(.*)$")(prompt, said(prompt.answer)) == 0.0  # no answer found


def test_partial_credit_is_a_choice():
    prompt = ReasoningGym(name="chain_sum").held_out()[0]
    padded = prompt.answer + " or so"  # its scorer gives the share of the text that the answer is
    assert ReasoningGymScore()(prompt, said(padded)) == pytest.approx(len(prompt.answer) / len(padded))
    assert ReasoningGymScore(partial=False)(prompt, said(padded)) == 0.0
    assert ReasoningGymScore(partial=False)(prompt, said(prompt.answer)) == 1.0


def test_reasoning_gym_scores_no_other_tasks_problems():
    with pytest.raises(ValueError, match="only problems of the task reasoning_gym"):
        ReasoningGymScore()(Prompt("1+1=", "2", {"level": 1}), said("2"))


# --- shape ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("pattern", "match", "text", "value"),
    [
        ("a+", "full", "aaa", 1.0),
        ("a+", "full", "aaab", 0.0),
        ("a+", "contains", "baab", 1.0),
        ("a+", "contains", "b", 0.0),
        ("<t>.*</t>", "full", "<t>1\n2</t>", 0.0),  # no flag is set behind one's back
        ("(?s)<t>.*</t>", "full", "<t>1\n2</t>", 1.0),
    ],
)
def test_format(pattern, match, text, value):
    assert Format(pattern=pattern, match=match)(Prompt("?"), said(text)) == value


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0), (17, -1.0), (100, -1.0)]
)
def test_the_overlong_penalty_by_hand(tokens, value):
    assert Length(max_tokens=16, buffer=4)(Prompt("?"), said("", tokens)) == value


def test_without_a_buffer_the_edge_is_sharp():
    sharp = Length(max_tokens=16, buffer=0)
    assert [sharp(Prompt("?"), said("", n)) for n in (15, 16, 17)] == [0.0, 0.0, -1.0]


@given(limit=st.integers(1, 50), share=st.floats(0, 1), n=st.integers(0, 120))
def test_the_overlong_penalty_falls_and_keeps_its_bounds(limit, share, n):
    part = Length(max_tokens=limit, buffer=int(share * limit))
    now, later = (part(Prompt("?"), said("", k)) for k in (n, n + 1))
    low, high = part.bounds
    assert low <= later <= now <= high
    assert part(Prompt("?"), said("", limit + 1)) == low and part(Prompt("?"), said("", limit - part.buffer)) == high


def test_a_buffer_longer_than_the_limit_is_refused():
    with pytest.raises(ValidationError, match=r"buffer \(5\) must not exceed max_tokens \(4\)"):
        Length(max_tokens=4, buffer=5)


# --- reward model -----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A random classifier of two outputs with a tokenizer of characters."""
    folder = tmp_path_factory.mktemp("classifier")
    _, tokenizer = Scratch().load(alphabet="abcdefgh:\n", seed=0)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_labels=2,
        initializer_range=0.5,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


WORDS = ["a", "bcd", "hgfedcba", "abab", "c"]


def logits(folder, text: str) -> torch.Tensor:
    tokenizer, model = PreTrainedTokenizerFast.from_pretrained(folder), Qwen3ForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return model.eval()(**tokenizer(text, return_tensors="pt")).logits[0]


@pytest.mark.parametrize("label", [0, 1])
def test_the_reward_model_gives_the_classifiers_output_whatever_the_batches(classifier, label):
    prompts, responses = [Prompt("abc")] * len(WORDS), [said(word) for word in WORDS]
    expected = [float(logits(classifier, "abc" + word)[label]) for word in WORDS]
    assert len({round(x, 4) for x in expected}) == len(WORDS)
    for size in (1, 2, 5):
        part = RewardModel(path=str(classifier), label=label, low=-100, high=100, batch_size=size)
        assert part.judge_batch(prompts, responses) == pytest.approx(expected, abs=1e-5)


def test_the_reward_keeps_its_bounds_and_may_go_through_a_sigmoid(classifier):
    raw = float(logits(classifier, "abcbcd")[0])
    score = lambda **knobs: RewardModel(path=str(classifier), **knobs)(Prompt("abc"), said("bcd"))  # noqa: E731
    assert score(squash="sigmoid") == pytest.approx(1 / (1 + math.exp(-raw)), abs=1e-5)
    assert score(low=raw + 1, high=raw + 2) == pytest.approx(raw + 1)
    assert score(low=raw - 2, high=raw - 1) == pytest.approx(raw - 1)


def test_what_is_too_long_loses_its_beginning(classifier):
    part = RewardModel(path=str(classifier), low=-100, high=100, max_length=4)
    assert part(Prompt("hhhhhh"), said("abcd")) == pytest.approx(float(logits(classifier, "abcd")[0]), abs=1e-5)


def test_a_chat_template_joins_the_turns(classifier, tmp_path):
    part = RewardModel(path=str(classifier), low=-100, high=100, join="chat")
    with pytest.raises(ValueError, match="no chat template; set join: plain"):
        part(Prompt("a"), said("b"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(classifier)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}:{% endfor %}"
    Qwen3ForSequenceClassification.from_pretrained(classifier).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    part = RewardModel(path=str(tmp_path), low=-100, high=100, join="chat")
    assert part(Prompt("a"), said("b")) == pytest.approx(float(logits(classifier, "a:b:")[0]), abs=1e-5)


def test_a_reward_model_that_is_not_there(classifier, tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        RewardModel(path=str(tmp_path)).ready()
    with pytest.raises(ValueError, match="2 outputs; there is no label 2"):
        RewardModel(path=str(classifier), label=2)(Prompt("a"), said("b"))
    RewardModel(path=str(classifier)).ready()


def test_one_bad_response_spoils_no_batch(classifier):
    part = RewardModel(path=str(classifier), low=-100, high=100)
    judged = part.judge_batch([Prompt("a")] * 3, [said("b"), Response(None, (1,), True), said("c")])
    assert isinstance(judged[1], Failure) and "TypeError" in judged[1].reason
    assert [judged[0], judged[2]] == pytest.approx([float(logits(classifier, text)[0]) for text in ("ab", "ac")], abs=1e-5)


# --- a function of the user's own, in worker processes ------------------------------------------
REWARD = """
import os, sys, time

PARENT = {parent}

def score(prompt, response):
    if response.text == "hang":
        time.sleep(3600)
    if response.text == "raise":
        raise KeyError("what")
    if response.text == "exit":
        os._exit(3)
    if response.text == "quit":
        sys.exit("enough")
    if response.text == "odd":
        raise Odd(1, 2)
    if response.text == "where":
        return float(os.getpid() == PARENT)
    return len(response.text) / 10

class Odd(Exception):
    "Cannot be sent to another process."
    def __init__(self, one, two):
        super().__init__("odd")

def dense(prompt, response):
    return [0.25] * len(response.tokens)

def process(prompt, response):
    return os.getpid() % 1000000

def large(prompt, response):
    return 7

not_a_function = 3
"""


@pytest.fixture
def reward(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(REWARD.format(parent=os.getpid()))
    yield path
    close_workers()


def judged(part, *texts):
    return list(verdicts(part, [Prompt("?")] * len(texts), [said(text) for text in texts]))


def test_who_hangs_raises_or_dies_costs_no_one_else_a_verdict(reward):
    part = PythonFunction(path=reward, time_limit=1.0)
    ok1, hang, raised, ended, left, odd, ok2, where = judged(
        part, "four", "hang", "raise", "exit", "quit", "odd", "seven77", "where"
    )
    assert (ok1, ok2, where) == (0.4, 0.7, 0.0)  # in another process
    assert hang.timed_out and "time_limit, 1 s" in hang.reason
    assert not any(failure.timed_out for failure in (raised, ended, left, odd))
    assert "KeyError: 'what'" in raised.reason and "reward.py:" in raised.reason
    assert "exit code 3" in ended.reason
    assert "SystemExit: enough" in left.reason and "Odd: odd" in odd.reason
    assert judged(part, "four") == [0.4]  # the workers have been replaced


def test_workers_stay_from_batch_to_batch_and_end_when_closed(reward):
    part = PythonFunction(path=reward, workers=1, function="process", high=1e6)
    first = judged(part, "a")
    again = part.model_copy(update={"weight": 2.0, "on_error": "drop"})  # neither matters to a worker
    assert judged(again, "a", "b") == first * 2
    close_workers()
    assert judged(part, "a") != first


def test_without_workers_it_is_judged_here(reward):
    part = PythonFunction(path=reward, workers=0, time_limit=None)
    assert judged(part, "where", "abc") == [1.0, 0.3]
    (failure,) = judged(part, "raise")
    assert isinstance(failure.cause, KeyError) and "reward.py:" in failure.reason


def test_a_function_may_give_one_reward_per_token(reward):
    part = PythonFunction(path=reward, function="dense")
    assert judged(part, "ab") == [[0.25, 0.25]]


def test_a_total_outside_its_bounds_is_an_error(reward):
    part = PythonFunction(path=reward, function="large", workers=0, time_limit=None)
    with pytest.raises(ValueError, match=r"large returned 7, outside \[0, 1\]; set low and high"):
        part(Prompt("?"), said("a"))
    assert PythonFunction(path=reward, function="large", high=7)(Prompt("?"), said("a")) == 7.0


@pytest.mark.parametrize(("function", "says"), [("scores", "did you mean 'score'"), ("not_a_function", "no function")])
def test_a_function_that_is_not_there_is_named(reward, function, says):
    with pytest.raises(ValueError, match=says):
        PythonFunction(path=reward, function=function).ready()
    (failure,) = judged(PythonFunction(path=reward, function=function), "a")  # unchecked: workers say so, they do not loop
    assert says in failure.reason


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nope\.py does not exist"):
        PythonFunction(path=tmp_path / "nope.py").ready()


def test_mathematics_is_judged_by_workers_too():
    try:
        assert judged_math(r"\boxed{4}", r"\boxed{5}") == [1.0, 0.0]
    finally:
        close_workers()


def judged_math(*texts):
    return list(verdicts(MathVerify(), [Prompt("?", "4")] * len(texts), [said(text) for text in texts]))


def test_a_time_limit_needs_workers():
    with pytest.raises(ValidationError, match="time_limit needs a worker"):
        MathVerify(workers=0)
    with pytest.raises(ValidationError, match="time_limit needs a worker"):
        ExactMatch(time_limit=1.0)
    assert ExactMatch(workers=1, time_limit=1.0).workers == 1


# --- all of them ------------------------------------------------------------------------------
def test_what_every_evidence_has():
    least = {
        "format": {"pattern": "a"},
        "length": {"max_tokens": 4, "buffer": 1},
        "python": {"path": "reward.py"},
        "reward_model": {"path": "somewhere"},
    }
    for name in evidences.names():
        part = evidences[name](**least.get(name, {}))
        low, high = part.bounds
        assert low < high and part.weight == 1.0
        assert part.on_error == ("zero" if name == "math_verify" else "fail")


@pytest.mark.parametrize(
    "knobs", [{"weight": 1001}, {"weight": "much"}, {"on_error": "ignore"}, {"workers": -1}, {"workers": 1, "time_limit": 0}]
)
def test_bounds_of_the_shared_knobs(knobs):
    with pytest.raises(ValidationError):
        ExactMatch(**knobs)


@pytest.mark.parametrize(("part", "extra"), [(MathVerify(), "math"), (ReasoningGymScore(), "reasoning-gym")])
def test_a_missing_library_names_its_extra(part, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, part.use, None)
    with pytest.raises(ValueError, match=rf"{part.use} is not installed; install it with pip install -e '\.\[{extra}\]'"):
        part.ready()
