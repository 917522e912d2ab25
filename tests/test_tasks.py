"""Tasks: right answers, a reproducible stream, and evaluation problems that are never trained on."""

import json
import random

import pytest
from pydantic import ValidationError

from cct.rollout import Prompt
from cct.task.chain_arithmetic import ChainArithmetic
from cct.task.jsonl import JsonLines


# --- chain arithmetic -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("problem", "answer"),
    [
        ("3+5-7=", "3+5=8;8-7=1#1"),
        ("2-5=", "2-5=7#7"),  # modulo 10, never negative
        ("9+9+9=", "9+9=8;8+9=7#7"),
        ("7*8-0=", "7*8=6;6-0=6#6"),
        ("0-1*9=", "0-1=9;9*9=1#1"),  # left to right, no precedence
    ],
)
def test_solved_by_hand(problem, answer):
    assert ChainArithmetic(operators="+-*").solve(problem) == answer


def test_every_prompt_has_the_right_answer():
    for prompt in ChainArithmetic(steps=5, operators="+-*").prompts(0, 0, 50):
        value = int(prompt.text[0])
        for operator, operand in zip(prompt.text[1:-1:2], prompt.text[2:-1:2], strict=True):
            value = eval(f"{value}{operator}{operand}") % 10
        assert prompt.answer == str(value)


def test_a_problem_is_made_of_what_was_asked_for():
    for prompt in ChainArithmetic(steps=3, operators="+").prompts(1, 0, 30):
        assert len(prompt.text) == 2 + 2 * 3 and prompt.text.endswith("=") and set(prompt.text[1:-1:2]) == {"+"}


def wrong_steps(task: ChainArithmetic, count: int) -> tuple[dict[int, int], dict[int, int]]:
    """Steps and wrong steps of the demonstrations, by right operand; checks that a wrong step is off by one and carried on."""
    seen, wrong = dict.fromkeys(range(10), 0), dict.fromkeys(range(10), 0)
    for problem, response in task.demonstrations(0, 0, count):
        value, (worked, answer) = problem[0], response.split("#")
        for step in worked.split(";"):
            left, result = step.split("=")
            assert left[0] == value
            off = (int(result) - eval(left)) % 10
            assert off in (0, 1)
            seen[int(left[2])] += 1
            wrong[int(left[2])] += off
            value = result
        assert answer == value
    return seen, wrong


def test_the_expert_errs_at_the_noted_rate_and_only_at_noisy_operands():
    seen, wrong = wrong_steps(ChainArithmetic(noise=0.7), 400)  # about 320 steps at each operand
    for operand in range(10):
        if operand in (3, 7):
            assert wrong[operand] / seen[operand] == pytest.approx(0.7, abs=0.09)  # 3.5 standard errors
        else:
            assert wrong[operand] == 0


@pytest.mark.parametrize(("noise", "operands", "rate"), [(0.0, (3, 7), 0), (1.0, (3, 7), 1), (1.0, (), 0)])
def test_noise_at_its_ends(noise, operands, rate):
    seen, wrong = wrong_steps(ChainArithmetic(noise=noise, noisy_operands=operands), 50)
    for operand in range(10):
        assert wrong[operand] == (rate * seen[operand] if operand in operands else 0)


def test_the_expert_without_a_generator_is_right():
    assert ChainArithmetic(noise=1.0).solve("1+3=") == "1+3=4#4"
    assert ChainArithmetic(noise=1.0).solve("1+3=", random.Random(0)) == "1+3=5#5"


def test_the_chain_stream_is_a_function_of_seed_and_position():
    task = ChainArithmetic(steps=4)
    assert task.prompts(3, 0, 10)[5:] == task.prompts(3, 5, 5) == ChainArithmetic(steps=4).prompts(3, 5, 5)
    assert task.demonstrations(3, 0, 10)[5:] == task.demonstrations(3, 5, 5)
    assert task.prompts(3, 0, 10) != task.prompts(4, 0, 10)
    assert task.prompts(3, 0, 0) == []


def test_held_out_problems_never_come_up_in_training():
    task = ChainArithmetic(steps=1, operators="+")  # a hundred problems: half of them are held out
    held_out = {prompt.text for prompt in task.held_out()}
    assert len(held_out) == 50
    trained = {prompt.text for prompt in task.prompts(0, 0, 600)} | {problem for problem, _ in task.demonstrations(1, 0, 600)}
    assert not trained & held_out and len(trained) == 50


def test_held_out_problems_are_fixed_and_different():
    task = ChainArithmetic(held_out_size=60)
    held_out = task.held_out()
    assert held_out == ChainArithmetic(held_out_size=60, noise=0.1).held_out()  # the expert has no part in it
    assert len({prompt.text for prompt in held_out}) == len(held_out) == 60


def test_the_alphabet_holds_everything_said():
    task = ChainArithmetic(operators="*+*", steps=3)
    said = "".join(problem + response for problem, response in task.demonstrations(0, 0, 50))
    assert set(said) <= set(task.alphabet) and len(set(task.alphabet)) == len(task.alphabet)
    assert "demonstrations" in task.provides


@pytest.mark.parametrize(
    "knobs",
    [
        {"operators": "/"},
        {"operators": ""},
        {"steps": 0},
        {"noise": 1.1},
        {"held_out_size": 0},
        {"noisy_operands": [10]},
        {"noisy_operands": [-3]},
    ],
)
def test_meaningless_chain_knobs_are_refused(knobs):
    with pytest.raises(ValidationError):
        ChainArithmetic(**knobs)


