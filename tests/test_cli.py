"""The command line: what each verb prints, exit codes, plug-ins that register, and that help and checks stay light.

In this process where none of its own is needed; plug-ins that register something get one, so that they
do not stay in the registries of other tests.
"""

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from cct import __version__
from cct.cli import AXES, main
from cct.loading import json_schema, load_recipe
from cct.registry import REGISTRIES

ROOT = Path(__file__).parents[1]
RECIPES = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "studies")
COMPO, GRPO = ROOT / "recipes" / "compo.yaml", ROOT / "recipes" / "grpo.yaml"

HALF_LIFE = '''
from cct.rollout import Credit
from cct.transport import Transport, transports

@transports.register("half_life")
class HalfLife(Transport):
    """Outcome credit halves every `tokens` tokens before the end."""
    tokens: float = 64.0
    """Distance over which credit halves."""
    def __call__(self, rollout):
        return Credit(rollout.rewards)
'''
USES_HALF_LIFE = f"""\
base: {ROOT / "recipes/base/chain_arithmetic.yaml"}
name: mine
plugins: [PLUGIN]
transport: {{use: half_life, tokens: 128}}
"""


def python(*arguments: str, folder: Path = ROOT, path: Path | None = None, timeout: int = 100) -> subprocess.CompletedProcess:
    """A fresh Python, with `path` first on its module path."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, [*([path] if path else []), ROOT])),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=environment, timeout=timeout
    )


def cct_process(*arguments: str, folder: Path = ROOT, path: Path | None = None) -> subprocess.CompletedProcess:
    return python("-m", "cct.cli", *arguments, folder=folder, path=path)


def leaves(argv: list[str], capsys) -> tuple[int, str, str]:
    """Exit code, output and errors of a command line; no other exception may come out of it."""
    try:
        code = main(argv)
    except SystemExit as stop:
        code = stop.code
    output, errors = capsys.readouterr()
    assert "Traceback" not in errors
    return code, output, errors


# --- light ------------------------------------------------------------------------------------
LIGHT = """
import contextlib, io, sys
from cct.cli import main
for argv in {argvs}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        assert main(argv) == 0, argv
print([name for name in ("torch", "transformers", "lightning", "numpy", "pydantic") if name in sys.modules])
"""


def test_help_imports_nothing_heavy():
    assert python("-c", LIGHT.format(argvs=[["--help"], ["run", "--help"], ["--version"]])).stdout.strip() == "[]"


def test_checks_and_lists_import_neither_torch_nor_transformers_nor_lightning():
    argvs = [
        ["check", *map(str, (COMPO, GRPO))],
        ["ls"],
        ["ls", "gate"],
        ["ls", "--markdown"],
        ["schema"],
        ["run", str(COMPO), "--dry-run"],
    ]
    done = python("-c", LIGHT.format(argvs=argvs))
    assert done.stdout.strip() == "['pydantic']", done.stderr


def test_version(capsys):
    assert leaves(["--version"], capsys)[:2] == (0, f"cct {__version__}\n")


# --- check, and what bad input gives ----------------------------------------------------------
def test_check_says_ok_for_each(capsys):
    code, output, errors = leaves(["check", str(COMPO), str(GRPO)], capsys)
    assert (code, errors) == (0, "")
    assert output.splitlines() == [f"{COMPO}: ok (compo: comp_gae, critic tac)", f"{GRPO}: ok (grpo: grpo, critic none)"]


def test_check_goes_on_after_a_bad_recipe(capsys, tmp_path):
    (tmp_path / "bad.yaml").write_text("nmae: a\nseed: -1\n")
    code, output, errors = leaves(["check", str(tmp_path / "bad.yaml"), str(COMPO), str(tmp_path / "none.yaml")], capsys)
    assert code == 2 and f"{COMPO}: ok" in output
    assert "did you mean 'name'?" in errors and "none.yaml: no such file" in errors
    assert all(line.startswith("error: ") for line in errors.splitlines())


def test_check_lays_set_over_every_recipe(capsys):
    assert leaves(["check", str(COMPO), str(GRPO), "--set", "seed=-1"], capsys)[2].count("error: --set seed=-1: seed: ") == 2


def test_check_warns_where_no_response_could_be_right(capsys, tmp_path):
    for name, problem in (("train", "1+1="), ("test", "2+1=")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": problem, "answer": "3"}) + "\n")
    task = f"task={{use: jsonl, path: {tmp_path}/train.jsonl, held_out_path: {tmp_path}/test.jsonl}}"
    argv = ["check", str(GRPO), "--set", task, "--set", "policy.warm_start="]
    code, _, errors = leaves(argv, capsys)
    assert code == 0 and errors.startswith(
        f"warning: {GRPO}: evidence.0: by default 'exact_match' looks for the answer after a '#'"
    )
    for remedy in (r"evidence.0.pattern=(\S+)$", "policy.alphabet=0123+=#"):
        assert leaves([*argv, "--set", remedy], capsys)[::2] == (0, "")


JSONL = "task={use: jsonl, path: PATH, held_out_path: PATH}"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "usage"),
        (["fly"], "invalid choice: 'fly'"),
        (["check"], "required: recipe"),
        (["check", "nope.yaml"], "nope.yaml: no such file"),
        (["check", "recipes/comp.yaml"], "did you mean recipes/compo.yaml?"),
        (["check", "recipes"], "recipes: cannot be read"),
        (["check", "README.md"], "README.md"),
        (["check", "COMPO", "--set", "training"], "--set training: expected a.b=value"),
        (["check", "COMPO", "--set", "training.iteration=3"], "did you mean 'iterations'?"),
        (["check", "COMPO", "--set", "training.iterations=0"], "greater than or equal to 1"),
        (["check", "COMPO", "--set", "transport=gea"], "did you mean 'gae'?"),
        (["check", "COMPO", "--set", "critic="], "needs values"),
        (["check", "COMPO", "--set", "plugins=[./nope.py]"], "plug-in ./nope.py not found"),
        (
            ["check", "COMPO", "--set", "policy.warm_start=", "--set", JSONL.replace("PATH", "nope.jsonl")],
            "nope.jsonl does not exist",
        ),
        (["check", "COMPO", "--set", "policy.warm_start=", "--set", JSONL.replace("PATH", "/dev/null")], "/dev/null"),
        (
            ["check", "COMPO", "--set", "policy.warm_start=", "--set", JSONL.replace("PATH", "pyproject.toml")],
            "pyproject.toml:1: not JSON",
        ),
        (["run"], "cct run needs a recipe, for example"),
        (["run", "nope.yaml"], "nope.yaml: no such file"),
        (["run", "COMPO", "--dry-run", "--set", "seed=x"], "--set seed=x: seed: "),
        (["run", "--resume", "nope", "--dry-run"], "nope"),
        (["run", "COMPO", "--resume", "nope", "--dry-run"], "nope"),
        (["explain", "nope.yaml"], "nope.yaml: no such file"),
        (["schema", "nope.yaml"], "nope.yaml: no such file"),
        (["ls", "gates"], "did you mean 'gate'?"),
        (["ls", "grpo"], "'grpo' is listed by cct ls transport"),
        (["check", "COMPO", "--set", "evidence=exact_match"], "for example [exact_match] (found 'exact_match')"),
        (["new", "gate", "mine"], "invalid choice: 'gate'"),
        (["eval"], "required: run"),
    ],
)
def test_bad_input_ends_with_2_and_one_message(capsys, argv, says):
    with contextlib.chdir(ROOT):
        code, _, errors = leaves([str(COMPO) if word == "COMPO" else word for word in argv], capsys)
    assert code == 2 and says in errors, errors


def test_a_process_ends_with_2_without_a_traceback():
    done = cct_process("check", "recipes/compo.yaml", "--set", "seed=x")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: --set seed=x: seed: input should be a valid integer (found 'x'). " + (
        "The one seed: weights, problems, sampling and shuffling derive from it.\n"
    )


def test_a_reader_that_stops_reading_is_no_error():
    command = f"{sys.executable} -m cct.cli schema | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.stdout and "Traceback" not in done.stderr


def test_dry_run_says_what_would_run_and_makes_nothing(capsys, tmp_path):
    code, output, _ = leaves(
        ["run", str(COMPO), "--dry-run", "--runs", str(tmp_path / "runs"), "--set", "training.iterations=3"], capsys
    )
    assert code == 0 and list(tmp_path.iterdir()) == []
    for part in (
        "compo: 3 iterations of 16 x 16 responses",
        "critic tac",
        "transport comp_gae",
        "geometry ppo_clip",
        str(tmp_path / "runs" / "compo"),
    ):
        assert part in output


@pytest.mark.parametrize(
    "argv", [["eval", "FOLDER"], ["run", "--resume", "FOLDER"], ["eval", "FOLDER/none"], ["run", "--resume", "FOLDER/none"]]
)
def test_a_folder_that_is_no_run(capsys, tmp_path, argv):
    folder = argv[-1].replace("FOLDER", str(tmp_path))
    code, _, errors = leaves([*argv[:-1], folder], capsys)
    assert code == 2 and errors.startswith(f"error: {folder}: ") and errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# --- ls ---------------------------------------------------------------------------------------
def test_ls_prints_each_components_first_line(capsys):
    code, output, _ = leaves(["ls"], capsys)
    lines = output.splitlines()
    assert len({re.match(r"  \w+ +", line).end() for line in lines if line.startswith(" ")}) == 1  # one column
    assert code == 0 and [line for line in lines if not line.startswith(" ")] == list(AXES) and set(AXES) == set(REGISTRIES)
    shown = [line.split(maxsplit=1) for line in lines if line.startswith(" ")]
    assert shown == [
        [name, REGISTRIES[axis][name].__doc__.strip().split("\n")[0]] for axis in AXES for name in REGISTRIES[axis].names()
    ]


@pytest.mark.parametrize("axis", AXES)
def test_ls_of_an_axis_prints_its_knobs(capsys, axis):
    code, output, _ = leaves(["ls", axis], capsys)
    assert code == 0
    lines = [line.strip() for line in output.splitlines()]
    for name in REGISTRIES[axis].names():
        cls = REGISTRIES[axis][name]
        at = [i for i, line in enumerate(lines) if re.match(rf"{name} +{re.escape(cls.summary())}$", line)]
        assert len(at) == 1
        for offset, (knob, field) in enumerate(cls.model_fields.items(), 1):
            line = lines[at[0] + offset]
            assert line.startswith(f"{knob} = ") and line.endswith(" ".join(field.description.split()))


def test_ls_shows_defaults(capsys):
    output = leaves(["ls", "transport"], capsys)[1]
    assert re.search(r"lam = 1\.0 +Trace decay of the advantage", output) and "gate = {use: attention}" in output
    assert re.search(r"separator = '\\n' +A token", output)  # on one line
    assert "like = null " in output and "whiten = true " in output
    assert "parts = [{use: attention}, {use: entropy}] " in leaves(["ls", "gate"], capsys)[1]
    assert re.search(r"path = required +Training problems", leaves(["ls", "task"], capsys)[1])


# --- explain ----------------------------------------------------------------------------------
def test_explain_prints_sources_needs_and_sizes(capsys):
    code, output, _ = leaves(["explain", str(COMPO), "--set", "seed=5"], capsys)
    assert code == 0
    recipe = load_recipe(COMPO, ["seed=5"])
    assert yaml.safe_load(output) == recipe.model_dump(mode="json")  # the rest is comments
    places = dict(re.findall(r"^# ([\w.]+): \w+  \((.+:\d+)\)$", output, re.M))
    assert list(places) == list(recipe.parts)
    for place, part in recipe.parts.items():
        file, line = places[place].rsplit(":", 1)
        near = (ROOT / file).read_text().splitlines()[int(line) - 1 : int(line) + 2]
        assert [text for text in near if text.startswith(f"class {type(part).__name__}(")]
    transport = output[output.index("# transport: comp_gae") : output.index("# transport.gate: ")]
    assert "needs attention, provided by policy\n" in transport and "needs values, provided by critic\n" in transport
    assert "needs demonstrations, provided by task\n" in output
    characters, width, inner, layers = 3 + len("0123456789+-=;#"), 96, 256, 4
    per_layer = 4 * width * width + 2 * (width // 3) + 3 * width * inner + 2 * width  # attention, its norms, MLP, norms
    assert f"# actor: {characters * width + layers * per_layer + width:,} parameters\n" in output
    assert re.search(r"^# critic \(tac\): [1-9][\d,]* parameters$", output, re.M)


CHUNKED = """
from cct.policy import policies

