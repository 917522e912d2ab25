"""Recipes: loading, laying over, `--set`, plug-ins, dumping, and what is said when something is wrong."""

import re
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from cct.evidence import evidences
from cct.loading import dump_recipe, load_recipe
from cct.recipe import Recipe, RecipeError
from cct.transport.gae import GAE, CompGAE
from cct.transport.gate import AttentionGate, ShuffleGate
from cct.transport.group import GRPO

RECIPES = Path(__file__).parents[1] / "recipes"
SHIPPED = sorted(RECIPES.glob("*.yaml"))

SMALL = """\
name: small
task: chain_arithmetic
policy: scratch
generation: transformers
evidence: [exact_match]
critic: {use: tac, width: 32}
transport: {use: comp_gae, lam: 0.9, gate: attention}
geometry: ppo_clip
training: {iterations: 5}
"""
NO_CRITIC = SMALL.replace("critic: {use: tac, width: 32}\n", "").replace("{use: comp_gae, lam: 0.9, gate: attention}", "grpo")


def write(folder: Path, text: str | bytes, name: str = "r.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def over(folder: Path, text: str, base: str = SMALL) -> Path:
    """A recipe that lays `text`, from line 2 on, over a small one."""
    write(folder, base, "small.yaml")
    return write(folder, f"base: small.yaml\n{text}\n")


def problems(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def the_problem(path: Path, *overrides: str) -> str:
    found = problems(path, *overrides)
    assert len(found) == 1, found
    return found[0]


# --- shipped recipes --------------------------------------------------------------------------
def test_there_are_shipped_recipes():
    assert {"compo", "gae", "grpo"} <= {path.stem for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_recipe_is_read_dumped_and_read_again(path, tmp_path):
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    again = load_recipe(write(tmp_path, dump_recipe(recipe)))
    assert again == recipe and dump_recipe(again) == dump_recipe(recipe)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_dump_holds_every_knob(path):
    recipe = load_recipe(path)
    written = yaml.safe_load(dump_recipe(recipe))
    assert set(written) == set(Recipe.model_fields)
    for place, part in recipe.parts.items():
        node = written
        for key in place.split("."):
            node = node[int(key) if key.isdigit() else key]
        assert set(node) == {"use", *type(part).model_fields}


# --- bases ------------------------------------------------------------------------------------
def test_mappings_merge_and_the_rest_replaces(tmp_path):
    recipe = load_recipe(over(tmp_path, "training: {epochs: 2}\ncritic: {depth: 3}\nseed: 7\ntask: {noisy_operands: [1]}"))
    assert (recipe.training.iterations, recipe.training.epochs, recipe.seed, recipe.name) == (5, 2, 7, "small")
    assert (recipe.critic.width, recipe.critic.depth) == (32, 3)
    assert recipe.task.noisy_operands == (1,)  # a list replaces, and the bare name below it stays


def test_another_component_replaces_the_whole(tmp_path):
    assert load_recipe(over(tmp_path, "transport: {use: gae, gamma: 0.5}")).transport == GAE(gamma=0.5)  # lam: 0.9 is gone
    assert load_recipe(over(tmp_path, "transport: gae")).transport == GAE()
    assert load_recipe(over(tmp_path, "transport: {use: comp_gae, whiten: false}")).transport == CompGAE(lam=0.9, whiten=False)


def test_another_engine_keeps_what_all_engines_share(tmp_path):
    path = over(
        tmp_path, "seed: 1", SMALL.replace("generation: transformers", "generation: {use: transformers, temperature: 0.5}")
    )
    for change in ("generation.use=vllm", "generation=vllm", "generation={use: vllm, sleep: false}"):
        recipe = load_recipe(path, ["generation.max_new_tokens=9", change])
        assert (recipe.generation.use, recipe.generation.temperature, recipe.generation.max_new_tokens) == ("vllm", 0.5, 9)
    assert recipe.generation.sleep is False
    back = load_recipe(path, ["generation={use: vllm, sleep: false}", "generation.use=transformers"])
    assert back.generation.temperature == 0.5


def test_another_gate_replaces_the_gate_alone(tmp_path):
    recipe = load_recipe(over(tmp_path, "transport: {gate: {use: shuffle, of: {low: 0.5, use: attention}}}"))
    assert recipe.transport == CompGAE(lam=0.9, gate=ShuffleGate(of=AttentionGate(low=0.5)))


def test_null_removes_a_component(tmp_path):
    recipe = load_recipe(over(tmp_path, "critic:\ntransport: grpo"))
    assert recipe.critic is None and recipe.transport == GRPO()


def test_bases_have_bases(tmp_path):
    write(tmp_path, SMALL, "shared/deep/small.yaml")
    write(tmp_path, "base: deep/small.yaml\nseed: 1\ntraining: {epochs: 2}\n", "shared/middle.yaml")
    recipe = load_recipe(write(tmp_path, "base: shared/middle.yaml\ntraining: {epochs: 3}\n"))
    assert (recipe.seed, recipe.training.epochs, recipe.training.iterations) == (1, 3, 5)


def test_an_error_names_the_file_that_wrote_it(tmp_path):
    path = over(tmp_path, "seed: 1", SMALL.replace("iterations: 5", "iterations: 0"))
    assert the_problem(path).startswith(f"{tmp_path / 'small.yaml'}, line 9: training.iterations")
    path = over(tmp_path, "seed: 1\ntraining: {iterations: -1}", SMALL.replace("iterations: 5", "iterations: 0"))
    assert the_problem(path).startswith(f"{path}, line 3: training.iterations")


def test_bases_in_a_circle(tmp_path):
    write(tmp_path, "base: b.yaml\n", "a.yaml")
    write(tmp_path, "name: b\nbase: c.yaml\n", "b.yaml")
    write(tmp_path, "base: a.yaml\n", "c.yaml")
    found = the_problem(tmp_path / "a.yaml")
    assert "circle" in found and "a.yaml -> b.yaml -> c.yaml -> a.yaml" in found
    assert f"{tmp_path / 'c.yaml'}, line 1" in found


def test_a_recipe_that_is_its_own_base(tmp_path):
    assert "circle" in the_problem(write(tmp_path, "name: a\nbase: r.yaml\n"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: a\nbase: nope.yaml\n", ["line 2", "base", "nope.yaml", "no such file"]),
        ("base: .\n", ["line 1", "base"]),
        ("base: [a.yaml, b.yaml]\n", ["line 1", "base must name one YAML file", "['a.yaml', 'b.yaml']"]),
        ("base: {use: a}\n", ["line 1", "base must name one YAML file"]),
    ],
)
def test_bad_bases(tmp_path, text, says):
    found = the_problem(write(tmp_path, text))
    assert not [part for part in (str(tmp_path / "r.yaml"), *says) if part not in found], found


# --- files that are no recipe -----------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ["found nothing"]),
        ("# only a comment\n", ["found nothing"]),
        ("- a\n- b\n", ["mapping", "found list"]),
        ("hello\n", ["mapping", "found str"]),
        ("name: a\ntask: {use: x\n", ["line 3", "not YAML"]),
        ("name: a\n\ttask: b\n", ["line 2", "not YAML"]),
        ("name: a\n---\nname: b\n", ["line 2", "another document"]),
        ("name: !!python/name:os.system\n", ["line 1", "not YAML"]),
        ("? [a]\n: b\n", ["line 1", "not YAML"]),
        (b"name: a\0b\n", ["not YAML"]),
        (b"\xff\xfe\x00\x01", ["cannot be read"]),
        ("name: a\nseed: 1\nname: b\n", ["line 3", "'name' occurs twice"]),
        ("name: a\ntraining:\n  epochs: 1\n  epochs: 2\n", ["line 4", "'training.epochs' occurs twice"]),
        ("evidence:\n- use: a\n  use: b\n", ["line 3", "'evidence.0.use' occurs twice"]),
        ("name: a\nseed: 2024-13-45\n", ["line 2"]),  # YAML takes it for a date
        ("name: a\nseed: !!int x\n", ["line 2"]),
        ("name: a\ntask: &a {x: *a}\n", ["line 2"]),  # holds itself
    ],
)
def test_a_file_that_is_no_recipe(tmp_path, text, says):
    found = the_problem(write(tmp_path, text))
    assert not [part for part in (str(tmp_path / "r.yaml"), *says) if part not in found], found


def test_a_folder_is_no_recipe(tmp_path):
    assert "cannot be read" in the_problem(tmp_path)


def test_a_missing_recipe_guesses(tmp_path):
    write(tmp_path, SMALL, "compo.yaml")
    assert (
        the_problem(tmp_path / "comp.yaml")
        == f"{tmp_path / 'comp.yaml'}: no such file; did you mean {tmp_path / 'compo.yaml'}?"
    )
    assert the_problem(tmp_path / "zzzzzz.yaml") == f"{tmp_path / 'zzzzzz.yaml'}: no such file"
    assert "no such file" in the_problem(tmp_path / "nope" / "compo.yaml")


def test_keys_that_are_no_text_are_refused(tmp_path):
    for key in ("1", "1.5", "~", "on", "2024-01-01"):
        assert "no key is called" in the_problem(over(tmp_path, f"{key}: x"))


# --- what is wrong with a value ---------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        # unknown keys
        ("trainin: {epochs: 1}", "trainin", ["did you mean 'training'?", "there are: name, seed"]),
        ("training:\n  iteration: 1", "training.iteration", ["did you mean 'iterations'?", "there are: iterations, "]),
        ("training: {share_prefix: maybe}", "training.share_prefix", ["'auto', True or False", "found 'maybe'"]),
        ("critic: {widht: 3}", "critic.widht", ["did you mean 'width'?", "depth"]),
        ("evidence: [{use: exact_match, regex: x}]", "evidence.0.regex", ["no key is called 'regex'", "pattern"]),
        ("policy: {warm_start: {step: 1}}", "policy.warm_start.step", ["did you mean 'steps'?"]),
        (
            "transport: {gate: {use: shuffle, of: {use: attention, lo: 1}}}",
            "transport.gate.of.lo",
            ["did you mean 'low'?", "slope"],
        ),
        # unknown components
        (
            "transport: gea",
            "transport",
            ["no transport is called 'gea'", "did you mean 'gae'?", "there are: abc, "],
        ),
        ("transport: {use: gea, lam: 1}", "transport", ["no transport is called 'gea'", "did you mean 'gae'?"]),
        ("transport: {gate: {use: shuffel}}", "transport.gate", ["no gate is called 'shuffel'", "did you mean 'shuffle'?"]),
        ("evidence: [exact_match, exact]", "evidence.1", ["no evidence is called 'exact'", "there are: ", "exact_match"]),
        (
            "critic: none",
            "critic",
            ["no critic is called 'none'", "there are: group_level, group_mean, mini_critics, standard, tac, value_head"],
        ),
        ("task: {lam: 1, use:}", "task", ["a name or a mapping with the key 'use'", "chain_arithmetic, datasets"]),
        ("task: [chain_arithmetic]", "task", ["a name or a mapping with the key 'use'"]),
        ("geometry: 3", "geometry", ["a name or a mapping with the key 'use'", "ppo_clip"]),
        # wrong types
        ("seed: one", "seed", ["valid integer", "found 'one'", "The one seed"]),
        ("seed: 1.5", "seed", ["valid integer", "found 1.5"]),
        ("training: {epochs: [1]}", "training.epochs", ["valid integer", "found [1]", "Passes of the policy update"]),
        ("training: {iterations: true}", "training.iterations", ["found True"]),
        ("training: 3", "training", ["found 3"]),
        ("training:", "training", ["found None"]),
        ("name: 3", "name", ["valid string", "found 3", "Names the run's folder"]),
        ("evidence: exact_match", "evidence", ["valid list", "found 'exact_match'"]),
        ("evidence: {}", "evidence", ["valid list"]),
        ("transport: {whiten: maybe}", "transport.whiten", ["valid boolean", "found 'maybe'"]),
        ("transport: {gate: {half_life: [1]}}", "transport.gate.half_life.1", ["missing", "half-lives"]),
        ("task: {noisy_operands: [1, x]}", "task.noisy_operands.1", ["valid integer", "found 'x'"]),
        # out of bounds
        ("seed: -1", "seed", ["greater than or equal to 0", "found -1"]),
        ("training: {learning_rate: 0}", "training.learning_rate", ["greater than 0", "found 0", "AdamW, actor"]),
        ("training: {learning_rate: .nan}", "training.learning_rate", ["found nan"]),
        ("generation: {temperature: 0.0}", "generation.temperature", ["greater than 0", "Sampling temperature"]),
        ("transport: {lam: 1.01}", "transport.lam", ["less than or equal to 1", "found 1.01", "Trace decay"]),
        ("geometry: {aggregation: mean}", "geometry.aggregation", ["'token_mean', 'sequence_mean'", "found 'mean'"]),
        ("name: a/b", "name", ["pattern", "found 'a/b'"]),
        ("name: ''", "name", ["pattern"]),
        ("evidence: []", "evidence", ["at least 1", "What judges responses"]),
        ("evidence: [{use: exact_match, pattern: '('}]", "evidence.0.pattern", ["not a regular expression", "found '('"]),
        (
            "logging: {logger: wandbb}",
            "logging.logger.0.use",
            ["did you mean 'wandb'?", "found 'wandbb'"],
        ),
        # knobs that do not go together
        ("transport: {gate: {low: 1.0, high: 0.5}}", "transport.gate", ["low (1.0) must not exceed high (0.5)", "sign: -1"]),
        ("transport: {gate: constant}", "transport.gate", ["gamma", "set exactly one"]),
        (
            "training: {minibatch_size: 100}",
            "training",
            ["minibatch_size (100) must divide the 256 responses", "16 prompts x 16 responses"],
        ),
        ("training: {micro_batch_size: 3}", "training", ["micro_batch_size (3) must divide the 128 responses"]),
        ("training: {devices: 3}", "training", ["3 processes must divide minibatch_size (128)"]),
        ("policy: {heads: 5}", "policy", ["heads (5)", "kv_heads (3)"]),
    ],
)
def test_a_bad_value_has_file_line_key_finding_and_help(tmp_path, text, where, says):
    path = over(tmp_path, text)
    found = the_problem(path)
    line = 3 if "\n" in text else 2
    assert re.match(rf"{re.escape(str(path))}, line {line}: {re.escape(where)}[: ]", found), found
    assert not [part for part in says if part.lower() not in found.lower()], found


