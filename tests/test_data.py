"""Data as people have them: other frameworks' rows, odd values, prompts that are too long, answers that cannot be read."""

import gzip
import json
import time
from decimal import Decimal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from held import Held
from test_models import TEMPLATE, USER, make_folder, make_tokenizer, pretrained
from test_recipe import NO_CRITIC, over, write

from cct.agent.building import build
from cct.cli import main
from cct.errors import TrainingStopped
from cct.loading import load_recipe
from cct.policy import engines
from cct.preflight import preflight, trained_on
from cct.prompts import drawn, training_prompts
from cct.recipe import RecipeError
from cct.rollout import Prompt
from cct.task.fields import lookup, text_of
from cct.task.files import JsonLines, Parquet
from cct.task.huggingface import Datasets
from cct.training.evaluation import evaluate
from cct.training.sampler import Sampler


def lines(path, *rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def jsonl(folder, *rows, held_out=({"prompt": "h", "answer": "0"},), **knobs) -> JsonLines:
    return JsonLines(path=lines(folder / "train.jsonl", *rows), held_out_path=lines(folder / "test.jsonl", *held_out), **knobs)


def first(folder, row, **knobs) -> Prompt:
    knobs.setdefault("held_out", ({"prompt": "h", "answer": "0"},))
    return jsonl(folder, row, **knobs).training()[0]


# --- values -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("6.0", "6.0"),
        (6, "6"),
        (6.0, "6"),
        (-0.0, "0"),
        (0.5, "0.5"),
        (1e22, "10000000000000000000000"),
        (Decimal("6.00"), "6"),
        (Decimal("6.50"), "6.5"),
        (["18"], "18"),
        ([18.0], "18"),
    ],
)
def test_a_number_of_a_row_is_the_text_that_a_response_would_give(value, text):
    assert text_of(value) == text


@pytest.mark.parametrize("value", [np.int64(6), np.float64(6.0), np.array(["6"]), np.array([6.0])])
def test_numbers_and_arrays_of_numpy_are_read(value):
    assert text_of(lookup({"answer": value}, "answer")) == "6"


@pytest.mark.parametrize("value", ["NaN", "Infinity", '""', '"  \\n"', "null", "true", "[]", '["1", "2"]', "{}", '"\\ud800"'])
@pytest.mark.parametrize("field", ["prompt", "answer"])
def test_a_value_that_is_no_text_is_refused_with_its_row(tmp_path, value, field):
    row = {"prompt": '"p"', "answer": '"1"', field: value}
    task = jsonl(tmp_path, {"prompt": "a", "answer": "1"}, "{" + ", ".join(f'"{k}": {v}' for k, v in row.items()) + "}")
    with pytest.raises(ValueError, match=rf"train\.jsonl:2: .*{field}"):
        task.held_out()


def test_messages_of_a_data_frame_are_read():
    asked = np.array([{"role": "user", "content": "1+2="}], dtype=object)
    assert lookup({"prompt": asked, "x": {"y": np.array([1, 2])}}, "prompt") == [{"role": "user", "content": "1+2="}]


def test_a_missing_value_of_a_parquet_column_is_refused_with_its_row(tmp_path):
    table = pyarrow.table({"prompt": ["a", "b"], "answer": [6.0, float("nan")]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet, row 2: field 'answer' must be a text or a number; found nan"):
        Parquet(path=tmp_path / "a.parquet", held_out_path=tmp_path / "a.parquet").held_out()


def test_an_answer_pattern_that_finds_nothing_in_its_group_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"train\.jsonl:1: task\.answer_pattern finds an empty answer"):
        first(
            tmp_path,
            {"prompt": "p", "answer": "#### "},
            answer_pattern="#### ?(.*)",
            held_out=({"prompt": "h", "answer": "#### 1"},),
        )


# --- files --------------------------------------------------------------------------------------
def test_byte_order_marks_carriage_returns_and_gzip_are_read(tmp_path):
    task = jsonl(tmp_path, {"prompt": "a", "answer": "1"})
    for data in (
        b'\xef\xbb\xbf{"prompt": "x\\r\\ny", "answer": "1"}\r\n\r\n{"prompt": "z", "answer": "2"}\r\n',
        gzip.compress(b'{"prompt": "x\\r\\ny", "answer": "1"}\n{"prompt": "z", "answer": "2"}\n', mtime=0),
    ):
        (tmp_path / "train.jsonl").write_bytes(data)
        assert [p.text for p in task.model_copy().training()] == ["x\r\ny", "z"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "holds no problem"),
        (gzip.compress(b"{}" * 99, mtime=0)[:20], "cannot be read"),
        (b'{"prompt": "\xff", "answer": "1"}', "not UTF-8"),
        (b'{"prompt": "a", "answer": "1", "answer": "2"}', "train.jsonl:1: not JSON .the key 'answer' occurs twice"),
        (b"[" * 100_000, "train.jsonl:1: not JSON"),
        (b'{"prompt": "a", "answer": ' + b"1" * 5000 + b"}", "train.jsonl:1: not JSON"),
    ],
)
def test_a_damaged_file_is_one_error_with_its_name(tmp_path, data, says):
    task = jsonl(tmp_path, {"prompt": "a", "answer": "1"})
    (tmp_path / "train.jsonl").write_bytes(data)
    with pytest.raises(ValueError, match=says):
        task.held_out()


