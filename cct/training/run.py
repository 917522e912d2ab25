"""A run from start to end: its folder, the policy, Lightning, the export."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from lightning import Callback, Trainer
from lightning.fabric.utilities.rank_zero import _get_rank
from rich.console import Console
from rich.table import Table

from cct.agent.building import build, teacher, without_warm_start
from cct.agent.export import export, quiet, rehearse
from cct.errors import of_recipe
from cct.evidence import close_workers
from cct.loading import dump_recipe
from cct.loggers import loggers_of
from cct.metrics import CLOSING, among, is_count
from cct.recipe import Recipe, RecipeError
from cct.run_folder import RunFolder
from cct.system.files import LOCK, SUMS, WriteError, damage, remove, write_text, writing
from cct.system.signals import Ending, answered
from cct.system.terminal import say

from .callbacks import Display, Recorder, made, must_be_plain, named
from .evaluation import evaluate, evaluate_frozen, evaluate_sampled
from .loop import Loop
from .processes import OneFile, strategy_of
from .sampler import Sampler


def start(
    recipe: Recipe,
    root: Path,
    *,
    console: Console,
    into: Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Train into a new folder under `root`, or into the folder `into`; returned on every process.

    However it ends: a folder in which nothing was found out is not left behind. Raises WriteError where there can be none.
    """
    if not is_first():
        return train(recipe, None, console=console, callbacks=callbacks)
    if into is not None and into.exists() and not (into.is_dir() and not any(into.iterdir())):
        raise RecipeError(f"{into}: the folder is not empty; name a new one, or resume the run with --resume")
    run = RunFolder(into) if into else RunFolder.new(root, recipe.name)
    folder = run.path
    with run.only_run():
        if any(path.name != LOCK for path in folder.iterdir()):  # another run was faster
            raise RecipeError(f"{folder}: the folder is not empty; name a new one, or resume the run with --resume")
        try:
            train(recipe, folder, console=console, callbacks=callbacks)
        except BaseException as error:  # an interrupt too
            if not run.has_begun:
                remove(folder)
                if not isinstance(error, RecipeError):
                    console.print(f"nothing was trained yet; removed {folder}", soft_wrap=True)
            raise
    return folder


def is_first() -> bool:
    """Whether this is the process that writes; the others get the folder from it."""
    return (_get_rank() or 0) == 0