def test_a_union_is_one_problem_without_pydantics_names(tmp_path):
    found = the_problem(over(tmp_path, "transport: {gate: {layers: first}}"))
    assert "transport.gate.layers: " in found and "'last_half'" in found and "found 'first'" in found and "tuple[" not in found


def test_what_is_missing_is_named_with_its_purpose(tmp_path):
    found = problems(write(tmp_path, "name: a\ntask: {use: jsonl}\n"))
    missing = ["task.path", "task.held_out_path", "policy", "generation", "evidence", "transport", "geometry"]
    assert len(found) == len(missing)
    for key, problem in zip(missing, found, strict=True):
        assert problem.startswith(f"{tmp_path / 'r.yaml'}") and f"{key} is missing and has no default. " in problem
    assert "line 2" in found[0] and found[0].endswith("Training problems.")


def test_several_problems_are_reported_at_once(tmp_path):
    path = over(
        tmp_path,
        "seed: -1\ntraining: {epochs: 0, iterations: x}\ntransport: {gate: {lo: 1}}\n"
        "evidence: [exact, {use: exact_match, weight: x}]",
    )
    found = problems(path, "critic.widht=3")
    for place in (
        "line 2: seed",
        "line 3: training.epochs",
        "line 3: training.iterations",
        "line 4: transport.gate.lo",
        "line 5: evidence.0",
        "line 5: evidence.1.weight",
        "--set critic.widht=3: critic.widht",
    ):
        assert [problem for problem in found if place in problem], place
    assert len(found) == 7


