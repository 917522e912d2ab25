"""Nothing of a user's is markup or an escape sequence, and no encoding or terminal is too poor."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from cct.system.terminal import make_console, printable, shortened

ROOT = Path(__file__).parents[1]
ODD = "[/] [bold]x[/bold] :smile: \x1b[31mred\x07\r\x9b"


def cct(*argv: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "cct.cli", *argv]
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(command, capture_output=True, cwd=folder, env=os.environ | path | environment, timeout=100)


def test_controls_are_escaped_and_text_stays():
    assert printable("é 語\ttab\nline") == "é 語\ttab\nline"
    assert printable("\x1b[31m\0\x9b\r\u202e\udcff") == r"\x1b[31m\x00\x9b\r\u202e\udcff"


def test_long_text_is_cut():
    assert (shortened("abcdef", 6), shortened("abcdefg", 6)) == ("abcdef", "abc...")


def test_a_console_shows_brackets_and_escapes_as_they_are():
    console = make_console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    table = Table(title=ODD)
    table.add_column(ODD)
    table.add_row(ODD)
    console.print(ODD)
    console.print(table)
    shown = console.file.getvalue()
    assert shown.count(r"[/] [bold]x[/bold] :smile: \x1b[31mred\x07\r\x9b") == 4 and "\x07" not in shown


def test_a_recipe_may_be_called_anything(tmp_path):
    names = ["[/].yaml", "[bold]x.yaml", "\x1b[31m.yaml", "é.yaml", os.fsdecode(b"\xff.yaml")]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"base: {ROOT / 'recipes/grpo.yaml'}\n")
    done = cct("check", *names, folder=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and b"\x1b" not in done.stdout and done.stdout.count(b": ok (") == len(names), done.stderr


def test_odd_words_of_the_command_line_are_escaped():
    done = cct("check", "a", "--\x1b[31m", PYTHONIOENCODING="ascii", COLUMNS="1", TERM="dumb", LC_ALL="C")
    assert done.returncode == 2 and b"\x1b" not in done.stderr and b"Traceback" not in done.stderr


def test_a_folder_that_is_gone_is_said(tmp_path):
    command = f"mkdir gone && cd gone && rmdir ../gone && exec {sys.executable} -m cct.cli check {ROOT}/recipes/grpo.yaml"
    path = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, env=os.environ | path)
    assert (done.returncode, done.stderr) == (2, "error: the current folder no longer exists; go to another one\n")


def test_output_that_is_closed_is_no_error():
    command = f"{sys.executable} -m cct.cli check recipes/grpo.yaml >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


PLUGIN = """
import os, sys
from cct.evidence import Evidence, evidences

if os.environ["KIND"] == "import":
    raise RuntimeError("\\x1b[31m")

@evidences.register("odd")
class Odd(Evidence):
    'Leaves.'
    def unreadable(self, prompt):
        sys.exit(0)

    def __call__(self, prompt, response):
        return 0.0
"""


@pytest.mark.parametrize(
    "kind, code, said", [("import", 1, rb"RuntimeError: \x1b[31m"), ("gold answers", 2, b"evidence: SystemExit: 0 (")]
)
def test_a_plugin_that_fails_writes_no_escapes_and_ends_nothing_silently(kind, code, said, tmp_path):
    (tmp_path / "odd.py").write_text(PLUGIN)
    (tmp_path / "odd.yaml").write_text(f"base: {ROOT / 'recipes/grpo.yaml'}\nplugins: [./odd.py]\nevidence: [odd]\n")
    done = cct("check", "odd.yaml", folder=tmp_path, KIND=kind)
    assert done.returncode == code and said in done.stderr and b"\x1b" not in done.stderr, done.stderr
