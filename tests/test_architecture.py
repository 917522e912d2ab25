"""The dependency direction, read off the import statements, and that knobs need no torch."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "cct"
FILES = sorted(PACKAGE.rglob("*.py"))

AXES = ("evidence", "transport", "critic", "geometry", "task", "policy")
LAYERS = [
    ("system", "metrics"),
    ("registry",),
    ("tensors", "packing"),
    ("statistic",),
    ("rollout", "handover"),
    ("laboratory",),
    AXES,
    ("environment",),
    ("watching",),
    ("pairing",),
    ("recipe",),
    ("loading", "errors"),
    ("prompts", "run_folder"),
    ("loggers",),
    ("audit",),
    ("preflight",),
    ("agent",),
    ("training",),
    ("tools.explain", "tools.scaffold", "tools.catalogue", "tools.memory", "tools.profile", "tools.doctor"),
    ("tools.study", "tools.plan", "tools.conformance", "tools.replay", "tools.fidelity"),
    ("tools.tokens",),
    ("tools.report",),
    ("tools.lab",),
    ("api",),
    ("commands",),
    ("cli",),
]
MODULES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
ONLY = {"tools.report": {"system", "metrics", "registry", "rollout", "run_folder"}}  # reads files and the values that flow

HEAVY = {"torch", "transformers", "lightning", "tokenizers", "rich", "vllm", "deepspeed", "peft"}
HEAVY |= {"datasets", "pyarrow", "reasoning_gym", "textarena", "math_verify", "pebble"}
FREE = {"agent", "loggers", "training", "tools.lab"}
FREE |= {
    f"tools.{name}"
    for name in ("study", "report", "conformance", "replay", "tokens", "fidelity", "memory", "profile", "doctor")
}
TENSOR_FILES = {
    "tensors.py",
    "functional.py",
    "towers.py",
    "attention.py",
    "checkpoints.py",
    "head.py",
    "packing.py",
    "sharing.py",
    "sampling.py",
    "weights.py",
    "vllm_pool.py",
    "vllm_remote.py",
}


def imports(path: Path, types: bool = False) -> list[tuple[str, int, bool]]:
    """(absolute module, line, at module level) of every import that runs; those for type checkers where types."""
    package = path.relative_to(PACKAGE.parent).with_suffix("").parts[:-1]
    found: list[tuple[str, int, bool]] = []

    def walk(node: ast.AST, outside: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno, outside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES or module == "cct" else module for name in names]
            found.extend((name, node.lineno, outside) for name in names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not types:
            for child in node.orelse:
                walk(child, outside)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                walk(child, outside and not inside)

    walk(ast.parse(path.read_text(encoding="utf-8")), True)
    return found


def depends_on(modules: dict[str, Path], name: str) -> set[str]:
    """Modules that one of them imports anywhere, in functions and for type checkers too."""
    return {found for found, _, _ in imports(modules[name], types=True) if found in modules} - {name}


def part_of(module: str) -> str:
    """`transport` for cct.transport.gae, `tools.plan` for cct.tools.plan, empty for cct itself and for other packages."""
    package, *words = module.split(".")
    return ".".join(words[: 2 if words[0] == "tools" else 1]) if package == "cct" and words else ""


def module_of(path: Path) -> str:
    return next(name for name, found in MODULES.items() if found == path)


def test_the_import_reader_reads():
    found = imports(PACKAGE / "transport" / "gae.py")
    assert ("cct.transport.base", True) in [(name, outside) for name, _, outside in found]
    assert ("cct.transport.functional", False) in [(name, outside) for name, _, outside in found]
    assert "torch" not in [name for name, _, _ in found]  # for type checkers only


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    part = part_of(module_of(path))
    assert part in RANK or part in ("", "tools"), f"say in LAYERS where cct.{part} stands"
    for module, line, outside in imports(path):
        name = part_of(module)
        if name in RANK and name != part:
            where = f"{path}:{line} imports {module}"
            assert part or not outside, f"{where}: importing cct imports no part of it"
            if not part:
                continue
            assert RANK[name] < RANK[part], f"{where}, which stands {'beside' if RANK[name] == RANK[part] else 'above'} it"
            assert name in ONLY.get(part, RANK), f"{where}; it may import {ONLY[part]} only"


def test_no_import_circle_not_even_of_types():
    graph = {name: depends_on(MODULES, name) for name in MODULES}
    assert graph["cct.policy.generation"] >= {"cct.policy.base", "cct.registry"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"an import circle: {' -> '.join(reversed(error.args[1]))}")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_knobs_need_no_torch(path):
    if part_of(module_of(path)) in FREE or path.name in TENSOR_FILES or path.parent.name == "functional":
        return
    heavy = [
        f"{path}:{line} imports {module}"
        for module, line, outside in imports(path)
        if outside and module.split(".")[0] in HEAVY
    ]
    assert not heavy


# The size to which code may grow, and what is over it; these may shrink only.
MOST_FILES, MOST_LINES, MOST_OF_A_FUNCTION = 15, 300, 60
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS = {"loop.iterate": 65}


def test_training_is_the_loop_alone():
    files = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in (PACKAGE / "training").glob("*.py")}
    assert len(files) <= MOST_FILES, "what is no part of the loop stands elsewhere"
    assert {name: lines for name, lines in files.items() if lines > LONG_FILES.get(name, MOST_LINES)} == {}


def test_no_function_is_long():
    found = [
        (f"{path.stem}.{node.name}", node.end_lineno - node.lineno + 1)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [(name, lines) for name, lines in found if lines > LONG_FUNCTIONS.get(name, MOST_OF_A_FUNCTION)] == []


def test_files_of_a_run_are_named_in_one_place():
    names = {"recipe.yaml", "metrics.jsonl", "samples.jsonl", "tokens.json", "fidelity.json", "eval.json", "trace.json.gz"}
    for path in FILES:
        if path.name != "run_folder.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            divided = [node.right for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)]
            found = {node.value for node in divided if isinstance(node, ast.Constant)} & names
            assert not found, f"{path}: {', '.join(sorted(found))}; RunFolder knows where they are"


def test_every_axis_is_there():
    rooms = {*AXES, "environment", "statistic", "agent", "training", "tools", "system"}
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir()} >= rooms