def test_an_unknown_key_hides_no_other_problem(tmp_path):
    found = problems(over(tmp_path, "trainin: {}\nseed: -1\ntransport: {lambda: 1, lam: 2}"))
    assert sorted(re.search(r"line \d+: ([\w.]+)", problem)[1] for problem in found) == [
        "seed",
        "trainin",
        "transport.lam",
        "transport.lambda",
    ]


# --- parts that do not go together ------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("critic:", "small.yaml, line 7", ["'comp_gae' needs values", "critic: standard, critic: tac, critic: value_head"]),
        ("critic:\ntransport: gae", "r.yaml, line 3", ["'gae' needs values", "critic: tac"]),
        (
            "transport: grpo\ncritic:\ntraining: {responses_per_prompt: 1, minibatch_size: 16}",
            "r.yaml, line 2",
            ["'grpo' compares responses to one prompt", "training.responses_per_prompt to 2"],
        ),
        (
            "transport: {use: high_entropy, of: {use: grpo_pass_at_k, k: 8}}\ncritic:\n"
            "training: {responses_per_prompt: 8, minibatch_size: 8}",
            "r.yaml, line 2",
            ["transport.of: 'grpo_pass_at_k' needs at least 9 responses per prompt", "responses_per_prompt is 8"],
        ),
        (
            "task: {use: jsonl, path: a.jsonl, held_out_path: b.jsonl}\npolicy: {warm_start: {steps: 5}}",
            "line",
            ["'scratch' needs demonstrations", "task: chain_arithmetic", "or set policy.warm_start: null"],
        ),
        ("evidence: [{use: exact_match, weight: 0}]", "r.yaml, line 2", ["weight 0", "every reward is the same"]),
    ],
)
def test_parts_that_do_not_go_together(tmp_path, text, line, says):
    found = the_problem(over(tmp_path, text))
    assert not [part for part in says if part not in found], found
    assert line in found


