"""Tasks: right answers, a reproducible stream, and evaluation problems that are never trained on."""

import json
import random
import sys
from typing import Annotated

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from cct.rollout import Prompt
from cct.task import Task, tasks
from cct.task.chain_arithmetic import ChainArithmetic
from cct.task.files import JsonLines, Parquet
from cct.task.huggingface import PRESETS, Datasets
from cct.task.reasoning_gym import BLOCK, ReasoningGym


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
        tmp_path, [{"prompt": "a", "answer": "b"}], [{"prompt": f"h{i}", "answer": "0"} for i in range(5)], held_out_limit=2
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
    task = jsonl(tmp_path, [GOOD], [{"prompt": "h", "answer": "0"}, GOOD], held_out_limit=1)
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


# --- what all tables share --------------------------------------------------------------------
def test_a_template_makes_the_prompt_of_fields(tmp_path):
    task = jsonl(
        tmp_path,
        [{"question": "1+1?", "n": 3, "answer": "2"}],
        [{"question": "h", "n": 0, "answer": "0"}],
        template="{question} ({n})\nAnswer with \\boxed{{}}",
    )
    assert task.prompts(0, 0, 1)[0].text == "1+1? (3)\nAnswer with \\boxed{}"  # prompt_field is not asked for


@pytest.mark.parametrize("template", ["{question", "{}", "{a.}", "{a[0]}", "\\boxed{}", "}"])
def test_a_template_that_names_no_fields_is_refused_when_the_recipe_is_read(template):
    with pytest.raises(ValidationError, match="write a literal brace twice"):
        JsonLines(path="a", held_out_path="b", template=template)


def test_an_unknown_field_of_a_template_is_named(tmp_path):
    task = jsonl(tmp_path, [GOOD], template="{promt}!")
    with pytest.raises(ValueError, match=r"train\.jsonl:1: no field 'promt' \(found: prompt, answer\); set task\.template"):
        task.held_out()


@pytest.mark.parametrize(
    ("pattern", "answer", "gold"),
    [
        (r"####\s*(\S+)", "2*3 = 6\n#### 6", "6"),
        (r"####\s*(\S+)", "#### 1 then #### 1,000", "1,000"),  # the last match
        (r"\d+", "12 and 34", "34"),  # no group: the whole match
        (PRESETS["math"]["answer_pattern"], r"so \boxed{\frac{1}{2}} or \boxed{ x^{2^{3}} }.", "x^{2^{3}}"),
        (PRESETS["gsm8k"]["answer_pattern"], "a #### in words\n#### -3", "-3"),
        (None, " as it is ", " as it is "),
    ],
)
def test_the_gold_answer_is_read_out_of_its_field(tmp_path, pattern, answer, gold):
    task = jsonl(tmp_path, [{"prompt": "p", "answer": answer}], [{"prompt": "h", "answer": answer}], answer_pattern=pattern)
    assert task.prompts(0, 0, 1)[0].answer == task.held_out()[0].answer == gold


def test_an_answer_without_the_pattern_says_where(tmp_path):
    task = jsonl(tmp_path, [{"prompt": "p", "answer": "#### 1"}, {"prompt": "q", "answer": "one"}], answer_pattern="#### (.*)")
    with pytest.raises(ValueError, match=r"train\.jsonl:2: nothing in field 'answer' matches task\.answer_pattern"):
        task.held_out()


def test_a_bad_answer_pattern_is_refused_when_the_recipe_is_read():
    with pytest.raises(ValidationError, match="not a regular expression"):
        JsonLines(path="a", held_out_path="b", answer_pattern="(")


def test_an_overlap_may_be_dropped_from_training(tmp_path):
    shared = {"prompt": "h", "answer": "0"}
    task = jsonl(tmp_path, [GOOD, shared], on_overlap="drop")
    assert [prompt.text for prompt in task.prompts(0, 0, 3)] == ["a"] * 3
    assert [prompt.text for prompt in task.held_out()] == ["h"]
    with pytest.raises(ValueError, match="nothing is left to train on"):
        jsonl(tmp_path, [shared], on_overlap="drop").held_out()


@given(
    train=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=20),
    held_out=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=5),
)
def test_no_table_trains_on_what_it_evaluates(train, held_out):
    class Listed(JsonLines):
        """Rows from this test."""

        def read(self):
            return [Prompt(text) for text in train], [Prompt(text) for text in held_out]

    if set(train) <= set(held_out):
        with pytest.raises(ValueError):
            Listed(path="a", held_out_path="b", on_overlap="drop").prompts(0, 0, 1)
    else:
        drawn = Listed(path="a", held_out_path="b", on_overlap="drop").prompts(0, 0, 40)
        assert {prompt.text for prompt in drawn} == set(train) - set(held_out)


