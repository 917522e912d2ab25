"""A run from start to end: its folder, the policy, Lightning, the export."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from lightning import Callback, Trainer
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from rich.console import Console
from rich.table import Table

from cct.evidence import close_workers
from cct.loading import dump_recipe
from cct.recipe import Recipe, RecipeError
from cct.system.files import LOCK, SUMS, WriteError, damage, remove, write_text, writing
from cct.system.signals import Ending, answered
from cct.system.terminal import say

from .building import build, without_warm_start
from .callbacks import Display, JsonLinesLogger, Recorder
from .evaluation import evaluate, evaluate_frozen, evaluate_sampled
from .export import export, newest_readable, quiet, rehearse
from .folder import checkpoints, has_begun, load_run, must_be_trained, new_folder, only_run, read_metrics, to_resume
from .loop import Loop
from .processes import OneFile, strategy_of
from .profile import Profile
from .sampler import Sampler
from .stopped import of_recipe
from .user_callbacks import made, must_be_plain, named


def start(
    recipe: Recipe,
    root: Path,
    *,
    console: Console,
    into: Path | None = None,
    profile: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Train into a new folder under `root`, or into the folder `into`; returned on every process.

    However it ends: a folder in which nothing was found out is not left behind. Raises WriteError where there can be none.
    """
    if not is_first():
        return train(recipe, None, console=console, profile=profile, callbacks=callbacks)
    if into is not None and into.exists() and not (into.is_dir() and not any(into.iterdir())):
        raise RecipeError(f"{into}: something is there already; name a new folder, or go on with --resume")
    folder = into or new_folder(root, recipe.name)
    with only_run(folder):
        if any(path.name != LOCK for path in folder.iterdir()):  # another run was faster
            raise RecipeError(f"{folder}: something is there already; name a new folder, or go on with --resume")
        try:
            train(recipe, folder, console=console, profile=profile, callbacks=callbacks)
        except BaseException as error:  # an interrupt too
            if not has_begun(folder):
                remove(folder)
                if not isinstance(error, RecipeError):
                    console.print(f"nothing was trained yet; {folder} is removed", soft_wrap=True)
            raise
    return folder


def is_first() -> bool:
    """Whether this is the process that writes; the others learn the folder from it."""
    return (_get_rank() or 0) == 0