def test_a_critic_that_nothing_reads_is_refused(tmp_path):
    found = the_problem(over(tmp_path, "transport: grpo"))
    assert "critic" in found and "null" in found and "grpo" in found


def test_a_warm_up_of_no_critic_is_refused(tmp_path):
    assert "critic_warmup" in the_problem(over(tmp_path, "training: {critic_warmup: 3}", NO_CRITIC))


def test_what_goes_together(tmp_path):
    path = over(tmp_path, "geometry: {kl_coef: 0.1}")
    assert load_recipe(path).providers("reference") == ["policy"]
    assert load_recipe(path).providers("values") == ["critic"]
    assert load_recipe(path, ["policy.warm_start={steps: 5}"]).providers("demonstrations") == ["task"]
    grpo = over(tmp_path, "", NO_CRITIC)
    assert load_recipe(grpo).providers("groups") == ["training.responses_per_prompt"]
    assert load_recipe(grpo).providers("values") == []


def test_parts_lists_nested_gates(tmp_path):
    recipe = load_recipe(over(tmp_path, "transport: {gate: shuffle}"))
    assert list(recipe.parts) == [
        "task",
        "policy",
        "generation",
        "evidence.0",
        "critic",
        "transport",
        "transport.gate",
        "transport.gate.of",
        "geometry",
    ]


