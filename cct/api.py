"""cct from Python: what the command line calls.

from cct import evaluate, load_recipe, train

run = train(load_recipe("recipes/compo.yaml", ["training.iterations=10"]))
run.metrics[-1]["train/reward"]
evaluate(run)["eval/accuracy"]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cct.loading import load_recipe
from cct.recipe import Recipe

if TYPE_CHECKING:
    from lightning import Callback
    from rich.console import Console

__all__ = ["Run", "evaluate", "load_recipe", "resume", "train"]


@dataclass(frozen=True)
class Run:
    """A run's folder, and what is read from it."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The events of metrics.jsonl, one an iteration; docs/runs.md says what each metric means."""
        from cct.run_folder import RunFolder

        return RunFolder(self.folder).metrics

    @property
    def policy(self) -> Path:
        """The trained policy as a Hugging Face folder: `AutoModelForCausalLM.from_pretrained(run.policy)`."""
        from cct.run_folder import RunFolder

        return RunFolder(self.folder).policy


def train(
    recipe: Recipe | str | Path,
    *,
    runs: str | Path = "runs",
    into: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    profile: bool = False,
    quiet: bool = False,
    check: bool = True,
) -> Run:
    """Train a recipe, or a recipe file, into a new folder under `runs`, or into the folder `into`.

    callbacks: Lightning callbacks, besides the recipe's; they may monitor any metric of metrics.jsonl. profile: also print
    where the time went. quiet: print nothing. check: look at the data first, as `cct check` does.
    Raises RecipeError where the recipe or its data cannot be trained on, before anything is; TrainingStopped where training
    has to end early, its checkpoints stay; WriteError where a file cannot be written.
    """
    from cct.preflight import preflight
    from cct.system.terminal import make_console
    from cct.training.run import start

    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    console = make_console(quiet=quiet)
    for warning in [*preflight(recipe), *recipe.warnings] if check else []:
        console.print(f"warning: {warning}", soft_wrap=True)
    callbacks = _with_observers(callbacks, console, profile)
    return Run(start(recipe, Path(runs), into=Path(into) if into else None, console=console, callbacks=callbacks))


def resume(
    run: Run | str | Path,
    overrides: Sequence[str] = (),
    *,
    recipe: Recipe | None = None,
    callbacks: Sequence[Callback] = (),
    profile: bool = False,
    quiet: bool = False,
) -> Run:
    """Resume a run from its newest checkpoint, to the same bits as without the interruption.

    overrides: changes of its recipe, `["training.iterations=60"]`. recipe: instead of the run's own.
    Raises RecipeError, and leaves the folder as it is, where the run cannot be resumed; further errors as `train`.
    """
    from cct.system.terminal import make_console
    from cct.training import run as training

    folder, console = _folder(run), make_console(quiet=quiet)
    callbacks = _with_observers(callbacks, console, profile)
    training.resume(folder, recipe, overrides, console=console, callbacks=callbacks)
    return Run(folder)


def evaluate(
    run: Run | str | Path, *, samples: int = 0, ks: Sequence[int] = (1,), trust_plugins: bool = False
) -> dict[str, float]:
    """Greedy evaluation of a finished run's policy on the held-out problems and on the frozen sets.

    samples: sample so many responses to each problem as well, for avg@samples and pass@k of each of `ks`. trust_plugins: run
    plug-ins of the run's recipe without a recorded SHA-256.
    Raises RecipeError where the folder is not a finished run, TrainingStopped where evidence fails under `on_error: fail`.
    """
    from cct.training.run import evaluate_run

    return evaluate_run(_folder(run), samples, ks, trust=trust_plugins)


def _with_observers(callbacks: Sequence[Callback], console: Console, profile: bool) -> list[Callback]:
    from cct.loggers import Artifacts

    def report(folders: Sequence[Path]) -> Sequence[Path]:
        from cct.tools.report.write import write_report

        return write_report(folders)

    observers: list[Callback] = [Artifacts(report)]
    if profile:
        from cct.tools.profile import Profile

        observers.append(Profile(console))
    return [*observers, *callbacks]


def _folder(run: Run | str | Path) -> Path:
    return run.folder if isinstance(run, Run) else Path(run)
