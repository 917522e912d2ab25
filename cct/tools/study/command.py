"""`cct study`: run, check, status, summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from cct.recipe import Recipe, RecipeError
from cct.registry import optional
from cct.system.files import write_text
from cct.system.terminal import make_console

from .runner import Work, run_cells, show_status, status_table, submit_cells, works_of, write_recipes
from .study import Cell, Study, dump_study, load_study, look_at_data
from .summary import print_tables, summarise, write

WIDTH = 120  # of tables, where the terminal does not say


def command(action: str, path: Path, overrides: Sequence[str], root: Path, *, retry: bool = False) -> int:
    """Returns 0, or 1 if cells of `run` have failed or are left. Raises RecipeError."""
    study, recipes = load_study(path, overrides)
    folder = root / study.name
    console = make_console(WIDTH)
    works = works_of(study, recipes, folder)
    if action in ("run", "check"):
        look_at_data(recipes)
    if action == "check":
        begun = sum(work.state != "waiting" for work in works)
        arms = f"{len(study.arm_names)} arms" + (f" x {len(study.settings)} settings" if study.settings != [""] else "")
        console.print(f"{path}: ok ({arms} x {len(study.seeds)} seeds = {len(works)} cells, {begun} begun)")
        return 0
    if action == "status":
        show_status(study, works, console)
        return 0
    installed("scipy", "study")
    installed("statsmodels", "study")
    if study.executor == "slurm":
        installed("submitit", "submitit")
    if action == "run":
        write_recipes(works, recipes)
        write_text(folder / "study.yaml", dump_study(study))
        for work in works if retry else ():
            work.beside("failed").unlink(missing_ok=True)
        if study.executor == "slurm":
            submit_cells(study, works, console)
        else:
            run_cells(study, works, recipes, console)
        return _end(study, works, recipes, path, folder, console)
    _summary(study, works, recipes, folder, console)
    return 0


def _end(
    study: Study, works: Sequence[Work], recipes: Mapping[Cell, Recipe], path: Path, folder: Path, console: Console
) -> int:
    console.print(status_table(study, works))
    _summary(study, works, recipes, folder, console)
    states = [work.state for work in works]
    if "failed" in states:
        console.print(f"failed cells are not run again; `cct study {path} --retry` retries them")
    elif len(works) > states.count("done"):
        console.print(f"cells are left; `cct study {path}` resumes the study")
    return 0 if states.count("done") == len(works) else 1


def _summary(study: Study, works: Sequence[Work], recipes: Mapping[Cell, Recipe], folder: Path, console: Console) -> None:
    if not folder.is_dir():
        raise RecipeError(
            f"{folder}: no study was run in this folder; `cct study FILE` runs one; --studies sets where studies are"
        )
    results = summarise(study, works, recipes)
    write(results, works, folder)
    print_tables(study, results, console)
    console.print(f"wrote {folder / 'results.json'} and {folder / 'cells.csv'}", soft_wrap=True)


def installed(library: str, extra: str) -> None:
    """Reported before hours of computing, not after."""
    try:
        optional(library, extra)
    except ValueError as error:
        raise RecipeError(str(error)) from None