def test_problems_that_differ_in_white_space_only_overlap(tmp_path):
    task = jsonl(
        tmp_path, {"prompt": "caf\u00e9  1+1?\r\n", "answer": "2"}, held_out=({"prompt": "cafe\u0301 1+1?", "answer": "2"},)
    )
    with pytest.raises(ValueError, match="1 prompts are both in"):
        task.held_out()


# --- other frameworks' rows ---------------------------------------------------------------------
ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+2="}]
VERL = {
    "data_source": "gsm8k",
    "prompt": ASKED,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"index": 7, "split": "train"},
}


def test_verls_parquet_is_read_by_its_preset(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL]), tmp_path / "a.parquet")
    other = VERL | {"prompt": [{"role": "user", "content": "other"}]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([other]), tmp_path / "b.parquet")
    task = Parquet(preset="verl", path=tmp_path / "a.parquet", held_out_path=tmp_path / "b.parquet")
    (prompt,) = task.training()
    assert prompt.text == "1+2=" and prompt.answer == "3" and list(prompt.messages) == ASKED
    assert prompt.meta["extra_info"]["index"] == 7


@pytest.mark.parametrize(
    ("preset", "row"),
    [
        ("verl", VERL),
        ("verl", VERL | {"reward_model": json.dumps(VERL["reward_model"])}),  # an object written as JSON
        ("trl", {"prompt": ASKED, "solution": "3"}),
        ("trl", {"prompt": "1+2=", "answer": 3}),
        ("trl", {"prompt": {"role": ["user"], "content": ["1+2="]}, "answer": 3}),  # as columns
        ("trl", {"prompt": ASKED, "completion": [{"role": "assistant", "content": "3"}]}),
        ("trl", {"messages": [*ASKED, {"role": "assistant", "content": "3"}]}),
        ("openai", {"messages": [*ASKED, {"role": "assistant", "content": "3"}]}),
        ("openai", {"messages": ASKED, "reference_answer": "3"}),
        ("openai", {"messages": [{"role": "user", "content": [{"type": "text", "text": "1+2="}]}], "reference_answer": "3"}),
    ],
)
def test_the_layouts_of_other_frameworks_have_presets(tmp_path, preset, row):
    held_out = ({"prompt": "h", "messages": [{"role": "user", "content": "h"}], "reference_answer": "1", "solution": "1",
                 "reward_model": {"ground_truth": "1"}},)  # fmt: skip
    prompt = first(tmp_path, row, preset=preset, held_out=held_out)
    assert (prompt.text, prompt.answer) == ("1+2=", "3")
    assert not prompt.messages or prompt.messages[-1] == ASKED[-1]


def test_a_key_beside_a_preset_wins():
    assert JsonLines(path="a", held_out_path="b", preset="verl", answer_field="x").answer_field == "x"
    assert Datasets(path="a", preset="verl", template="{q}").prompt_field == "prompt"


def test_several_turns_keep_their_order_and_roles(tmp_path):
    turns = [*ASKED, {"role": "assistant", "content": "3"}, {"role": "user", "content": "and 2+2=", "name": "x"}]
    prompt = first(tmp_path, {"prompt": turns, "answer": "4"})
    assert prompt.text == "user: 1+2=\n\nassistant: 3\n\nuser: and 2+2="
    assert prompt.messages == tuple({"role": m["role"], "content": m["content"]} for m in turns)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": [{"from": "human", "value": "a"}], "answer": "1"}, "message 1 has no role and content .found: from, value"),
        ({"prompt": [{"role": "user", "content": None}], "answer": "1"}, "message 1, the user's, holds no text"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "answer": "1"},
            "message 1, the user's, holds no text",
        ),
        ({"prompt": [*ASKED, {"role": "assistant", "content": "3"}], "answer": "1"}, "ends with the assistant's message"),
        ({"prompt": "a", "answer": ASKED}, "ends with the user's message"),
        ({"prompt": "a", "reward": {"gold": "1"}}, "no field 'answer' .found: prompt, reward.gold"),
    ],
)
def test_a_row_that_is_no_conversation_says_what_is_wrong(tmp_path, row, says):
    with pytest.raises(ValueError, match=rf"train\.jsonl:1: .*{says}"):
        first(tmp_path, row)