# --- Parquet ----------------------------------------------------------------------------------
def parquet(path, rows) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return str(path)


def test_parquet_gives_what_jsonl_gives(tmp_path):
    train = [{"prompt": f"p{i}", "answer": i, "level": "easy"} for i in range(5)]
    held_out = [{"prompt": "h", "answer": 7, "level": "hard"}]
    one = jsonl(tmp_path, train, held_out)
    other = Parquet(path=parquet(tmp_path / "a.parquet", train), held_out_path=parquet(tmp_path / "b.parquet", held_out))
    assert one.prompts(3, 0, 12) == other.prompts(3, 0, 12) and one.held_out() == other.held_out()
    assert one.alphabet == other.alphabet


def test_bad_parquet_says_where_and_what(tmp_path):
    good = parquet(tmp_path / "good.parquet", [{"prompt": "h", "answer": "1"}])

    def fails(path, says):
        with pytest.raises(ValueError, match=says):
            Parquet(path=path, held_out_path=good).held_out()

    fails(
        parquet(tmp_path / "a.parquet", [{"q": "x", "answer": "1"}]),
        r"a\.parquet, row 1: no field 'prompt' \(found: q, answer\)",
    )
    fails(
        parquet(tmp_path / "b.parquet", [{"prompt": "x", "answer": "1"}, {"prompt": "y", "answer": None}]),
        r"b\.parquet, row 2: field 'answer' must be a text or a number; found None",
    )
    fails(tmp_path / "nope.parquet", r"nope\.parquet does not exist")
    (tmp_path / "text.parquet").write_text("no table")
    fails(tmp_path / "text.parquet", r"text\.parquet: not Parquet")


# --- Hugging Face data sets ---------------------------------------------------------------------
def questions(*texts) -> datasets.Dataset:
    return datasets.Dataset.from_list([{"question": text, "answer": f"so #### {i}"} for i, text in enumerate(texts)])


FIELDS = {"prompt_field": "question", "answer_pattern": "#### (.*)"}


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "saved"
    datasets.DatasetDict(train=questions("a", "b", "c", "d"), test=questions("x", "y")).save_to_disk(str(folder))
    return str(folder)


def texts_of(task) -> tuple[list[str], list[str]]:
    """One epoch of training texts, sorted, and the held-out ones."""
    train, held_out = task.read()
    return sorted(prompt.text for prompt in train), [prompt.text for prompt in held_out]


def test_a_saved_set_is_read_by_its_splits_and_slices(saved):
    assert texts_of(Datasets(path=saved, **FIELDS)) == (["a", "b", "c", "d"], ["x", "y"])
    assert texts_of(Datasets(path=saved, held_out_split="train[:1]", split="train[2:]", **FIELDS)) == (["c", "d"], ["a"])
    assert texts_of(Datasets(path=saved, split="train[:50%]", limit=1, **FIELDS)) == (["a"], ["x", "y"])
    prompt = Datasets(path=saved, **FIELDS).held_out()[1]
    assert prompt == Prompt("y", "1", {"question": "y", "answer": "so #### 1"})


