"""What is looked at before a run: parts that cannot work here, frozen sets, evaluation problems that are trained on."""

import json
import sys

import datasets
import pytest
from jsonschema import Draft202012Validator
from test_recipe import NO_CRITIC, over, problems, the_problem, write

from cct.cli import main
from cct.loading import dump_recipe, json_schema, load_recipe
from cct.preflight import preflight, trained_on
from cct.recipe import RecipeError
from cct.rollout import Prompt
from cct.task.chain_arithmetic import ChainArithmetic


def jsonl(folder, name: str, *texts: str) -> str:
    write(folder, "".join(json.dumps({"prompt": text, "answer": "0"}) + "\n" for text in texts), name)
    return f"{folder / name}"


def checked(path) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        preflight(load_recipe(path))
    return caught.value.problems


def frozen(**sets: str) -> str:
    return "evaluation:\n  frozen:\n" + "".join(f"    {name}: {task}\n" for name, task in sets.items())


# --- frozen sets in the recipe ----------------------------------------------------------------
def test_frozen_sets_are_parts_of_the_recipe(tmp_path):
    recipe = load_recipe(over(tmp_path, frozen(short="{use: chain_arithmetic, steps: 2}", own="chain_arithmetic")))
    assert recipe.evaluation.frozen == {"short": ChainArithmetic(steps=2), "own": ChainArithmetic()}
    assert recipe.parts["evaluation.frozen.short"].steps == 2 and "evaluation.frozen.own" in recipe.parts
    again = write(tmp_path, dump_recipe(recipe), "again.yaml")
    assert load_recipe(again) == recipe


def test_frozen_sets_of_bases_merge_by_name(tmp_path):
    write(tmp_path, NO_CRITIC + frozen(a="{use: chain_arithmetic, steps: 2}", b="chain_arithmetic"), "low.yaml")
    path = write(tmp_path, "base: low.yaml\n" + frozen(a="{steps: 3}"))
    recipe = load_recipe(path, ["evaluation.frozen.b.noise=0.5"])
    assert recipe.evaluation.frozen == {"a": ChainArithmetic(steps=3), "b": ChainArithmetic(noise=0.5)}


def test_the_demonstrations_of_a_frozen_set_warm_nothing_up(tmp_path):
    path = jsonl(tmp_path, "t.jsonl", "a")
    task = f"task: {{use: jsonl, path: {path}, held_out_path: {path}}}\npolicy: {{use: scratch, warm_start: {{}}}}\n"
    problem = the_problem(over(tmp_path, task + frozen(short="chain_arithmetic")))
    assert "'scratch' needs demonstrations, and nothing in this recipe provides it" in problem


def test_a_bad_knob_of_a_frozen_set_has_file_line_key_and_help(tmp_path):
    problem = the_problem(over(tmp_path, frozen(short="{use: chain_arithmetic, steps: 0}")))
    assert "r.yaml, line 4: evaluation.frozen.short.steps: input should be greater than or equal to 1 (found 0)" in problem
    assert problem.endswith("Operations in a problem.")
    (problem,) = problems(over(tmp_path, frozen(short="chain_arithmetics")))
    assert "did you mean 'chain_arithmetic'" in problem


def test_the_name_of_a_frozen_set_is_a_word(tmp_path):
    assert "evaluation.frozen" in the_problem(over(tmp_path, frozen(**{"a.b": "chain_arithmetic"})))


def test_the_schema_knows_frozen_sets():
    schema = Draft202012Validator(json_schema())
    assert schema.is_valid({"evaluation": {"frozen": {"a": {"use": "chain_arithmetic", "steps": 2}}}})
    assert not schema.is_valid({"evaluation": {"frozen": {"a": {"use": "chain_arithmetic", "stepps": 2}}}})


# --- overlap ----------------------------------------------------------------------------------
def trains_on(folder, *texts: str) -> str:
    """A task that trains on these texts and evaluates on `z`."""
    return (
        f"task: {{use: jsonl, path: {jsonl(folder, 'train.jsonl', *texts)}, held_out_path: {jsonl(folder, 'z.jsonl', 'z')}}}\n"
    )


def evaluates_on(folder, *texts: str) -> str:
    return f"{{use: jsonl, path: {folder / 'z.jsonl'}, held_out_path: {jsonl(folder, 'frozen.jsonl', *texts)}}}"


def test_a_frozen_problem_that_is_trained_on_is_refused_with_an_example(tmp_path):
    path = over(tmp_path, trains_on(tmp_path, "a", "b", "c") + frozen(ok=evaluates_on(tmp_path, "d")), NO_CRITIC)
    preflight(load_recipe(path))
    path = over(tmp_path, trains_on(tmp_path, "a", "b", "c") + frozen(bad=evaluates_on(tmp_path, "d", "b")), NO_CRITIC)
    (problem,) = checked(path)
    assert problem.startswith("evaluation.frozen.bad: 1 evaluation problems of 'jsonl' would be trained on, e.g. 'b'")


