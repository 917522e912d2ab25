"""The cells of a study as processes: in parallel, each in its own run folder; any of them can be killed and resumed.

A cell's progress is read from its files, and whether it runs from a lock that its process holds. There is no other state: after
its runner was killed, a study finds its cells as they are, including those that still run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from cct.loading import changes, dump_recipe, load_recipe
from cct.recipe import Recipe, RecipeError
from cct.run_folder import RunFolder
from cct.system.files import Held, append, hold, write_text

from .study import Cell, Evaluate, Study

POLL = 0.2  # seconds between looks at the processes
SLURM_POLL = 5.0  # and at the jobs
PATIENCE = 20.0  # seconds that an interrupted cell has before it is killed
TAIL = 15  # lines of its log that a failed cell is reported with


@dataclass(frozen=True, eq=False)
class Work:
    """A cell and its files."""

    cell: Cell
    root: Path
    """The study's folder."""
    evaluate: Evaluate | None = None

    @property
    def title(self) -> str:
        return f"{self.cell.name} seed {self.cell.seed}"

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return self.root / self.cell.place

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder)

    def beside(self, ending: str) -> Path:
        """`recipe.yaml`, `log`, `lock` and `failed` are next to the run folder."""
        return self.folder.with_name(f"{self.folder.name}.{ending}")

    # --- what it has reached ------------------------------------------------------------------
    @property
    def events(self) -> list[dict[str, Any]]:
        """What the run wrote to metrics.jsonl so far; a last line that is being written is left out."""
        return self.run.metrics

    @property
    def evaluation(self) -> dict[str, float]:
        """Results of `cct eval`; empty if it has not run, or not with as many samples as the study asks for."""
        wanted, metrics = self.evaluate, _read(self.run.evaluation_file) or {}
        sampled = [f"eval/avg@{wanted.samples}", *(f"eval/pass@{k}" for k in wanted.ks)] if wanted and wanted.samples else []
        return metrics if all(name in metrics for name in sampled) else {}

    @property
    def fidelity(self) -> dict[str, Any] | None:
        """Results of `cct fidelity` without the single positions; None if it was not run."""
        found = _read(self.run.fidelity_file)
        return found and {name: value for name, value in found.items() if name not in ("source", "at_positions")}

    @property
    def trained(self) -> bool:
        return self.run.policy.is_dir()

    @property
    def done(self) -> bool:
        return self.trained and (self.evaluate is None or bool(self.evaluation))

    @property
    def failed(self) -> bool:
        return self.beside("failed").is_file()

    @property
    def running(self) -> bool:
        held = self.hold()
        if held is not None:
            os.close(held)
        return held is None

    @property
    def state(self) -> str:
        """done, failed, running, cut (started, but not running) or waiting."""
        if self.done:
            return "done"
        if self.failed:
            return "failed"
        if self.beside("lock").is_file() and self.running:
            return "running"
        return "cut" if self.folder.is_dir() else "waiting"

    # --- going on -----------------------------------------------------------------------------
    def hold(self) -> int | None:
        """The cell's lock as a file descriptor; None if another process holds it. Released when its last holder ends."""
        try:
            return hold(self.beside("lock"))
        except Held:
            return None

    def next_step(self) -> list[str]:
        """Arguments of `cct` for the cell's next step; empty if it is done."""
        if not self.trained:
            if self.run.checkpoints:
                return ["run", "--resume", str(self.folder)]
            return ["run", str(self.beside("recipe.yaml")), "--into", str(self.folder)]
        if self.evaluate is not None and not self.evaluation:
            sampled = ["--samples", str(self.evaluate.samples), "--ks", ",".join(map(str, self.evaluate.ks))]
            return ["eval", str(self.folder), *sampled, "--json", str(self.run.evaluation_file)]
        return []

    def start(self, held: int, threads: int, previous: Sequence[str] = ()) -> Step | None:
        """Its next step as a process that has the lock `held`; None where it has failed, or is done.

        previous: the step that has just ended well. A session of its own lets the process end when the runner says so.
        """
        arguments = [] if self.failed else self.next_step()
        if arguments and arguments == previous:
            self.fail("its process ended without an error and without a result")
        if not arguments or self.failed:
            return None
        if "--into" in arguments:
            shutil.rmtree(self.folder, ignore_errors=True)  # cut before its first checkpoint
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        append(self.beside("log"), f"$ cct {' '.join(arguments)}\n")
        with self.beside("log").open("a", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "cct.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[held],
                start_new_session=True,
            )
        return Step(process, arguments)

    def ended(self, code: int) -> None:
        """Record the failure if a step ended with this exit code."""
        if code:
            self.fail(f"killed by signal {-code}" if code < 0 else f"exit code {code}")

    def fail(self, why: str) -> None:
        write_text(self.beside("failed"), f"{why}\n")

    @property
    def report(self) -> str:
        """For a finished cell its accuracy; for a failed one the reason and the end of its log."""
        if self.done:
            return f"done  {self.title}{_accuracy(self.events)}"
        if not self.failed:
            return f"cut  {self.title}"
        why, log = (self.beside(name).read_text(encoding="utf-8", errors="replace").strip() for name in ("failed", "log"))
        end = "".join(f"\n  {line}" for line in log.splitlines()[-TAIL:])
        return f"failed  {self.title}: {why}; the end of {self.beside('log')}:{end}"


