"""Exact match: which answer is read out of a response, and when it counts."""

import pytest
from pydantic import ValidationError

from cct.evidence import evidences
from cct.evidence.exact_match import ExactMatch
from cct.rollout import Prompt, Response


def score(text: str, gold: str, **knobs) -> float:
    return ExactMatch(**knobs)(Prompt("?", gold), Response(text, (1, 2), True))


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


def test_what_every_evidence_has():
    for name in evidences.names():
        part = evidences[name]()
        low, high = part.bounds
        assert low < high and part.weight == 1.0 and part.on_error == "fail"


@pytest.mark.parametrize("knobs", [{"weight": 1001}, {"weight": "much"}, {"on_error": "ignore"}])
def test_bounds_of_the_shared_knobs(knobs):
    with pytest.raises(ValidationError):
        ExactMatch(**knobs)
