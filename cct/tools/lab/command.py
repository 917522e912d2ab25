"""`cct lab`: run the board, and print who takes how much of the headroom."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cct.system import plain_yaml
from cct.system.files import write_text
from cct.system.terminal import make_console
from cct.tools.report.lab import picture
from cct.tools.report.write import write_report
from cct.tools.study.command import installed
from cct.tools.study.runner import Work, run_cells, status_table, works_of, write_recipes
from cct.tools.study.study import Study, dump_study, load_study, look_at_data
from cct.tools.study.summary import headroom_line, summarise, write

from .board import BASE, Arm, board
from .results import AGREEMENT, PHASES, lab_results

WIDTH = 150  # of tables, where the terminal does not say
NUMBERS = ("area", "share", "p (Holm)", "rank\ncorrelation", "right signs", "bias", "explained\nwithin", "tokens", "s")
LEGEND = """share: of the headroom, [Fieller's 95% interval] within seeds; p (Holm): of the difference from GRPO. Rank
correlation, right signs and bias: against the exact advantage at the tokens that decide, by thirds of the run (bias: middle).
Explained within: of the exact values by those that the transport read, the group's mean subtracted. Tokens and seconds: of a
run, without evaluation."""


def command(
    operators: Sequence[str],
    *,
    tasks: Sequence[str],
    critics: Sequence[str],
    seeds: int,
    jobs: int,
    into: Path,
    changes: Sequence[str] = (),
    retry: bool = False,
) -> int:
    """Run what is left of the board and write its results into `into`. Returns 0, or 1 where cells have failed or are left.

    Cells that `into` holds already are not run again. Raises RecipeError.
    """
    installed("scipy", "study")
    installed("statsmodels", "study")
    console = make_console(WIDTH)
    into = into.resolve()
    plain, arms, left_out = board(into.name, operators, critics, tasks, seeds, changes)
    for line in left_out:
        console.print(f"left out: {line}", soft_wrap=True, markup=False)
    write_text(into / "base.yaml", plain_yaml.dump(BASE))
    write_text(into / "lab.yaml", plain_yaml.dump(plain | {"jobs": jobs}))
    study, recipes = load_study(into / "lab.yaml")
    works = works_of(study, recipes, into)
    look_at_data(recipes)
    write_recipes(works, recipes)
    write_text(into / "study.yaml", dump_study(study))
    for work in works if retry else ():
        work.beside("failed").unlink(missing_ok=True)
    try:
        run_cells(study, works, recipes, console)
    finally:
        write(summarise(study, works, recipes), works, into)
        _show(study, arms, works, into, console)
    states = [work.state for work in works]
    if states.count("done") < len(works):
        console.print(status_table(study, works))
        console.print("cells are left or have failed; the same command goes on, --retry tries failed ones again")
    return 0 if states.count("done") == len(works) else 1


def _show(study: Study, arms: Sequence[Arm], works: Sequence[Work], folder: Path, console: Console) -> None:
    results = lab_results(study, arms, works)
    write_text(folder / "lab.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
    write_text(folder / "lab.svg", picture(results))
    for task in results["tasks"]:
        console.print(_table(task))
        row = {"setting": task["task"], "floor": task["floor"], "ceiling": task["ceiling"], **task["headroom"]}
        console.print(headroom_line(row), soft_wrap=True)
    console.print(LEGEND)
    pages = write_report([folder])
    console.print(f"wrote {', '.join(map(str, [folder / 'lab.json', folder / 'lab.svg', *pages]))}", soft_wrap=True)


def _table(task: Mapping[str, Any]) -> Table:
    table = Table(title=task["task"], title_justify="left")
    for name in ("arm", "critic"):
        table.add_column(name, overflow="fold")
    for name in NUMBERS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in task["arms"]:
        share, fidelity = row["share"], row["fidelity"]
        table.add_row(
            row["arm"],
            row["critic"],
            _number(row["area"]["mean"], ".3f"),
            _share(share),
            _number(share and share["p_holm"], ".4f"),
            *(" ".join(_number(fidelity[name][phase], ".2f") for phase in PHASES) for name in AGREEMENT[:2]),
            _number(fidelity["bias"][PHASES[1]], "+.3f"),
            _number(row["explained_within"], ".2f"),
            _number(row["tokens"], ",.0f"),
            _number(row["seconds"], ".0f"),
        )
    return table


def _number(x: float | None, form: str) -> str:
    return "-" if x is None else format(x, form)


def _share(share: Mapping[str, Any] | None) -> str:
    if share is None or share["mean"] is None:
        return "-"
    ends = "" if share["low"] is None else f" [{share['low']:.2f}, {share['high']:.2f}]"
    return f"{share['mean']:.2f}{ends}"