def _read(path: Path) -> dict[str, Any] | None:
    """The object of a JSON file; None where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


@dataclass(frozen=True)
class Step:
    """A process that runs a step of a cell."""

    process: subprocess.Popen
    arguments: Sequence[str]


def works_of(study: Study, recipes: Mapping[Cell, Recipe], root: Path) -> list[Work]:
    """A study's cells in running order. Raises RecipeError if a run folder holds another recipe."""
    works, problems = [Work(cell, root, study.evaluate) for cell in recipes], []
    for work in works:
        held = work.run.recipe_file
        if not held.is_file():
            continue
        # Read as a recipe: a knob that did not exist yet when the cell was begun stands at its default.
        begun, present = (recipe.model_dump(mode="json") for recipe in (load_recipe(held), recipes[work.cell]))
        found = changes(begun, present)
        if found:
            problems.append(
                f"{work.folder}: was started with another recipe ({'; '.join(found[:3])}{'; ...' if len(found) > 3 else ''}). "
                "Undo the change, give the study another name, or remove this folder to run the cell again"
            )
    if problems:
        raise RecipeError(*problems)
    return works


def write_recipes(works: Sequence[Work], recipes: Mapping[Cell, Recipe]) -> None:
    """The recipe that each cell is run from, beside its run folder."""
    for work in works:
        write_text(work.beside("recipe.yaml"), dump_recipe(recipes[work.cell]))


def run_cells(study: Study, works: Sequence[Work], recipes: Mapping[Cell, Recipe], console: Console) -> None:
    """Run every cell that is neither done nor failed, `study.jobs` side by side, until `study.hours` are over.

    On an interrupt (Control-C, and SIGTERM under `cct`) the cells are interrupted, waited for, and KeyboardInterrupt is raised.
    """
    deadline = time.monotonic() + study.hours * 3600 if study.hours else float("inf")
    waiting = [work for work in works if work.state not in ("done", "failed")]
    running: dict[Work, Step] = {}

    def start(work: Work, previous: Sequence[str] = ()) -> bool:
        """Whether the cell is taken care of: its next step runs, or there is none. False if another process holds it."""
        held = work.hold()
        if held is None:
            return False
        step = work.start(held, study.threads, previous)
        os.close(held)  # its process alone has it now
        if step is not None:
            running[work] = step
            say(f"{'resume' if '--resume' in step.arguments else step.arguments[0]}  {work.title}")
        else:
            say(work.report)
        return True

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    def warming(work: Work) -> bool:
        """Whether a running cell computes its warm start."""
        mine = recipes[work.cell]
        others = [recipes[other.cell] for other in running if not other.events]
        return mine.policy.warm_start is not None and any(
            (mine.seed, mine.policy, mine.task) == (other.seed, other.policy, other.task) for other in others
        )

    try:
        with _live(lambda: status_table(study, works), console):
            while running or (waiting and time.monotonic() < deadline):
                for work, step in list(running.items()):
                    code = step.process.poll()
                    if code is not None:
                        del running[work]
                        work.ended(code)
                        if not start(work, step.arguments):
                            waiting.insert(0, work)
                elsewhere: set[Work] = set()
                while len(running) < study.jobs and time.monotonic() < deadline and len(elsewhere) < len(waiting):
                    # Last those that would only wait for their warm start.
                    work = min((work for work in waiting if work not in elsewhere), key=warming)
                    if start(work):
                        waiting.remove(work)
                    else:
                        elsewhere.add(work)
                time.sleep(POLL)
    except KeyboardInterrupt:
        _stop([step.process for step in running.values()])
        raise