@policies.register("chunked")
class Chunked(policies["scratch"]):
    'A Qwen3 that says its last layer attends in chunks.'
    def config(self, *, alphabet):
        config = super().config(alphabet=alphabet)
        config.layer_types = ["full_attention"] * (self.layers - 1) + ["chunked_attention"]
        return config
"""


def test_explain_and_check_say_whether_prompts_are_shared(capsys, tmp_path):
    said = "# training.share_prefix: on where it leaves at most 75% of a forward's tokens\n"
    assert said in leaves(["explain", str(GRPO)], capsys)[1]
    assert "# training.share_prefix: off\n" in leaves(["explain", str(GRPO), "--set", "training.share_prefix=false"], capsys)[1]
    (tmp_path / "chunked.py").write_text(CHUNKED)
    sets = ["--set", f"plugins=[{tmp_path / 'chunked.py'}]", "--set", "policy={use: chunked, layers: 2}"]
    reason = "cannot share prompts: it has layers of chunked_attention"
    assert f"off, as the policy {reason}" in leaves(["explain", str(GRPO), *sets], capsys)[1]
    code, output, _ = leaves(["check", "--deep", str(GRPO), *sets], capsys)
    assert code == 0 and f"training.share_prefix: the policy {reason}" in output
    sets += ["--set", "training.share_prefix=true"]
    assert f"refused, as the policy {reason}" in leaves(["explain", str(GRPO), *sets], capsys)[1]
    code, _, errors = leaves(["check", "--deep", str(GRPO), *sets], capsys)
    assert code == 2 and f"training.share_prefix: the policy {reason}" in errors


def test_explain_of_a_critic_free_recipe_has_no_critic(capsys):
    output = leaves(["explain", str(GRPO)], capsys)[1]
    assert "needs groups, provided by training.responses_per_prompt" in output and "# critic" not in output


def test_explain_of_a_model_that_is_not_there(capsys, tmp_path):
    argv = ["explain", str(GRPO), "--set", f"policy={{use: pretrained, path: {tmp_path}}}"]
    code, _, errors = leaves(argv, capsys)
    assert code == 2 and str(tmp_path) in errors


# --- schema -----------------------------------------------------------------------------------
def test_schema_prints_a_json_schema(capsys):
    code, output, _ = leaves(["schema"], capsys)
    assert code == 0
    schema = json.loads(output)
    Draft202012Validator.check_schema(schema)
    assert schema == json_schema()
    assert {"task", "gate", "transport", "Training"} <= set(schema["$defs"])
    assert "Iterations of sampling" in output and "Trace decay of the advantage" in output


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_schema_takes_every_shipped_recipe(path):
    assert [error.message for error in Draft202012Validator(json_schema()).iter_errors(yaml.safe_load(path.read_text()))] == []


@pytest.mark.parametrize(
    "change",
    [
        "nmae: a",
        "training: {iteration: 3}",
        "training: {iterations: 0}",
        "training: {iterations: many}",
        "critic: {use: tac, widht: 3}",
        "critic: tca",
        "transport: {use: comp_gae, lamb: 1}",
        "transport: {use: comp_gae, lam: 2}",
        "transport: {use: gae, gate: attention}",
        "transport: {use: comp_gae, gate: {use: shuffle, of: {use: attention, lo: 1}}}",
        "transport: {use: comp_gae, gate: tac}",
        "evidence: exact_match",
        "evidence: []",
        "evidence: [exact]",
        "policy: {use: scratch, warm_start: {step: 3}}",
        "plugins: [{file: a.py}]",
        "name: a/b",
        "base: [a]",
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(change):
    written = {"base": "x.yaml", "name": "a", "transport": "grpo"}
    validator = Draft202012Validator(json_schema())
    assert validator.is_valid(written)
    assert not validator.is_valid(written | yaml.safe_load(change))


@pytest.mark.parametrize(
    "change",
    [
        "critic:",
        "critic: {use: tac}",
        "evidence: [exact_match, {use: exact_match, weight: 2}]",
        "plugins: [./a.py, {path: b, sha256: c}]",
        "transport: {use: comp_gae, gate: {use: constant, of: {use: shuffle, of: attention}}}",
        "training: {micro_batch_size: null}",
        "transport: {lam: 0.5}",
        "task: {use: jsonl, path: a, held_out_path: b}",
        "transport: {use: comp_gae, gate: {half_life: [8, 64]}}",
    ],
)
def test_the_schema_takes_what_the_loader_takes(change):
    written = {"base": "x.yaml", "name": "a"} | yaml.safe_load(change)
    assert [error.message for error in Draft202012Validator(json_schema()).iter_errors(written)] == []


# --- plug-ins ---------------------------------------------------------------------------------
def test_a_plugin_file_is_imported_before_the_recipe_is_judged(tmp_path):
    (tmp_path / "half_life.py").write_text(HALF_LIFE)
    (tmp_path / "mine.yaml").write_text(USES_HALF_LIFE.replace("PLUGIN", "./half_life.py"))
    code = f"""