def train(
    recipe: Recipe,
    folder: Path | None,
    *,
    console: Console,
    checkpoint: Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Train into `folder` (None on other processes than the first), from `checkpoint` where given; print the closing table.

    callbacks: Lightning's, besides the recipe's. Returns the folder, on every process.
    Raises TrainingStopped on NaN or failing evidence; checkpoints taken so far stay.
    """
    quiet()
    started, ending, run = time.perf_counter(), Ending(folder is not None), RunFolder(folder) if folder is not None else None
    asked = [(callback.use, made(callback)) for callback in recipe.callbacks]
    if run is None:
        console = Console(quiet=True)
    elif checkpoint is None:  # or it is written when an iteration is done
        write_text(run.recipe_file, dump_recipe(recipe))
    with Display(recipe, console) as display:
        loop = _loop(recipe, run, display, ending, begun=checkpoint is not None)
        resumed = int(checkpoint.stem) if checkpoint else None
        recorder = Recorder(recipe, run, loop.sampler.tokenizer, display, ending, resumed)
        with named(asked):
            must_be_plain(asked)
            trainer = _trainer(recipe, run, resumed or 0, [recorder, *(callback for _, callback in asked), *callbacks])
        try:
            with _as_raised(run is not None), answered(ending), named(asked):
                trainer.fit(loop, ckpt_path=checkpoint, weights_only=True)
        finally:
            ending.close()
            loop.ahead.close()
            close_workers()
            if run is not None and any("train/reward" in metrics for _, metrics in display.history):
                _say_how_to_go_on(recipe, run, display.say)
    if run is not None:
        console.print(closing_table(run, time.perf_counter() - started))
    return recorder.folder.path


def _loop(recipe: Recipe, run: RunFolder | None, display: Display, ending: Ending, *, begun: bool) -> Loop:
    """The models in their loop, once the policy has been exported on trial. begun: a checkpoint replaces their weights."""
    agent, tokenizer, reference = build(without_warm_start(recipe) if begun else recipe, display.warm_start, display.say)
    if run is not None:
        with writing(run.policy):
            rehearse(recipe, agent.actor, tokenizer, run.path)
    loop = Loop(recipe, agent, tokenizer, reference, display.say, teacher(recipe, display.warm_start, display.say))

    def on_stage(stage: str) -> None:
        ending.answer()
        display.show(stage=stage)

    loop.on_stage = on_stage
    return loop


@contextmanager
def _as_raised(first: bool) -> Iterator[None]:
    """Raises what was raised first, where Lightning or a logger made another error of it; of files the first process speaks."""
    try:
        yield
    except WriteError:
        if not first:
            raise SystemExit(1) from None
        raise
    except OSError as error:
        if isinstance(error.__context__, WriteError):  # a logger that writes once more when it is closed
            raise error.__context__ from None
        raise
    except SystemExit as left:
        if isinstance(left.__context__, KeyboardInterrupt) and first:  # Lightning makes an exit of it
            raise left.__context__ from None
        raise


def _trainer(recipe: Recipe, run: RunFolder | None, first: int, callbacks: list[Callback]) -> Trainer:
    return Trainer(
        max_epochs=recipe.training.critic_warmup + recipe.training.iterations,
        precision="bf16-mixed" if recipe.training.precision == "bf16" else "32-true",
        use_distributed_sampler=False,
        strategy=strategy_of(recipe),
        devices=recipe.training.devices,
        num_nodes=recipe.training.nodes,
        logger=loggers_of(recipe, run, first) if run is not None else [],
        callbacks=callbacks,
        plugins=[] if recipe.training.strategy.startswith("deepspeed") else [OneFile()],
        default_root_dir=run.path if run is not None else None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _say_how_to_go_on(recipe: Recipe, run: RunFolder, say: Callable[[str], None]) -> None:
    """Messages about a run that ended before its last iteration."""
    saved = run.checkpoints
    if saved and int(saved[-1].stem) < recipe.training.iterations:
        say(f"stopped early; resume with: cct run --resume {shlex.quote(str(run))}")
    elif not saved:
        every = recipe.training.checkpoint_every
        say(
            f"stopped before the first checkpoint (training.checkpoint_every is {every}), so the run cannot be resumed; start "
            f"the recipe again. {run} keeps the metrics"
        )


def resume(
    folder: Path,
    recipe: Recipe | None,
    overrides: Sequence[str],
    *,
    console: Console,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Go on from the newest checkpoint of a run that can be read, under its own recipe or a given one.

    Events after the checkpoint are dropped from the logs: they are made again. A run that was cut between its last
    checkpoint and the export is exported. Raises RecipeError, and leaves the folder as it is, where it cannot be gone on with.
    """
    run = RunFolder(folder)
    run.to_resume(recipe, overrides)
    with run.only_run() if is_first() else nullcontext():
        recipe, changed = run.to_resume(recipe, overrides)
        checkpoint, skipped = run.newest_readable()
        if is_first():
            for line in (*skipped, *(f"resuming with {change}" for change in changed)):
                console.print(line, soft_wrap=True)
        if int(checkpoint.stem) < recipe.training.iterations:
            train(recipe, folder if is_first() else None, console=console, checkpoint=checkpoint, callbacks=callbacks)
        elif is_first():
            best = run.best(recipe)
            export(folder, run.policy, best[0] if best else None, trust=True, replace=True)
            console.print(f"{folder}: all iterations were done; wrote policy/")


def evaluate_run(folder: Path, samples: int = 0, ks: Sequence[int] = (1,), *, trust: bool = False) -> dict[str, float]:
    """Greedy evaluation of a run's exported policy on the held-out problems and on the frozen sets.

    samples: so many responses to each problem are sampled besides, for avg@samples and pass@k of each of `ks`. trust: run
    plug-ins without a recorded SHA-256.
    Raises TrainingStopped where evidence fails under `on_error: fail`.
    """
    quiet()
    if samples and not (ks and 1 <= min(ks) <= max(ks) <= samples):
        raise RecipeError(f"pass@k from {samples} samples: each k is from 1 to {samples}; found {', '.join(map(str, ks))}")
    run = RunFolder(folder)
    run.must_be_trained()
    if (why := damage(folder, run.policy)) is not None:
        raise RecipeError(
            f"{folder}: {why}; `cct export {folder} FOLDER` writes the policy again from a checkpoint. To accept the file "
            f"as it is, remove its line from {SUMS}"
        )
    path = json.dumps(str(run.policy.resolve()))
    start = ("revision", "gguf_file", "lora", "warm_start")  # of what the run began with
    overrides = [f"policy={{use: pretrained, path: {path}}}", *(f"policy.{knob}=" for knob in start)]
    recipe = run.load_recipe(overrides, trust=trust)
    with of_recipe():
        actor, tokenizer = recipe.policy.load(alphabet="", seed=0)
    sampler = Sampler(recipe, actor, tokenizer, say=lambda line: say(line, file=sys.stderr))
    try:
        metrics = evaluate(sampler) | evaluate_frozen(sampler)
        return metrics | (evaluate_sampled(sampler, samples, ks) if samples else {})
    finally:
        sampler.close()
        close_workers()


def closing_table(run: RunFolder, seconds: float) -> Table:
    """First, best and last of what matters, from metrics.jsonl."""
    events = run.metrics
    table = Table(title=f"{run}  ({int(seconds // 60)} min {int(seconds % 60)} s)", title_justify="left")
    for column in ("", "first", "last", "mean"):
        table.add_column(column, justify="left" if not column else "right")
    for name in among(CLOSING, (name for event in events for name in event)):
        told = [event for event in events if name in event or (is_count(name) and "train/reward" in event)]
        values = [event.get(name, 0.0) for event in told if event["iteration"] > 0 or name.startswith("eval")]
        if values:
            table.add_row(
                name,
                *(f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}" for x in (values[0], values[-1], sum(values) / len(values))),
            )
    return table