def test_reward_bounds_add_up(tmp_path):
    recipe = load_recipe(
        over(tmp_path, "evidence: [{use: exact_match, weight: 2}, {use: exact_match, weight: -0.5, pattern: x}]")
    )
    assert recipe.reward_bounds == (-0.5, 2.0)


# --- --set ------------------------------------------------------------------------------------
def test_set_changes_nested_keys_and_the_last_one_counts(tmp_path):
    path = over(tmp_path, "seed: 3")
    recipe = load_recipe(
        path, ["training.iterations=8", "seed=4", "seed=5", "transport.gate.low=0.5", "training.learning_rate=1e-3"]
    )
    assert (recipe.training.iterations, recipe.seed, recipe.transport.gate.low, recipe.training.learning_rate) == (
        8,
        5,
        0.5,
        1e-3,
    )
    assert recipe.transport.lam == 0.9


def test_set_reaches_into_lists(tmp_path):
    path = over(tmp_path, "evidence: [exact_match, {use: exact_match, pattern: x}]\ntask: {noisy_operands: [1, 2]}")
    recipe = load_recipe(path, ["evidence.1.weight=2", "evidence.0.ignore_case=true", "task.noisy_operands.1=9"])
    assert [part.weight for part in recipe.evidence] == [1.0, 2.0] and recipe.evidence[1].pattern == "x"
    assert recipe.evidence[0].ignore_case and recipe.task.noisy_operands == (1, 9)


