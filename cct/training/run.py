"""A run from start to end: its folder, the policy, Lightning, the export."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from lightning import Callback, Trainer
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from rich.console import Console
from rich.table import Table

from cct.evidence import close_workers
from cct.loading import dump_recipe, load_recipe
from cct.recipe import Recipe, RecipeError

from .building import build
from .callbacks import Display, JsonLinesLogger, Recorder
from .collect import Collector
from .export import export, newest_readable, quiet
from .folder import checkpoints, has_begun, must_be_trained, new_folder, read_metrics, to_resume, write_whole
from .module import CreditModule, RolloutData
from .pass_at_k import evaluate_sampled
from .profile import Profile
from .ranks import Ranks
from .rehearsal import rehearse
from .rows import evaluate, evaluate_frozen
from .strategies import strategy_of


def start(recipe: Recipe, root: Path, *, console: Console, into: Path | None = None, profile: bool = False) -> Path | None:
    """Train into a new folder under `root`, or into the folder `into`; returned, None on other processes than the first.

    However it ends: a folder in which nothing was found out is not left behind.
    """
    folder: Path | None = None
    try:
        if is_first() and into is not None:
            into.mkdir(parents=True, exist_ok=True)
            if any(into.iterdir()):
                raise RecipeError(f"{into}: something is there already; name a new folder, or go on with --resume")
            folder = into
        elif is_first():
            folder = new_folder(root, recipe.name)
    except OSError as error:
        raise RecipeError(f"{into or root}: no folder can be made there ({error})") from None
    try:
        train(recipe, folder, console=console, profile=profile)
    except BaseException as error:  # an interrupt too
        if folder is not None and not has_begun(folder):
            shutil.rmtree(folder)
            if not isinstance(error, RecipeError):
                console.print(f"nothing was trained yet; {folder} is removed", highlight=False, soft_wrap=True)
        raise
    return folder


def is_first() -> bool:
    """Whether this is the process that writes; the others learn the folder from it."""
    return (_get_rank() or 0) == 0


def train(
    recipe: Recipe, folder: Path | None, *, console: Console, checkpoint: Path | None = None, profile: bool = False
) -> None:
    """Train into `folder` (None on other processes than the first), from `checkpoint` where given; print the closing table.

    profile: also print where the time went, and write a trace of one iteration.
    Raises TrainingStopped on NaN or failing evidence; checkpoints taken so far stay.
    """
    quiet()
    started = time.perf_counter()
    if folder is not None:
        if checkpoint is None:  # or it is written when an iteration is done
            write_whole(folder / "recipe.yaml", dump_recipe(recipe))
        (folder / "checkpoints").mkdir(exist_ok=True)
    else:
        console = Console(quiet=True)
    with Display(recipe, console) as display:
        agent, tokenizer, reference = build(recipe, display.warm_start, display.say)
        if folder is not None:
            rehearse(recipe, agent.actor, tokenizer, folder)
        collector = Collector(recipe, agent, tokenizer, reference)
        profiler = Profile(folder, console, recipe.training.precision == "bf16") if profile else None

        def on_stage(stage: str) -> None:
            display.show(stage=stage)
            if profiler is not None:
                profiler.on_stage(stage)

        collector.on_stage = on_stage
        callbacks: list[Callback] = [] if profiler is None else [profiler]
        callbacks.append(Recorder(recipe, folder, tokenizer, display, profiler))
        trainer = Trainer(
            max_epochs=recipe.training.critic_warmup + recipe.training.iterations,
            gradient_clip_val=recipe.training.gradient_clip,
            precision="bf16-mixed" if recipe.training.precision == "bf16" else "32-true",
            reload_dataloaders_every_n_epochs=1,
            use_distributed_sampler=False,
            strategy=strategy_of(recipe),
            devices=recipe.training.devices,
            num_nodes=recipe.training.nodes,
            logger=_loggers(recipe, folder, int(checkpoint.stem) if checkpoint else 0) if folder is not None else [],
            callbacks=callbacks,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        try:
            trainer.fit(
                CreditModule(recipe, agent), datamodule=RolloutData(recipe, collector), ckpt_path=checkpoint, weights_only=False
            )
        except SystemExit as left:
            if isinstance(left.__context__, KeyboardInterrupt):  # Lightning makes an exit of it
                raise KeyboardInterrupt from None
            raise
        finally:
            collector.close()
            close_workers()
            saved = checkpoints(folder) if folder else []
            if display.history and saved and int(saved[-1].stem) < recipe.training.iterations:
                display.say(f"stopped early; go on with: cct run --resume {folder}")
    if folder is not None:
        console.print(closing_table(folder, time.perf_counter() - started))


def resume(folder: Path, recipe: Recipe | None, overrides: Sequence[str], *, console: Console, profile: bool = False) -> None:
    """Go on from the newest checkpoint of a run that can be read, under its own recipe or a given one.

    Events after the checkpoint are dropped from the logs: they are made again. A run that was cut between its last
    checkpoint and the export is exported. Raises RecipeError, and leaves the folder as it is, where it cannot be gone on with.
    """
    recipe, changed = to_resume(folder, recipe, overrides)
    checkpoint, skipped = newest_readable(folder)
    if is_first():
        for line in (*skipped, *(f"resuming with {change}" for change in changed)):
            console.print(line, highlight=False, soft_wrap=True)
    if int(checkpoint.stem) >= recipe.training.iterations:
        if is_first():
            export(folder, folder / "policy")
            console.print(f"{folder}: all iterations were done; wrote policy/")
        return
    train(recipe, folder if is_first() else None, console=console, checkpoint=checkpoint, profile=profile)


def evaluate_run(folder: Path, samples: int = 0, ks: Sequence[int] = (1,)) -> dict[str, float]:
    """Greedy evaluation of a run's exported policy on the held-out problems and on the frozen sets.

    samples: so many responses to each problem are sampled besides, for avg@samples and pass@k of each of `ks`.
    Raises TrainingStopped where evidence fails under `on_error: fail`.
    """
    quiet()
    if samples and not (ks and 1 <= min(ks) <= max(ks) <= samples):
        raise RecipeError(f"pass@k from {samples} samples: each k is from 1 to {samples}; found {', '.join(map(str, ks))}")
    must_be_trained(folder)
    path = json.dumps(str((folder / "policy").resolve()))
    start = ("revision", "gguf_file", "lora", "warm_start")  # of what the run began with
    recipe = load_recipe(
        folder / "recipe.yaml",
        [f"policy={{use: pretrained, path: {path}}}", *(f"policy.{knob}=" for knob in start)],
    )
    actor, tokenizer = recipe.policy.load(alphabet="", seed=0)
    engine = recipe.generation.open(actor, tokenizer)
    try:
        metrics = evaluate(recipe, engine, tokenizer, Ranks()) | evaluate_frozen(recipe, engine, tokenizer, Ranks())
        return metrics | (evaluate_sampled(recipe, engine, tokenizer, samples, ks) if samples else {})
    finally:
        engine.close()
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