def test_a_saved_single_split_is_the_training_split(tmp_path):
    questions("a", "b", "c").save_to_disk(str(tmp_path / "one"))
    task = Datasets(path=str(tmp_path / "one"), split="train[1:]", held_out_split="train[:1]", **FIELDS)
    assert texts_of(task) == (["b", "c"], ["a"])


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_a_single_file_is_cut_into_splits(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = str(tmp_path / f"questions.{kind}")
    {"csv": datasets.Dataset.to_csv, "parquet": datasets.Dataset.to_parquet}.get(kind, datasets.Dataset.to_json)(
        questions("a", "b", "c"), path
    )
    task = Datasets(path=path, split="train[1:]", held_out_split="train[:1]", **FIELDS)
    assert texts_of(task) == (["b", "c"], ["a"])


def test_a_folder_of_files_is_read_by_their_names(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    questions("a", "b").to_json(str(tmp_path / "set" / "train.jsonl"))
    questions("x").to_json(str(tmp_path / "set" / "test.jsonl"))
    assert texts_of(Datasets(path=str(tmp_path / "set"), **FIELDS)) == (["a", "b"], ["x"])


def test_what_cannot_be_loaded_says_which_split_of_what(saved, tmp_path):
    for knobs, says in [
        ({"path": saved, "split": "training"}, "split training: .*no split 'training'; there are: train, test"),
        ({"path": str(tmp_path / "nowhere")}, "nowhere, split train: cannot be loaded"),
        ({"path": saved, "prompt_field": "text"}, r"saved, split train, row 1: no field 'text' \(found: question, answer\)"),
        ({"path": saved, "held_out_split": "train", **FIELDS}, "4 prompts are both in .*split train and in .*split train"),
    ]:
        with pytest.raises(ValueError, match=says):
            Datasets(**knobs).held_out()


def read_task(**knobs) -> Task:
    return TypeAdapter(Annotated[Task, tasks]).validate_python(knobs)


def test_a_preset_is_data_over_which_explicit_keys_win():
    task = read_task(use="datasets", preset="gsm8k", split="train[:100]", held_out_limit=7)
    assert (task.path, task.name, task.split, task.held_out_split, task.held_out_limit) == (
        "openai/gsm8k",
        "main",
        "train[:100]",
        "test",
        7,
    )
    assert read_task(**task.model_dump(mode="json")) == task
    assert read_task(use="datasets", preset="gsm8k", prompt_field="question").template is None  # asks for another prompt
    with pytest.raises(ValidationError, match="preset"):
        read_task(use="datasets", preset="gsm8", path="x")


def made_for(preset: str) -> datasets.Dataset:
    """Two rows with the fields that the preset's set has."""
    knobs = read_task(use="datasets", preset=preset)
    solution = {"gsm8k": "6 = 6\n#### 6", "math": r"so \boxed{6}"}.get(preset, "6")
    field = "question" if preset in ("gsm8k", "deepmath") else "problem"
    return datasets.Dataset.from_list([{field: text, knobs.answer_field: solution} for text in ("two threes", "one six")])


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_reads_rows_of_its_form(preset, tmp_path):
    rows = made_for(preset)
    splits = {"train": rows.select([0, 0])} if preset == "deepmath" else {"train": rows.select([0]), "test": rows.select([1])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path))
    knobs = {"split": "train[1:]", "held_out_split": "train[:1]", "on_overlap": "drop"} if preset == "deepmath" else {}
    task = read_task(use="datasets", preset=preset, path=str(tmp_path), **knobs)
    if preset == "deepmath":
        with pytest.raises(ValueError, match="nothing is left to train on"):  # both rows are one
            task.held_out()
    else:
        (prompt,) = task.held_out()
        assert prompt.answer == "6" and prompt.text.endswith("within \\boxed{}.") and prompt.text.startswith(("two", "one"))


@pytest.mark.parametrize("preset", ["math500", "aime24", "aime25"])
def test_a_set_for_evaluation_only_has_nothing_to_train_on(preset, tmp_path):
    datasets.DatasetDict(train=made_for(preset), test=made_for(preset)).save_to_disk(str(tmp_path))
    task = read_task(use="datasets", preset=preset, path=str(tmp_path))
    assert len(task.held_out()) == 2
    with pytest.raises(ValueError, match=r"has no training problems; name it in evaluation\.frozen"):
        task.prompts(0, 0, 1)


# --- reasoning-gym ------------------------------------------------------------------------------
SUMS = {"name": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}  # two hundred problems


def test_reasoning_gym_makes_the_problems_that_were_asked_for():
    for prompt in ReasoningGym(**SUMS, held_out_size=20, template="Q: {question} A:").prompts(0, 0, 20):
        expression = prompt.meta["entry"]["metadata"]["expression"]
        assert str(eval(expression)) == prompt.answer and len(expression) == len("1 + 1")
        assert prompt.text == f"Q: {prompt.meta['entry']['question']} A:" and prompt.meta["dataset"] == "chain_sum"


def test_the_reasoning_gym_stream_is_a_function_of_seed_and_position():
    task, again = ReasoningGym(**SUMS, held_out_size=20), ReasoningGym(**SUMS, held_out_size=20)
    assert task.prompts(3, BLOCK - 5, 20)[5:] == again.prompts(3, BLOCK, 15)  # over the end of a block
    assert task.demonstrations(3, 0, 9) == [(prompt.text, prompt.answer) for prompt in task.prompts(3, 0, 9)]
    assert task.prompts(3, 0, 10) != task.prompts(4, 0, 10)
    assert task.held_out() == again.held_out()


def test_the_expert_stops_early_at_the_noted_rate():
    task = ReasoningGym(**SUMS, held_out_size=20, noise=0.3)
    early, shown = 0, task.demonstrations(5, 0, 600)
    for (text, response), prompt in zip(shown, task.prompts(5, 0, 600), strict=True):
        assert text == prompt.text and response in (prompt.answer, prompt.answer[:-1])
        early += response != prompt.answer
    assert early / 600 == pytest.approx(0.3, abs=0.07)  # 3.7 standard errors
    assert task.demonstrations(5, 100, 50) == shown[100:150]


def test_reasoning_gym_never_trains_on_held_out_problems():
    task = ReasoningGym(**SUMS, held_out_size=60)
    held_out = [prompt.text for prompt in task.held_out()]
    assert len(set(held_out)) == len(held_out) == 60
    assert not {prompt.text for prompt in task.prompts(0, 0, 1500)} & set(held_out)


def test_problems_that_run_out_are_an_error():
    task = ReasoningGym(**SUMS, held_out_size=10_000)  # all there are
    assert len(task.held_out()) < 250
    with pytest.raises(ValueError, match=r"are held-out problems .*lower task\.held_out_size"):
        task.prompts(0, 0, 300)


def test_a_mixture_follows_its_weights():
    task = ReasoningGym(datasets=[{"name": "gcd", "weight": 3}, {"name": "lcm"}], held_out_size=5)
    drawn = [prompt.meta["dataset"] for prompt in task.prompts(0, 0, 400)]
    assert drawn.count("gcd") / 400 == pytest.approx(0.75, abs=0.08) and set(drawn) == {"gcd", "lcm"}


def test_reasoning_gym_scores_its_own_answers():
    task = ReasoningGym(datasets=[{"name": name} for name in ("basic_arithmetic", "spell_backward", "word_sorting")])
    for prompt in task.prompts(0, 0, 20):
        assert reasoning_gym.get_score_answer_fn(prompt.meta["dataset"])(prompt.answer, prompt.meta["entry"]) == 1.0


def test_the_reasoning_gym_alphabet_holds_what_is_said():
    task = ReasoningGym(**SUMS, held_out_size=50)
    assert {char for pair in task.demonstrations(1, 0, 200) for text in pair for char in text} <= set(task.alphabet)
    assert "demonstrations" in task.provides


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"name": "chain_sun"}, "did you mean 'chain_sum'"),
        (
            {"name": "chain_sum", "config": {"max_digit": 1}},
            r"'chain_sum': no setting is called 'max_digit' \(did you mean 'max_digits'",
        ),
        ({"name": "chain_sum", "config": {"min_digits": 3, "max_digits": 1}}, "refuses .*AssertionError: max_digits"),
        ({"name": "chain_sum", "config": {"seed": 1}}, "'seed' of 'chain_sum' is set by cct"),
        ({"datasets": [{"name": "gcd"}, {"name": "lcd"}]}, "did you mean"),
    ],
)
def test_what_reasoning_gym_does_not_know_is_named(knobs, says):
    with pytest.raises(ValueError, match=says):
        ReasoningGym(**knobs).ready()


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({}, "either name, for one data set, or datasets"),
        ({"name": "gcd", "datasets": [{"name": "lcm"}]}, "either name"),
        ({"datasets": [{"name": "lcm"}], "config": {"max_value": 3}}, "config belongs to name"),
        ({"name": "gcd", "template": "no question"}, "must hold {question} once"),
        ({"name": "gcd", "template": "{question} {answer}"}, "must hold {question} once"),
        ({"datasets": [{"name": "gcd", "weight": 0}]}, "greater than 0"),
    ],
)
def test_meaningless_reasoning_gym_knobs_are_refused(knobs, says):
    with pytest.raises(ValidationError, match=says):
        ReasoningGym(**knobs)


@pytest.mark.parametrize(
    ("module", "extra", "knobs"),
    [
        ("reasoning_gym.factory", "reasoning-gym", {"use": "reasoning_gym", "name": "figlet_font"}),
        ("datasets", "data", {"use": "datasets", "path": "."}),
        ("pyarrow.parquet", "data", {"use": "parquet", "path": __file__, "held_out_path": __file__}),
    ],
)
def test_a_missing_library_names_its_extra(module, extra, knobs, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"is not installed; install it with pip install -e '\.\[{extra}\]'"):
        read_task(**knobs).held_out()