def test_set_replaces_a_component(tmp_path):
    path = over(tmp_path, "")
    assert load_recipe(path, ["transport=gae"]).transport == GAE()
    assert load_recipe(path, ["transport.use=gae"]).transport == GAE()
    assert load_recipe(path, ["transport={use: gae, lam: 0.5}"]).transport == GAE(lam=0.5)
    assert load_recipe(path, ["transport.gate.use=shuffle"]).transport == CompGAE(lam=0.9, gate=ShuffleGate())
    assert load_recipe(path, ["critic=", "transport=grpo"]).critic is None


def test_set_over_a_bare_name_keeps_it(tmp_path):
    path = over(tmp_path, "transport: gae")
    assert load_recipe(path, ["transport.lam=0.5", "transport.gap=cut"]).transport == GAE(lam=0.5, gap="cut")


def test_a_set_value_may_hold_an_equals_sign(tmp_path):
    assert load_recipe(over(tmp_path, ""), ["evidence.0.pattern='a=(.)'"]).evidence[0].pattern == "a=(.)"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("training.iterations", ["expected a.b=value", "for example"]),
        ("=3", ["expected a.b=value"]),
        ("training..iterations=3", ["expected a.b=value"]),
        ("training.iterations.=3", ["expected a.b=value"]),
        ("training.iterations=[1", ["not YAML"]),
        ("training.iterations=2024-13-45", []),
        ("training.iterations=x", ["training.iterations: ", "valid integer", "found 'x'", "Iterations of sampling"]),
        ("training.iterations=", ["training.iterations: ", "found None"]),
        ("training.iteration=3", ["training.iteration: ", "did you mean 'iterations'?"]),
        ("trainin.iterations=3", ["trainin: ", "did you mean 'training'?"]),
        ("transport=gea", ["transport: ", "did you mean 'gae'?"]),
        ("transport.lamb=1", ["transport.lamb: ", "did you mean 'lam'?"]),
        ("transport.gate.of.low=1", ["transport.gate.of: ", "no key is called 'of'"]),
        ("evidence.1=exact_match", ["evidence has 1 entries; there is no number 1"]),
        ("evidence.7.weight=2", ["evidence has 1 entries; there is no number 7"]),
        ("evidence.-1.weight=2", ["evidence: ", "valid list"]),
        ("evidence.²=exact_match", ["evidence"]),
        ("evidence.0.wight=2", ["evidence.0.wight: ", "did you mean 'weight'?"]),
        ("evidence.00.wight=2", ["wight"]),
        ("evidence={}", ["evidence: ", "valid list"]),
        ("name.x=3", ["name: ", "valid string"]),
        ("policy.0=3", ["policy.0: ", "no key is called '0'"]),
        ("plugins=./mine.py", ["plugins must be a list", "'./mine.py'"]),
        ("plugins=0", ["plugins must be a list", "0"]),
        ("plugins=[./mine.py]", ["plug-in ./mine.py not found at"]),
        ("plugins=[3]", ["path or module name", "3"]),
        ("plugins=[{path: a.py, sha: x}]", ["sha"]),
        ("plugins=[no_such_module_of_cct]", ["no_such_module_of_cct"]),
    ],
)
def test_a_bad_set_is_quoted(tmp_path, text, says):
    found = the_problem(over(tmp_path, ""), text)
    assert found.startswith(f"--set {text}: "), found
    assert not [part for part in says if part not in found], found


def test_a_pairing_that_a_set_broke_is_found(tmp_path):
    assert "'comp_gae' needs values" in the_problem(over(tmp_path, ""), "critic=")