from cct.cli import main
path = {str(tmp_path / "mine.yaml")!r}
assert main(["check", path]) == 0
assert main(["check", path, "--set", "transport.token=1"]) == 2
assert main(["schema", path]) == 0
assert main(["ls", "transport"]) == 0
"""
    done = python("-c", code, folder=tmp_path.parent)
    assert done.returncode == 0, done.stderr
    assert "mine.yaml: ok (mine: half_life, critic none)" in done.stdout
    assert "transport.token: no key is called 'token' (did you mean 'tokens'?)" in done.stderr
    assert '"const": "half_life"' in done.stdout  # in the schema
    assert re.search(r"  half_life +Outcome credit halves every `tokens` tokens", done.stdout)  # in the list
    assert re.search(r"tokens = 64\.0 +Distance over which credit halves\.", done.stdout)


def test_an_installed_module_is_a_plugin(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "half_life.py").write_text(HALF_LIFE)
    (tmp_path / "mine.yaml").write_text(USES_HALF_LIFE.replace("PLUGIN", "package.half_life"))
    done = cct_process("check", str(tmp_path / "mine.yaml"), path=tmp_path)
    assert done.returncode == 0 and "half_life" in done.stdout, done.stderr


def distribution(folder: Path, code: str) -> Path:
    """A folder for the module path that holds an installed package with an entry point."""
    (folder / "half_life_package.py").write_text(code)
    info = folder / "half_life_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: half-life-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cct.transport]\nhalf_life = half_life_package:HalfLife\n")
    return folder


def test_an_entry_point_is_a_plugin(tmp_path):
    (tmp_path / "mine.yaml").write_text(USES_HALF_LIFE.replace("PLUGIN", ""))
    installed = distribution(tmp_path, HALF_LIFE)
    for argv, says in (
        (["check", str(tmp_path / "mine.yaml")], "ok (mine: half_life"),
        (["ls", "transport"], "  half_life  "),
        (["schema"], '"const": "half_life"'),
    ):
        done = cct_process(*argv, path=installed)
        assert done.returncode == 0 and says in done.stdout, (argv, done.stderr)


def test_a_broken_entry_point_names_its_package(tmp_path):
    done = cct_process("ls", path=distribution(tmp_path, "raise RuntimeError('boom')\n"))
    assert done.returncode != 0 and "RuntimeError: boom" in done.stderr and "half-life-package" in done.stderr


def test_an_error_in_a_plugin_shows_its_traceback_and_the_recipes_line(tmp_path):
    (tmp_path / "broken.py").write_text("import math\n\nmath.sqrt(-1)\n")
    (tmp_path / "mine.yaml").write_text(USES_HALF_LIFE.replace("PLUGIN", "./broken.py"))
    done = cct_process("check", str(tmp_path / "mine.yaml"))
    assert done.returncode not in (0, 2)
    assert f'File "{tmp_path / "broken.py"}", line 3' in done.stderr and "ValueError: " in done.stderr
    assert f"{tmp_path / 'mine.yaml'}, line 3: plug-in {tmp_path / 'broken.py'} failed to import" in done.stderr


def test_a_plugin_that_takes_a_name_is_told_where_the_name_is(tmp_path):
    (tmp_path / "again.py").write_text(HALF_LIFE.replace('"half_life"', '"gae"'))
    (tmp_path / "mine.yaml").write_text(USES_HALF_LIFE.replace("PLUGIN", "./again.py"))
    done = cct_process("check", str(tmp_path / "mine.yaml"))
    assert re.search(r"transport 'gae' is already registered at .*gae\.py:\d+; choose another name", done.stderr)


def test_a_plugin_imported_by_hand_as_well_is_one_plugin(tmp_path):
    (tmp_path / "half_life.py").write_text(HALF_LIFE)
    (tmp_path / "mine.yaml").write_text(USES_HALF_LIFE.replace("PLUGIN", "./half_life.py"))
    path = str(tmp_path / "mine.yaml")
    code = f"""