# --- messages and the chat template -------------------------------------------------------------
@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    make_folder(folder, tokenizer=make_tokenizer(chat_template=TEMPLATE))
    return folder


def test_messages_written_as_json_are_messages(tmp_path):
    asked, answer = [{"role": "user", "content": "1+2="}], [{"role": "assistant", "content": "3"}]
    row = {"prompt": json.dumps(asked), "answer": json.dumps(answer)}
    (prompt,) = JsonLines(path=tmp_path, held_out_path=tmp_path).make_prompts([("here", row)], "here")
    assert (prompt.text, prompt.answer, prompt.messages) == ("1+2=", "3", tuple(asked))


@pytest.mark.parametrize(
    "text", ['["a", "b"]', '[{"a": 1}]', '[{"role": "user"}, 1]', '{"role": "user", "content": "x"}', "[1"]
)
def test_other_json_in_a_text_stays_a_text(text, tmp_path):
    (prompt,) = JsonLines(path=tmp_path, held_out_path=tmp_path).make_prompts(
        [("here", {"prompt": text, "answer": "3"})], "here"
    )
    assert (prompt.text, prompt.messages) == (text, ())


def test_a_template_takes_fields_inside_of_others(tmp_path):
    task = JsonLines(path=tmp_path, held_out_path=tmp_path, template="{extra.question} ({{{level}}})")
    row = {"extra": {"question": "1+2=?"}, "level": 3.0, "answer": "3"}
    assert task.make_prompts([("here", row)], "here")[0].text == "1+2=? ({3})"


@pytest.mark.parametrize(
    ("knobs", "messages", "gives"),
    [
        ({}, ASKED[1:], USER),
        ({}, ASKED, "<|im_start|>system be brief<|im_end|>" + USER),
        ({"system": "be long"}, ASKED[1:], "<|im_start|>system be long<|im_end|>" + USER),
        ({"system": "be long"}, ASKED, "<|im_start|>system be brief<|im_end|>" + USER),  # the row's own
    ],
)
def test_messages_go_through_the_chat_template(chat, knobs, messages, gives):
    policy = pretrained(chat, **knobs)
    tokenizer = policy.tokenizer(alphabet="")
    assert tokenizer.decode(policy.encode(tokenizer, Prompt("", messages=tuple(messages)).written)) == gives


def test_messages_need_a_chat_template(chat, tmp_path):
    policy = pretrained(chat, chat="never")
    with pytest.raises(ValueError, match="there is no chat template for it"):
        policy.encode(policy.tokenizer(alphabet=""), ASKED)
    path = lines(tmp_path / "a.jsonl", {"prompt": ASKED, "answer": "3"})
    other = lines(tmp_path / "b.jsonl", {"prompt": "h", "answer": "3"})
    recipe = over(tmp_path, f"task: {{use: jsonl, path: {path}, held_out_path: {other}}}", NO_CRITIC)
    with pytest.raises(
        RecipeError, match=r"a\.jsonl:1 '1\+2=' is a list of messages, and policy 'scratch' has no chat template"
    ):
        preflight(load_recipe(recipe))


def test_what_the_template_opened_is_the_beginning_of_what_evidence_sees(chat, tmp_path):
    opens = {"chat_options": {"hint": "<think>"}, "response_prefix": "<think>"}
    policy = pretrained(chat, **opens)
    assert policy.encode(policy.tokenizer(alphabet=""), "1+2=")
    with pytest.raises(ValueError, match="response_prefix: a prompt ends in .*assistant so'"):
        pretrained(chat, chat_options={"hint": "so"}, response_prefix="<think>").encode(policy.tokenizer(alphabet=""), "1+2=")
    knobs = f"policy: {{use: pretrained, path: {chat}, chat_options: {{hint: so}}, response_prefix: so}}\n"
    evidence = "evidence: [{use: format, pattern: '(?s)so.*'}]\ntask: {held_out_size: 4}\ngeneration: {max_new_tokens: 4}\n"
    recipe = load_recipe(over(tmp_path, knobs + evidence, NO_CRITIC))
    agent, tokenizer, _ = build(recipe)
    sampler = Sampler(recipe, agent.actor, tokenizer)
    rows = sampler.sample(1).rows
    assert all(row.response.text.startswith("so") and sum(row.rewards) == 1.0 for row in rows)
    states = [(row.group, row.response.tokens[:1]) for row in rows[:2]]
    continued, _ = sampler.continue_from(rows, states, 1, 0)
    assert [one.value for some in continued for one in some] == [1.0, 1.0]
    assert set(sampler.greedy_scores([rows[0].prompt], 1)) == {1.0}
    assert evaluate(sampler)["eval/accuracy"] == 1.0