@pytest.mark.parametrize("key", ["transport.gate", "evidence.0"])
def test_a_set_mapping_is_quoted_for_the_keys_in_it(tmp_path, key):
    path = over(tmp_path, "evidence: [{use: exact_match, weight: 1}]\ntransport: {gate: {use: attention, slope: 1}}")
    text = f"{key}={{{'slope: x' if key == 'transport.gate' else 'weight: x'}}}"
    assert the_problem(path, text).startswith(f"--set {text}: {key}.")


# --- plug-ins (that register something: see test_cli.py, in processes of their own) ------------
def test_a_plugin_file_is_relative_to_the_recipe_that_names_it(tmp_path):
    write(tmp_path, "", "shared/parts/empty.py")
    write(tmp_path, SMALL + "plugins: [./parts/empty.py]\n", "shared/small.yaml")
    (plugin,) = load_recipe(write(tmp_path, "base: ../shared/small.yaml\n", "mine/r.yaml")).plugins
    assert plugin.path == str(tmp_path / "shared/parts/empty.py")
    assert plugin.sha256 == sha256(b"").hexdigest()


def test_a_dump_pins_its_plugins(tmp_path):
    write(tmp_path, "x = 1\n", "mine.py")
    recipe = load_recipe(over(tmp_path, "plugins: [./mine.py]"))
    dumped = write(tmp_path, dump_recipe(recipe), "elsewhere/recipe.yaml")
    assert load_recipe(dumped) == recipe
    write(tmp_path, "x = 2\n", "mine.py")
    found = the_problem(dumped)
    assert (
        found.startswith(f"{dumped}, line ") and "mine.py has changed" in found and sha256(b"x = 1\n").hexdigest()[:12] in found
    )
    assert "remove `sha256`" in found


def test_a_changed_plugin_is_not_run(tmp_path):
    write(tmp_path, "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n", "mine.py")
    assert "has changed" in the_problem(over(tmp_path, "plugins: [{path: ./mine.py, sha256: abc}]"))
    assert not (tmp_path / "mine.ran").exists()


@pytest.mark.parametrize(
    ("plugins", "says"),
    [
        ("[./nope.py]", ["plug-in", "nope.py not found at"]),
        ("./nope.py", ["plugins must be a list", "'./nope.py'"]),
        ("{path: nope.py}", ["plugins must be a list"]),
        ("[[a]]", ["path or module name", "['a']"]),
        ("[./nope]", ["./nope"]),
        ("['']", ["plug-in"]),
    ],
)
def test_bad_plugins(tmp_path, plugins, says):
    path = over(tmp_path, f"plugins: {plugins}")
    found = the_problem(path)
    assert found.startswith(f"{path}, line 2: ") and not [part for part in says if part not in found], found


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise RuntimeError('boom')", RuntimeError),
        ("import no_such_module_of_cct", ModuleNotFoundError),
        ("open('/no/such/file')", FileNotFoundError),
        ("def (", SyntaxError),
    ],
)
def test_an_error_of_a_plugin_passes_with_the_recipes_line(tmp_path, code, error):
    write(tmp_path, f"{code}\n", "mine.py")
    path = over(tmp_path, "plugins: [./mine.py]")
    with pytest.raises(error) as caught:
        load_recipe(path)
    assert [
        note for note in caught.value.__notes__ if note.startswith(f"{path}, line 2: ") and "mine.py failed to import" in note
    ]


@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "raise SystemExit", "raise GeneratorExit", "exit()"])
def test_a_plugin_that_leaves_is_named(tmp_path, code):
    write(tmp_path, f"x = 1\n{code}\n", "mine.py")
    path = over(tmp_path, "plugins: [./mine.py]")
    found = the_problem(path)
    assert found.startswith(f"{path}, line 2: plug-in {tmp_path / 'mine.py'} failed to import: ") and "mine.py:2" in found


LEAVES = """
import sys
from pydantic import field_validator
from cct.evidence import Evidence, evidences

@evidences.register("leaves_in_its_check")
class Leaves(Evidence):
    "Leaves."
    knob: int = 1

    @field_validator("knob")
    @classmethod
    def _leaves(cls, knob):
        sys.exit(0)
"""