import half_life
from cct.loading import load_recipe
assert isinstance(load_recipe({path!r}).transport, half_life.HalfLife)
"""
    done = python("-c", code, path=tmp_path)
    assert done.returncode == 0, done.stderr


# --- new --------------------------------------------------------------------------------------
@pytest.mark.parametrize(("axis", "says"), [("transport", "my_decay, critic none"), ("statistic", "comp_gae, critic tac")])
def test_new_writes_three_files_that_work(capsys, tmp_path, axis, says):
    with contextlib.chdir(tmp_path):
        code, output, _ = leaves(["new", axis, "my_decay"], capsys)
    names = ["my_decay.py", "my_decay.yaml", "test_my_decay.py"]
    assert code == 0 and sorted(path.name for path in tmp_path.iterdir()) == names
    assert all(name in output for name in names)
    assert cct_process("check", "my_decay.yaml", folder=tmp_path).stdout == f"my_decay.yaml: ok (my_decay: {says})\n"
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", ".", folder=tmp_path)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout


def test_new_never_overwrites(capsys, tmp_path):
    (tmp_path / "test_mine.py").write_text("precious")
    with contextlib.chdir(tmp_path):
        code, _, errors = leaves(["new", "transport", "mine"], capsys)
        assert code == 2 and "test_mine.py exists already; nothing was written" in errors
        assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]
        assert leaves(["new", "transport", "yours"], capsys)[0] == 0
        (tmp_path / "yours.py").write_text("precious")
        code, _, errors = leaves(["new", "transport", "yours"], capsys)
    assert code == 2 and "yours.py exists already; nothing was written" in errors
    assert (tmp_path / "yours.py").read_text() == "precious"


@pytest.mark.parametrize(
    "name",
    [
        "1x",
        "a-b",
        "a.b",
        "a b",
        "",
        "../x",
        "class",
        "gae",
        "_x",
        "ünï",  # no name of a recipe
        "yes",
        "null",
        "on",  # YAML reads no text there
        "torch",
        "pydantic",
        "json",  # would stand in the way of the real one
        "test_x",
        "conftest",  # pytest would import it a second time
    ],
)
def test_new_refuses_names_that_would_not_work(capsys, tmp_path, name):
    with contextlib.chdir(tmp_path):
        code, _, errors = leaves(["new", "transport", name], capsys)
    assert code == 2 and f"'{name}'" in errors and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["credit", "rollout", "transport", "field", "a", "A1"])
@pytest.mark.parametrize("axis", ["transport", "statistic"])
def test_a_new_class_hides_nothing_it_uses(capsys, tmp_path, axis, name):
    with contextlib.chdir(tmp_path):
        assert leaves(["new", axis, name], capsys)[0] == 0
    tree = ast.parse((tmp_path / f"{name}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not imported & {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    recipe = yaml.safe_load((tmp_path / f"{name}.yaml").read_text())
    part = recipe["transport"] if axis == "transport" else recipe["logging"]["statistics"][0]
    assert part["use"] == name


def test_a_media_package_built_for_another_torch_is_said(tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    (tmp_path / "torchvision-0.0.1.dist-info").mkdir()
    (tmp_path / "torchvision-0.0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.0.1\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "cct.cli", "run", str(GRPO), "--runs", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "torchvision does not fit the installed torch" in done.stderr
    assert "pip uninstall -y torchvision torchaudio torchcodec" in done.stderr