def bring_to_its_end(work: Work, threads: int, until: float) -> None:
    """Every step of a cell that is left, one after the other; nothing where another process is at it, or it is too late.

    until: the time (seconds since the epoch) after which it does not start.
    """
    held = work.hold() if time.time() < until else None
    if held is None:
        return
    try:
        step = work.start(held, threads)
        while step is not None:
            work.ended(step.process.wait())
            step = work.start(held, threads, step.arguments)
    finally:
        os.close(held)


def submit_cells(study: Study, works: Sequence[Work], console: Console, cluster: str = "slurm") -> None:
    """A job for every cell that is neither done nor failed, by submitit; waits for them. An interrupt leaves the jobs alone.

    cluster: `slurm`; submitit's `local` runs the jobs here.
    """
    import submitit

    executor = submitit.AutoExecutor(folder=works[0].root / "jobs", cluster=cluster)
    executor.update_parameters(name=study.name, cpus_per_task=study.threads, **study.slurm)
    if cluster == "slurm":
        executor.update_parameters(slurm_array_parallelism=study.jobs)
    left = [work for work in works if work.state not in ("done", "failed")]
    if not left:
        return
    until = time.time() + study.hours * 3600 if study.hours else float("inf")
    with executor.batch():
        jobs = [executor.submit(bring_to_its_end, work, study.threads, until) for work in left]
    waiting = dict(zip(left, jobs, strict=True))
    with _live(lambda: status_table(study, works), console):
        while waiting:
            for work, job in list(waiting.items()):
                if job.done():
                    del waiting[work]
                    console.print(work.report, soft_wrap=True)
            time.sleep(POLL if cluster != "slurm" else SLURM_POLL)


def _stop(processes: Sequence[subprocess.Popen]) -> None:
    """Interrupt them, wait, and kill those that still run, each with the processes that it started."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
    end = time.monotonic() + PATIENCE
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _live(render: Callable[[], Table], console: Console) -> Any:
    """The table, updated on a terminal; nothing elsewhere."""
    if console.is_terminal:
        return Live(console=console, get_renderable=render, refresh_per_second=1, transient=True)
    return nullcontext()


# --- status -----------------------------------------------------------------------------------
def _accuracy(events: Sequence[dict[str, Any]]) -> str:
    found = [event["eval/accuracy"] for event in events if "eval/accuracy" in event]
    return f"  {found[-1]:.3f}" if found else ""


def status_table(study: Study, works: Sequence[Work]) -> Table:
    """Arm by seed: state, iteration reached, last held-out accuracy."""
    texts = {work.cell: _status(work) for work in works}
    states = [text.split()[0] for text in texts.values()]
    counts = ", ".join(f"{states.count(name)} {name}" for name in dict.fromkeys(states))
    table = Table(title=f"{study.name}: {counts} of {len(works)} cells", title_justify="left")
    table.add_column("arm", overflow="fold")
    for seed in study.seeds:
        table.add_column(f"seed {seed}", justify="right", no_wrap=True)
    for setting in study.settings:
        for arm in study.arm_names:
            cells = [Cell(arm, setting, seed) for seed in study.seeds]
            table.add_row(cells[0].name, *(texts[cell] for cell in cells))
    return table


def _status(work: Work) -> str:
    state, events = work.state, work.events
    if state == "running" and work.trained:
        state = "running eval"
    elif state == "running" and not events:
        state = "running start"
    elif state in ("running", "cut", "failed") and events:
        state = f"{state} {max(0, events[-1]['iteration'])}"
    return state + _accuracy(events)


def show_status(study: Study, works: Sequence[Work], console: Console) -> None:
    """Print the table; on a terminal, update it while cells run."""
    with _live(lambda: status_table(study, works), console):
        while console.is_terminal and any(work.state == "running" for work in works):
            time.sleep(1)
    console.print(status_table(study, works))
    for work in works:
        if work.failed and not work.done:
            why = work.beside("failed").read_text(encoding="utf-8").strip()
            console.print(f"failed: {work.title}: {why}; see {work.beside('log')}", soft_wrap=True)