# --- JSON lines -------------------------------------------------------------------------------
def lines(path, rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def jsonl(tmp_path, train, held_out=({"prompt": "h", "answer": "0"},), **knobs) -> JsonLines:
    return JsonLines(
        path=lines(tmp_path / "train.jsonl", train), held_out_path=lines(tmp_path / "test.jsonl", held_out), **knobs
    )


def ten(tmp_path, **knobs) -> JsonLines:
    return jsonl(tmp_path, [{"prompt": f"p{i}", "answer": str(i)} for i in range(10)], **knobs)


def test_rows_become_prompts(tmp_path):
    task = jsonl(tmp_path, [{"q": "1+1=", "a": 2, "level": "easy"}], [{"q": "x", "a": "y"}], prompt_field="q", answer_field="a")
    assert task.prompts(0, 0, 1) == [Prompt("1+1=", "2", {"q": "1+1=", "a": 2, "level": "easy"})]
    assert task.held_out() == [Prompt("x", "y", {"q": "x", "a": "y"})]


def test_each_epoch_is_a_permutation_of_its_own(tmp_path):
    texts = [prompt.text for prompt in ten(tmp_path).prompts(0, 0, 30)]
    epochs = [texts[:10], texts[10:20], texts[20:]]
    assert all(sorted(epoch) == sorted(f"p{i}" for i in range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_jsonl_stream_is_a_function_of_seed_and_position(tmp_path):
    task = ten(tmp_path)
    assert task.prompts(0, 0, 10)[5:] == task.prompts(0, 5, 5)
    assert task.prompts(0, 0, 35)[7:] == task.prompts(0, 7, 28)  # over the ends of epochs
    assert task.prompts(0, 0, 10) != task.prompts(1, 0, 10)


def test_blank_lines_are_skipped(tmp_path):
    task = jsonl(tmp_path, ["", {"prompt": "a", "answer": "b"}, "   "])
    assert len(task.prompts(0, 0, 3)) == 3


def test_a_line_ends_at_a_newline_only(tmp_path):
    row = json.dumps({"prompt": "one\u2028two\x85three", "answer": "3"}, ensure_ascii=False)  # legal inside a JSON string
    assert jsonl(tmp_path, [row]).prompts(0, 0, 1)[0].text == "one\u2028two\x85three"


def test_the_held_out_limit_keeps_the_first(tmp_path):
    task = jsonl(
        tmp_path, [{"prompt": "a", "answer": "b"}], [{"prompt": f"h{i}", "answer": ""} for i in range(5)], held_out_limit=2
    )
    assert [prompt.text for prompt in task.held_out()] == ["h0", "h1"]


def test_the_alphabet_is_that_of_both_files(tmp_path):
    assert jsonl(tmp_path, [{"prompt": "ab", "answer": "c"}], [{"prompt": "d", "answer": "a"}]).alphabet == "abcd"


def test_jsonl_has_no_demonstrations(tmp_path):
    assert "demonstrations" not in ten(tmp_path).provides
    with pytest.raises(NotImplementedError, match="task 'jsonl' has no demonstrations"):
        ten(tmp_path).demonstrations(0, 0, 1)


GOOD = {"prompt": "a", "answer": "b"}


@pytest.mark.parametrize(
    ("rows", "knobs", "says"),
    [
        (
            [GOOD, {"question": "a", "answer": "b"}],
            {},
            ["train.jsonl:2", "no field 'prompt'", "found: question, answer", "task.prompt_field"],
        ),
        ([GOOD, {"prompt": "a"}], {}, ["train.jsonl:2", "no field 'answer'", "found: prompt", "task.answer_field"]),
        ([GOOD], {"prompt_field": "q"}, ["train.jsonl:1", "no field 'q'", "found: prompt, answer"]),
        ([GOOD, "", "{'prompt': 1}"], {}, ["train.jsonl:3", "not JSON"]),
        ([GOOD, '{"prompt": "a", "answer": "b"'], {}, ["train.jsonl:2", "not JSON"]),
        ([GOOD, ["a", "b"]], {}, ["train.jsonl:2", "no field 'prompt'", "list"]),
        ([GOOD, "3"], {}, ["train.jsonl:2", "no field 'prompt'", "int"]),
        ([GOOD, {"prompt": "a", "answer": None}], {}, ["train.jsonl:2", "answer"]),  # never the gold answer "None"
        ([GOOD, {"prompt": {"text": "a"}, "answer": "b"}], {}, ["train.jsonl:2", "prompt"]),
        ([], {}, ["train.jsonl", "no problem"]),
        (["", "  "], {}, ["train.jsonl", "no problem"]),
        ([GOOD, {"prompt": "h", "answer": "0"}], {}, ["1 prompts", "train.jsonl", "test.jsonl", "'h'"]),
    ],
)
def test_bad_data_says_where_and_what(tmp_path, rows, knobs, says):
    task = jsonl(tmp_path, rows, **knobs)
    for use in (task.held_out, lambda: task.prompts(0, 0, 1)):
        with pytest.raises(ValueError) as caught:
            use()
        assert not [part for part in says if part not in str(caught.value)], str(caught.value)


def test_an_overlap_past_the_held_out_limit_is_none(tmp_path):
    task = jsonl(tmp_path, [GOOD], [{"prompt": "h", "answer": ""}, GOOD], held_out_limit=1)
    assert len(task.held_out()) == 1


def test_a_missing_file_is_named(tmp_path):
    task = JsonLines(path=tmp_path / "nope.jsonl", held_out_path=lines(tmp_path / "test.jsonl", [GOOD]))
    with pytest.raises(ValueError, match=r"nope\.jsonl does not exist"):
        task.prompts(0, 0, 1)


def test_a_file_that_is_not_text_is_named(tmp_path):
    task = ten(tmp_path)
    (tmp_path / "train.jsonl").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match=r"train\.jsonl"):
        task.prompts(0, 0, 1)