def test_a_plugin_that_leaves_in_a_check_of_its_knobs_is_named(tmp_path):
    write(tmp_path, LEAVES, "leaves.py")
    try:
        found = the_problem(over(tmp_path, "plugins: [./leaves.py]\nevidence: [{use: leaves_in_its_check}]"))
    finally:
        del evidences._classes["leaves_in_its_check"]
    assert "SystemExit: 0" in found and "leaves.py:14" in found


def test_a_plugin_that_changes_the_folder_does_not(tmp_path):
    write(tmp_path, "import os\nos.chdir('/')\n", "moves.py")
    before = Path.cwd()
    load_recipe(over(tmp_path, "plugins: [./moves.py]"))
    assert Path.cwd() == before


# --- values of another kind -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("seed: true", "seed", "valid integer (found True)"),
        ("seed: '3'", "seed", "valid integer (found '3')"),
        ("seed: 3.0", "seed", "valid integer (found 3.0)"),
        ("name: 3", "name", "valid string"),
        ("task: {noisy_operands: [true, yes]}", "task.noisy_operands.0", "valid integer (found True)"),
        ("task: {noise: yes}", "task.noise", "valid number (found True)"),
        ("training: {learning_rate: '1e-4'}", "training.learning_rate", "valid number"),
        ("training: {bootstrap_truncated: 'yes'}", "training.bootstrap_truncated", "valid boolean"),
        ("training: {bootstrap_truncated: 1}", "training.bootstrap_truncated", "valid boolean"),
        ("transport: {use: comp_gae, gate: {use: entropy, sign: true}}", "transport.gate.sign", "1 or -1 (found True)"),
        ("transport: {use: comp_gae, gate: {use: entropy, sign: 1.0}}", "transport.gate.sign", "1 or -1 (found 1.0)"),
    ],
)
def test_no_value_is_turned_into_another_kind(tmp_path, text, where, says):
    found = problems(over(tmp_path, text))[0]
    assert f", line 2: {where}: input should be " in found and says in found, found


def test_an_exponent_alone_makes_a_number(tmp_path):
    path = over(tmp_path, "training: {learning_rate: 1e-4}")
    training = load_recipe(path, ["training.weight_decay=1E-2", "training.gradient_clip=2"]).training
    assert (training.learning_rate, training.weight_decay, training.gradient_clip) == (1e-4, 0.01, 2.0)


@pytest.mark.parametrize("name", ["1e5", "yes", "1.5", "0x1f", "2024-01-01", "012"])
def test_a_name_that_looks_like_a_value_is_read_back(tmp_path, name):
    recipe = load_recipe(over(tmp_path, f"name: '{name}'"))
    assert load_recipe(write(tmp_path, dump_recipe(recipe), "again.yaml")) == recipe


def test_a_merge_key_lays_over(tmp_path):
    path = over(tmp_path, "evidence:\n- &one {use: exact_match, weight: 2}\n- {<<: *one, ignore_case: true, weight: 3}")
    assert [part.weight for part in load_recipe(path).evidence] == [2.0, 3.0]


# --- prompts ----------------------------------------------------------------------------------
def test_a_critic_s_warm_up_does_not_shift_the_prompts_of_training():
    small = ["training.prompts_per_iteration=2", "training.minibatch_size=32"]
    without, with_one = load_recipe(RECIPES / "grpo.yaml", small), load_recipe(RECIPES / "gae.yaml", small)
    assert (without.training.critic_warmup, with_one.training.critic_warmup) == (0, 6)
    assert without.prompts(1, 3) == with_one.prompts(1, 3) == without.task.prompts(0, 0, 6)
    warmup = with_one.prompts(-5, 0)
    assert len(warmup) == 12 and not {p.text for p in warmup} & {p.text for p in with_one.prompts(1, 30)}
    whole = with_one.prompts(-5, 30)
    assert whole == warmup + with_one.prompts(1, 30)
    assert whole == [prompt for n in range(-5, 31) for prompt in with_one.prompts(n, n)]