def train(
    recipe: Recipe,
    folder: Path | None,
    *,
    console: Console,
    checkpoint: Path | None = None,
    profile: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Train into `folder` (None on other processes than the first), from `checkpoint` where given; print the closing table.

    profile: also print where the time went, and write a trace of one iteration. callbacks: Lightning's, besides the recipe's.
    Returns the folder, on every process.
    Raises TrainingStopped on NaN or failing evidence; checkpoints taken so far stay.
    """
    quiet()
    started, ending = time.perf_counter(), Ending(folder is not None)
    asked = [(callback.use, made(callback)) for callback in recipe.callbacks]
    callbacks = [*(callback for _, callback in asked), *callbacks]
    if folder is not None:
        if checkpoint is None:  # or it is written when an iteration is done
            write_text(folder / "recipe.yaml", dump_recipe(recipe))
    else:
        console = Console(quiet=True)
    with Display(recipe, console) as display:
        begun = recipe if checkpoint is None else without_warm_start(recipe)
        agent, tokenizer, reference = build(begun, display.warm_start, display.say)
        if folder is not None:
            with writing(folder / "policy"):
                rehearse(recipe, agent.actor, tokenizer, folder)
        loop = Loop(recipe, agent, tokenizer, reference, display.say)
        profiler = Profile(folder, console, recipe.training.precision == "bf16") if profile else None

        def on_stage(stage: str) -> None:
            ending.answer()
            display.show(stage=stage)
            if profiler is not None:
                profiler.on_stage(stage)

        loop.on_stage = on_stage
        if profiler is not None:
            loop.before_update = lambda minibatches: profiler.before_update(agent, loop.iteration, minibatches)
        resumed = int(checkpoint.stem) if checkpoint else None
        recorder = Recorder(recipe, folder, tokenizer, display, ending, profiler, resumed)
        with named(asked):
            must_be_plain(asked)
            trainer = _trainer(recipe, folder, resumed or 0, [*([profiler] if profiler else []), recorder, *callbacks])
        try:
            with answered(ending), named(asked):
                trainer.fit(loop, ckpt_path=checkpoint, weights_only=True)
        except WriteError:
            if folder is None:  # the first process says it
                raise SystemExit(1) from None
            raise
        except OSError as error:
            if isinstance(error.__context__, WriteError):  # a logger that writes once more when it is closed
                raise error.__context__ from None
            raise
        except SystemExit as left:
            if isinstance(left.__context__, KeyboardInterrupt) and folder is not None:  # Lightning makes an exit of it
                raise left.__context__ from None
            raise
        finally:
            ending.close()
            loop.sampler.close()
            close_workers()
            if folder is not None and any("train/reward" in metrics for _, metrics in display.history):
                _say_how_to_go_on(recipe, folder, display.say)
    if folder is not None:
        console.print(closing_table(folder, time.perf_counter() - started))
    return recorder.folder


def _trainer(recipe: Recipe, folder: Path | None, first: int, callbacks: list[Callback]) -> Trainer:
    return Trainer(
        max_epochs=recipe.training.critic_warmup + recipe.training.iterations,
        precision="bf16-mixed" if recipe.training.precision == "bf16" else "32-true",
        use_distributed_sampler=False,
        strategy=strategy_of(recipe),
        devices=recipe.training.devices,
        num_nodes=recipe.training.nodes,
        logger=_loggers(recipe, folder, first) if folder is not None else [],
        callbacks=callbacks,
        plugins=[] if recipe.training.strategy.startswith("deepspeed") else [OneFile()],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _say_how_to_go_on(recipe: Recipe, folder: Path, say: Callable[[str], None]) -> None:
    """Of a run that ended before its last iteration."""
    saved = checkpoints(folder)
    if saved and int(saved[-1].stem) < recipe.training.iterations:
        say(f"stopped early; go on with: cct run --resume {shlex.quote(str(folder))}")
    elif not saved:
        every = recipe.training.checkpoint_every
        say(
            f"stopped before the first checkpoint (training.checkpoint_every is {every}), so nothing can be resumed; start the "
            f"recipe again. {folder} keeps the metrics"
        )


def resume(
    folder: Path,
    recipe: Recipe | None,
    overrides: Sequence[str],
    *,
    console: Console,
    profile: bool = False,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Go on from the newest checkpoint of a run that can be read, under its own recipe or a given one.

    Events after the checkpoint are dropped from the logs: they are made again. A run that was cut between its last
    checkpoint and the export is exported. Raises RecipeError, and leaves the folder as it is, where it cannot be gone on with.
    """
    to_resume(folder, recipe, overrides)
    with only_run(folder) if is_first() else nullcontext():
        recipe, changed = to_resume(folder, recipe, overrides)
        checkpoint, skipped = newest_readable(folder)
        if is_first():
            for line in (*skipped, *(f"resuming with {change}" for change in changed)):
                console.print(line, soft_wrap=True)
        if int(checkpoint.stem) < recipe.training.iterations:
            options = {"checkpoint": checkpoint, "profile": profile, "callbacks": callbacks}
            train(recipe, folder if is_first() else None, console=console, **options)  # type: ignore[arg-type]
        elif is_first():
            export(folder, folder / "policy", trust=True)
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
    must_be_trained(folder)
    if (why := damage(folder, folder / "policy")) is not None:
        raise RecipeError(
            f"{folder}: {why}; `cct export {folder} FOLDER` writes the policy again from a checkpoint, and without its line in "
            f"{SUMS} the file is taken as it is"
        )
    path = json.dumps(str((folder / "policy").resolve()))
    start = ("revision", "gguf_file", "lora", "warm_start")  # of what the run began with
    overrides = [f"policy={{use: pretrained, path: {path}}}", *(f"policy.{knob}=" for knob in start)]
    recipe = load_run(folder, overrides, trust=trust)
    with of_recipe():
        actor, tokenizer = recipe.policy.load(alphabet="", seed=0)
    sampler = Sampler(recipe, actor, tokenizer, say=lambda line: say(line, file=sys.stderr))
    try:
        metrics = evaluate(sampler) | evaluate_frozen(sampler)
        return metrics | (evaluate_sampled(sampler, samples, ks) if samples else {})
    finally:
        sampler.close()
        close_workers()


def closing_table(folder: Path, seconds: float) -> Table:
    """First, best and last of what matters, from metrics.jsonl."""
    events = read_metrics(folder)
    table = Table(title=f"{folder}  ({int(seconds // 60)} min {int(seconds % 60)} s)", title_justify="left")
    for column in ("", "first", "last", "mean"):
        table.add_column(column, justify="left" if not column else "right")
    for name in (
        "eval/accuracy",
        "train/reward",
        "train/length",
        "critic/explained_variance",
        "gate/mean",
        "policy/clip_fraction",
        "policy/approx_kl",
        "train/tokens_per_second",
    ):
        values = [event[name] for event in events if name in event and (event["iteration"] > 0 or name.startswith("eval"))]
        if values:
            table.add_row(
                name,
                *(f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}" for x in (values[0], values[-1], sum(values) / len(values))),
            )
    return table


def _loggers(recipe: Recipe, folder: Path, first: int) -> list[Logger]:
    make = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}[recipe.logging.logger]
    return [JsonLinesLogger(folder / "metrics.jsonl"), make(folder, name="logs", version=f"from_{first:06d}")]