# --- prompts that are too long ------------------------------------------------------------------
LONG = "1+" * 40 + "1="
POLICY = (
    'policy: {use: scratch, alphabet: "0123456789+=#", max_length: 32, hidden_size: 16, intermediate_size: 16, layers: 2, '
    "heads: 1, kv_heads: 1}\ngeneration: {max_new_tokens: 4}\n"
    "training: {iterations: 3, prompts_per_iteration: 4, responses_per_prompt: 2, minibatch_size: 8}\n"
)


def with_long(folder, *long, held_out=("2+2=",), more="") -> str:
    """A recipe of nine prompts that fit and these, and held-out ones."""
    train = lines(folder / "t.jsonl", *({"prompt": text, "answer": "1"} for text in [*(f"{i}+1=" for i in range(9)), *long]))
    test = lines(folder / "h.jsonl", *({"prompt": text, "answer": "1"} for text in held_out))
    return str(over(folder, f"task: {{use: jsonl, path: {train}, held_out_path: {test}}}\n{POLICY}{more}", NO_CRITIC))


def test_a_prompt_that_is_too_long_is_found_before_the_run(tmp_path):
    for recipe in (with_long(tmp_path, LONG), with_long(tmp_path, held_out=("2+2=", LONG))):
        with pytest.raises(TrainingStopped, match=r"1 of \d+ prompts are too long: .* 32 positions .*jsonl:\d+ '1\+1"):
            build(load_recipe(recipe))


def test_the_engines_limit_counts_as_the_models_does():
    vllm = engines["vllm"](max_length=96, max_new_tokens=12)
    assert vllm.limit(512) == (96, "generation.max_length (96)") and vllm.limit(64)[0] == 64
    assert engines["transformers"]().limit(None) is None


def test_a_response_limit_that_fills_the_engine_is_refused_by_check(tmp_path, capsys):
    path = over(tmp_path, "generation: {use: auto, max_length: 12, max_new_tokens: 12}", NO_CRITIC)
    assert main(["check", str(path)]) == 2
    assert (
        "max_new_tokens: 12, but the limit is generation.max_length (12) for prompt and response together"
        in capsys.readouterr().err
    )


def test_dropped_prompts_are_replaced_so_that_every_iteration_is_full_and_the_same_again(tmp_path):
    recipe = load_recipe(with_long(tmp_path, LONG, LONG + "1=", held_out=("2+2=", "9+" * 40)), ["generation.overlong=drop"])
    said = []
    agent, tokenizer, _ = build(recipe, say=said.append)
    assert said == [
        "2 of 11 training prompts are too long and left out (overlong: drop)",
        "1 of 2 held-out prompts are too long and left out (overlong: drop)",
    ]
    drawn = {n: training_prompts(recipe, agent.actor, tokenizer, n) for n in (1, 2, 3)}
    assert all(len(prompts) == 4 and all(len(p.text) == 4 for p in prompts) for prompts, _ in drawn.values())
    assert sum(replaced for _, replaced in drawn.values()) == 2  # the first epoch has both
    assert {n: training_prompts(recipe, agent.actor, tokenizer, n) for n in (3, 1, 2)} == drawn  # whatever came before
    iteration = Held(recipe, agent, tokenizer).collect(1)
    assert iteration.metrics["train/overlong"] == drawn[1][1] and len(iteration.rows) == 8


def test_nothing_that_fits_stops_the_run_before_it_begins(tmp_path):
    recipe = load_recipe(with_long(tmp_path, held_out=(LONG,)), ["generation.overlong=drop"])
    with pytest.raises(TrainingStopped, match="1 of 1 prompts are too long"):
        build(recipe)