def test_only_what_the_run_draws_counts(tmp_path):
    texts = [f"p{i:03d}" for i in range(100)]
    small = "training: {iterations: 2, prompts_per_iteration: 5, responses_per_prompt: 2, minibatch_size: 10}\n"
    recipe = load_recipe(over(tmp_path, trains_on(tmp_path, *texts) + small, NO_CRITIC))
    drawn = trained_on(recipe)
    assert drawn == {prompt.text for prompt in recipe.task.prompts(0, 0, 10)} and len(drawn) == 10
    for text, refused in [(min(drawn), True), (min(set(texts) - drawn), False)]:
        path = over(tmp_path, trains_on(tmp_path, *texts) + small + frozen(set=evaluates_on(tmp_path, text)), NO_CRITIC)
        if refused:
            assert f"e.g. '{text}'" in checked(path)[0]
        else:
            preflight(load_recipe(path))


def test_what_the_critic_warms_up_on_and_what_is_demonstrated_counts(tmp_path):
    small = (
        "training: {iterations: 1, prompts_per_iteration: 2, responses_per_prompt: 2, minibatch_size: 4, critic_warmup: 3}\n"
    )
    warm = "policy: {use: scratch, warm_start: {steps: 5, batch_size: 4}}\n"
    recipe = load_recipe(over(tmp_path, small + warm))
    drawn = trained_on(recipe)
    assert len(drawn) == 8 + 20
    demonstrated = min(drawn - {prompt.text for prompt in recipe.prompts(-2, 1)})
    jsonl(tmp_path, "z.jsonl", "z")
    (problem,) = checked(over(tmp_path, small + warm + frozen(set=evaluates_on(tmp_path, demonstrated))))
    assert f"e.g. '{demonstrated}'" in problem


def test_a_task_that_breaks_its_promise_is_found(tmp_path):
    class Leaky(ChainArithmetic):
        """Trains on what it evaluates."""

        def prompts(self, seed, start, count):
            return self.held_out()[:1] * count

    recipe = load_recipe(over(tmp_path, "name: leaky"))
    with pytest.raises(RecipeError, match="^task: 1 evaluation problems of"):
        preflight(recipe.model_copy(update={"task": Leaky()}))


# --- parts that cannot work here ----------------------------------------------------------------
def test_every_part_that_cannot_work_is_named_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    text = (
        "task: {use: reasoning_gym, name: chain_sum, config: {max_digit: 1}}\n"
        "evidence: [math_verify, {use: python, path: nope.py}]\n" + frozen(gone="{use: jsonl, path: a, held_out_path: b}")
    )
    found = checked(over(tmp_path, text, NO_CRITIC))
    assert [problem.split(":")[0] for problem in found] == ["task", "evidence.0", "evidence.1", "evaluation.frozen.gone"]
    for problem, says in zip(
        found,
        ["did you mean 'max_digits'", "pip install -e '.[math]'", "nope.py does not exist", "a does not exist"],
        strict=True,
    ):
        assert says in problem


@pytest.mark.parametrize("command", [["check"], ["run"], ["run", "--dry-run"], ["explain"]])
def test_every_command_looks_first_and_ends_with_2(command, tmp_path, capsys):
    path = over(tmp_path, "evidence: [{use: python, path: nope.py}]")
    assert main([*command, str(path)]) == 2
    assert capsys.readouterr().err == f"error: {path}: evidence.0: 'python': {tmp_path / 'nope.py'} does not exist\n"


def test_a_python_file_is_relative_to_the_recipe_that_names_it(tmp_path):
    write(tmp_path / "low", NO_CRITIC.replace("[exact_match]", "[{use: python, path: ./reward.py}]"), "low.yaml")
    write(tmp_path / "low", "def score(prompt, response):\n    return 0.5\n", "reward.py")
    path = write(tmp_path, "base: low/low.yaml\n")
    recipe = load_recipe(path)
    assert recipe.evidence[0].path == tmp_path / "low" / "reward.py"
    preflight(recipe)
    assert recipe.evidence[0](Prompt("?"), None) == 0.5


def test_a_set_for_evaluation_only_cannot_train(tmp_path):
    rows = datasets.Dataset.from_list([{"problem": "6*7", "answer": "42"}])
    datasets.DatasetDict(test=rows).save_to_disk(str(tmp_path / "set"))
    part = f"{{use: datasets, preset: math500, path: {tmp_path / 'set'}}}"
    (problem,) = checked(over(tmp_path, f"task: {part}\n", NO_CRITIC))
    assert "has no training problems; name it in evaluation.frozen" in problem
    preflight(load_recipe(over(tmp_path, frozen(math500=part))))
