"""What the pages say is true of the code: parts, recipes, file names, tables."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import cct.recipe  # noqa: F401  (registers every axis)
from cct.cli import _parser, main
from cct.registry import REGISTRIES, Component
from cct.tools.conformance import check

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
REGISTERS = re.compile(r'@(?:\w+\.)*(\w+)\.register\("(\w+)"\)')
AXES = {"transports": "transport", "gates": "gate", "geometries": "geometry", "critics": "critic", "evidences": "evidence"}
AXES |= {"environments": "environment"}
AXES |= {"statistics": "statistic"}


def blocks(page: Path, language: str = "") -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M)
    return [code for written, code in fenced if written == language]


PARTS = [
    (page.name, *match.groups(), code)
    for page in PAGES
    for code in blocks(page, "python")
    if (match := REGISTERS.search(code)) is not None
]


@pytest.mark.parametrize(("page", "registry", "name", "code"), PARTS, ids=[f"{page}:{name}" for page, _, name, _ in PARTS])
def test_every_part_of_the_docs_conforms(page, registry, name, code):
    axis = REGISTRIES[AXES[registry]]
    exec(compile(code, "docs", "exec", dont_inherit=True), {"__name__": "docs"})
    try:
        part: Component = axis[name]()
        verdicts = check(part, examples=20)
        assert verdicts and {v.property: v.why for v in verdicts if v.outcome == "FAILED"} == {}
        assert "group_advantage" not in code or "groups" in part.needs
    finally:
        del axis._classes[name]


def test_parts_of_every_kind_that_the_docs_explain_are_found():
    assert {(registry, name) for _, registry, name, _ in PARTS} >= {
        ("transports", "half_life"),
        ("transports", "last_step"),
        ("transports", "focus"),
        ("gates", "exponential"),
        ("statistics", "sureness"),
        ("evidences", "brief"),
    }


LOAD = """
import sys
from cct.loading import load_recipe
for path in sys.argv[1:]:
    print(load_recipe(path).name)
"""


def test_every_recipe_of_the_docs_loads(tmp_path):
    """A block is a recipe where it names its base and itself; a part of one's own is in the file of its name."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "reward.py").write_text("def score(prompt, response):\n    return 0.0\n")
    for _, _, name, code in PARTS:
        (tmp_path / f"{name}.py").write_text(code)
    recipes = [code for page in PAGES for code in blocks(page, "yaml") if re.search(r"^base: recipes.*\nname: ", code, re.M)]
    for index, code in enumerate(recipes):
        (tmp_path / f"{index}.yaml").write_text(code)
    argv = [sys.executable, "-c", LOAD, *(f"{index}.yaml" for index in range(len(recipes)))]
    done = subprocess.run(
        argv, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [re.search(r"^name: (\w+)", code, re.M)[1] for code in recipes] and len(recipes) > 5


def commands() -> list[str]:
    """What pages tell to type after `cct`, lines that go on joined."""
    shown = [code.replace("\\\n", " ") for page in PAGES for code in blocks(page)]
    return [match for code in shown for match in re.findall(r"(?:^|&& |\$ |\bsrun |-m )cct(?:\.cli)? (.*)$", code, re.M)]


def test_every_command_of_the_docs_is_one():
    assert len(commands()) > 40
    for command in commands():
        words = shlex.split(command.removesuffix("&"), comments=True)
        try:
            _parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"cct {command}: is no command")


def printed_under(page: Path) -> list[tuple[str, str]]:
    """Python with what stands right below it as what it prints."""
    fenced = list(re.finditer(r"^```(\w*)\n(.*?)^```\n", page.read_text(encoding="utf-8"), re.S | re.M))
    return [(a[2], b[2]) for a, b in pairwise(fenced) if a[1] == "python" and not b[1] and a.end() == b.start()]


SHOWN = [pair for page in PAGES for pair in printed_under(page)]


@pytest.mark.parametrize(("code", "printed"), SHOWN)
def test_code_prints_what_the_docs_say(capsys, code, printed):
    exec(code, {})
    assert capsys.readouterr().out == printed


def test_the_suite_says_of_gae_what_the_docs_show(capsys):
    page = (ROOT / "docs" / "transport.md").read_text(encoding="utf-8")
    assert main(["check-operator", "gae", "--set", "whiten=false", "--set", "lam=0.9"]) == 0
    assert capsys.readouterr().out in page


# --- tables ---------------------------------------------------------------------------------------
def tables(page: Path) -> list[list[str]]:
    """Runs of lines that begin with a bar, outside of code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    runs = re.findall(r"(?:^\|.*\n?)+", text, re.M)
    return [run.splitlines() for run in runs]


def cells(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", row)) - 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_whole(page):
    text = page.read_text(encoding="utf-8")
    for header, *rest in tables(page):
        assert rest and re.fullmatch(r"\|( ?-+:? ?\|)+", rest[0]), f"a table that does not begin with a header: {header[:80]}"
        for row in rest:
            assert cells(row) == cells(header) and row.endswith("|"), row[:80]
        before = text[: text.index(f"{header}\n{rest[0]}")]
        assert before.endswith(("\n\n", "-->\n")), f"no blank line above {header}"


# --- what pages point at --------------------------------------------------------------------------
def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {target}"


def test_the_readme_counts_the_parts():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    counts = {axis: sum(built_in(registry[name]) for name in registry.names()) for axis, registry in REGISTRIES.items()}
    first = rf"{counts['transport']} estimators, {counts['critic']} critics and {counts['geometry']} policy losses"
    assert re.search(first, text)
    assert f"| {counts['transport']} and {counts['gate']} gates: " in text
    for axis in ("critic", "geometry", "environment", "evidence"):
        assert re.search(rf"\| \*\*{axis}\*\* \| [^|]*\| {counts[axis]}: ", text), (axis, counts[axis])


def built_in(part):
    return part.__module__.startswith("cct.")


def test_the_readme_stays_short_and_lists_every_recipe_and_command(capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        assert f"`{recipe.stem}`" in text, recipe
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    ([a-z-]+) ", capsys.readouterr().out, re.M)
    assert len(commands) > 10 and all(f"`cct {command}" in text for command in commands), commands