# --- check --deep -------------------------------------------------------------------------------
def test_the_deep_check_counts_and_shows_what_is_wrong(tmp_path, capsys):
    path = with_long(tmp_path, LONG, "3+1=", held_out=("2+2=",))
    assert main(["check", "--deep", path]) == 2
    out = capsys.readouterr()
    assert "training: 11 prompts, 4 to 82 tokens" in out.out and "1 too long" in out.out
    assert "1 of 11 prompts are too long" in out.err and "t.jsonl:10 '1+1" in out.err
    assert "training: 1 of 11 prompts are duplicates of earlier ones, e.g. " in out.err
    assert main(["check", "--deep", path, "--set", "generation.overlong=drop"]) == 0
    out = capsys.readouterr()
    assert "they are left out (overlong: drop)" in out.err and ": ok (" in out.out


@pytest.mark.parametrize(("on_error", "code"), [("zero", 0), ("fail", 2)])
def test_a_gold_answer_that_cannot_be_read_is_named_before_the_run(tmp_path, capsys, on_error, code):
    train = lines(tmp_path / "t.jsonl", {"prompt": "a", "answer": "7"}, {"prompt": "b", "answer": "???"})
    test = lines(tmp_path / "h.jsonl", {"prompt": "c", "answer": "#### 1"})
    text = (
        f"task: {{use: jsonl, path: {train}, held_out_path: {test}}}\nevidence: [{{use: math_verify, on_error: {on_error}}}]\n"
    )
    path = over(tmp_path, text, NO_CRITIC)
    assert main(["check", str(path)]) == code
    err = capsys.readouterr().err
    assert "'math_verify' cannot read the gold answers of 1 of 3 prompts" in err
    assert "t.jsonl:2: the gold answer '???' cannot be read as mathematics" in err
    assert code or "1 of 3 gold answers contain '####'" in err


def test_the_deep_check_says_that_the_template_opened_a_thought(tmp_path, capsys):
    tokenizer = make_tokenizer(chat_template=TEMPLATE)
    tokenizer.add_tokens(["<think>"])
    make_folder(tmp_path / "model", tokenizer=tokenizer)
    train, test = (lines(tmp_path / f"{n}.jsonl", {"prompt": f"{n}+1=", "answer": "1"}) for n in (1, 2))
    options = f'use: pretrained, path: {tmp_path / "model"}, chat_options: {{hint: "<think>"}}'
    for prefix, warned in (("", True), (', response_prefix: "<think>"', False)):
        text = f"task: {{use: jsonl, path: {train}, held_out_path: {test}}}\npolicy: {{{options}{prefix}}}\n"
        assert main(["check", "--deep", str(over(tmp_path, text, NO_CRITIC))]) == 0
        out = capsys.readouterr()
        assert "training: 1 prompts" in out.out
        assert ("set policy.response_prefix to '<think>'" in out.err) == warned


# --- the same time for ten iterations and for a billion -----------------------------------------
def test_a_check_takes_no_longer_for_a_billion_iterations(tmp_path):
    list_of = with_long(tmp_path)
    for path in (list_of, over(tmp_path / "stream", "name: stream", NO_CRITIC)):
        for sets in (["training.iterations=1000000000"], ["training.prompts_per_iteration=1000000"]):
            started = time.process_time()
            preflight(load_recipe(path, sets), demonstrations=False)
            assert time.process_time() - started < 2


def test_of_a_list_what_is_drawn_is_exact_however_long_the_run(tmp_path):
    path = with_long(tmp_path)
    few, many = (load_recipe(path, [f"training.iterations={n}"]) for n in (2, 10**9))
    assert trained_on(few) == {p.text for p in few.task.prompts(few.seed, 0, 8)} and len(trained_on(few)) == 8
    assert trained_on(many) == {f"{i}+1=" for i in range(9)} and len(drawn(many)) == 9


def test_a_frozen_set_is_compared_after_white_space(tmp_path):
    train = lines(tmp_path / "t.jsonl", {"prompt": "a  b", "answer": "1"})
    test, frozen = (lines(tmp_path / f"{n}.jsonl", {"prompt": n, "answer": "1"}) for n in ("h", "a b"))
    task = f"task: {{use: jsonl, path: {train}, held_out_path: {test}}}\n"
    more = f"evaluation: {{frozen: {{x: {{use: jsonl, path: {test}, held_out_path: '{frozen}'}}}}}}\n"
    with pytest.raises(
        RecipeError, match=r"evaluation\.frozen\.x: 1 evaluation problems of 'jsonl' would be trained on, e.g. 'a  b'"
    ):
        preflight(
            load_recipe(write(tmp_path, f"base: low.yaml\n{task}{more}")) if write(tmp_path, NO_CRITIC, "low.yaml") else None
        )
