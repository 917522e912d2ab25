"""Regular expressions of a recipe end in time, and mean what Python's documentation says."""

import time

import pytest
from pydantic import TypeAdapter, ValidationError

from cct.system.patterns import Pattern, last_match, matches


def test_the_last_match_counts():
    assert last_match(r"#(\d+)", "#1 #2") == "2" and last_match(r"\d", "1 2") == "2" and last_match("x", "1") is None
    assert last_match(r"#(\d)?", "#") == ""


def test_a_pattern_matches_the_whole_or_a_part():
    assert matches("a+", "aaa", full=True) and not matches("a+", "aab", full=True) and matches("a+", "baab", full=False)


@pytest.mark.parametrize("search", [last_match, lambda pattern, text: matches(pattern, text, full=False)])
def test_a_search_that_would_not_end_is_an_error(search):
    begun = time.process_time()
    with pytest.raises(ValueError, match=r"'\(a\|aa\)\+\$' takes more than 0\.5 s on a text of 101 characters"):
        search("(a|aa)+$", "a" * 100 + "b")
    assert time.process_time() - begun < 1.5


@pytest.mark.parametrize(
    "pattern", ["(", "[", "(" * 1000 + ")" * 1000, "a{99999999999999999999}", "x" * 2001, "(?R)?a", r"\p{L}", "a{e<=1}"]
)
def test_what_is_no_pattern_is_refused(pattern):
    with pytest.raises(ValidationError):
        TypeAdapter(Pattern).validate_python(pattern)


@pytest.mark.parametrize("pattern", [r"\\boxed\{(.*)\}", r"a{2,3}", r"(?s)<think>.*</think>", r"#\s*(\S+)\s*$"])
def test_plain_patterns_are_taken(pattern):
    assert TypeAdapter(Pattern).validate_python(pattern) == pattern
