"""A run from start to end: its folder, the policy, Lightning, the export."""

from __future__ import annotations

import json
import logging
import shutil
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from lightning import Callback, Trainer
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cct.evidence import close_workers
from cct.loading import changes, dump_recipe, load_recipe
from cct.policy.weights import add_lora, without_dropout
from cct.recipe import Recipe, RecipeError
from cct.rollout import derive_seed

from .agent import Agent
from .callbacks import Display, JsonLinesLogger, Recorder, checkpoints
from .collect import Collector
from .export import export
from .module import CreditModule, RolloutData
from .pass_at_k import evaluate_sampled
from .profile import Profile
from .ranks import Ranks
from .rollouts import drop_after
from .rows import encode, evaluate, evaluate_frozen
from .strategies import strategy_of
from .warm_start import warm_start

LOOK_AHEAD = 2048  # training prompts, the warm-up's besides, that are measured before the run; others when their turn comes


def new_folder(root: Path, name: str) -> Path:
    """`root/name/001`, or the next number that is free; created."""
    number = 1 + max([int(p.name) for p in (root / name).glob("*") if p.name.isdigit()], default=0)
    while True:
        folder = root / name / f"{number:03d}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # another run took it
            number += 1


def build(recipe: Recipe, report: Any = lambda *a: None) -> tuple[Agent, PreTrainedTokenizerBase, PreTrainedModel | None]:
    """Agent at its starting point, tokenizer, and the reference model where a part needs one.

    Raises RecipeError where a part cannot work here, TrainingStopped where one of the first prompts is longer than the model
    can take.
    """
    training = recipe.training
    if training.threads:
        torch.set_num_threads(training.threads)
    try:
        for part in recipe.parts.values():
            part.ready()
        actor, tokenizer = warm_start(recipe.policy, recipe.task, recipe.seed, report)
        text = actor.config.get_text_config()
        for statistic in recipe.transport.statistics.values():
            statistic.fits(text.num_hidden_layers, text.num_attention_heads)
    except (ValueError, OSError) as error:
        raise RecipeError(str(error)) from error
    last = min(training.iterations, max(1, LOOK_AHEAD // training.prompts_per_iteration))
    encode(recipe, actor, tokenizer, recipe.prompts(1 - training.critic_warmup, last))
    without_dropout(actor).train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(recipe.seed, "critic"))
        try:
            critic = recipe.critic.build(actor, recipe.reward_bounds) if recipe.critic else None
        except ValueError as error:
            raise RecipeError(str(error)) from error
    reference = None
    if recipe.needs("reference"):
        reference = type(actor)(actor.config)
        reference.load_state_dict(actor.state_dict())
        reference.requires_grad_(False).eval()
    if recipe.policy.lora:
        add_lora(actor, **recipe.policy.lora.model_dump())
    if training.gradient_checkpointing:
        actor.gradient_checkpointing_enable({"use_reentrant": False})
    bf16 = training.precision == "bf16"
    agent = Agent(actor, critic, recipe.generation.temperature, bf16=bf16, logits_at_once=training.logits_at_once)
    return agent, tokenizer, reference


def start(recipe: Recipe, root: Path, *, console: Console, into: Path | None = None, profile: bool = False) -> Path | None:
    """Train into a new folder under `root`, or into the folder `into`; returned, None on other processes than the first."""
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
    except RecipeError:  # nothing was trained
        if folder is not None:
            shutil.rmtree(folder)
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
    _quiet()
    strategy = strategy_of(recipe.training)
    started = time.perf_counter()
    loggers: list[Logger] = []
    if folder is not None:
        (folder / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
        (folder / "checkpoints").mkdir(exist_ok=True)
        loggers = [
            JsonLinesLogger(folder / "metrics.jsonl"),
            _logger(recipe, folder, int(checkpoint.stem) if checkpoint else 0),
        ]
    else:
        console = Console(quiet=True)
    with Display(recipe, console) as display:
        agent, tokenizer, reference = build(recipe, display.warm_start)
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
            strategy=strategy,
            devices=recipe.training.devices,
            num_nodes=recipe.training.nodes,
            logger=loggers,
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
        finally:
            collector.close()
            close_workers()
            saved = checkpoints(folder) if folder else []
            if saved and int(saved[-1].stem) < recipe.training.iterations:
                display.say(f"stopped early; go on with: cct run --resume {folder}")
    if folder is not None:
        console.print(closing_table(folder, time.perf_counter() - started))


def resume(folder: Path, recipe: Recipe | None, overrides: Sequence[str], *, console: Console, profile: bool = False) -> None:
    """Go on from the newest checkpoint of a run, under its own recipe or a given one.

    Events after the checkpoint are dropped from the logs: they are made again. A run that was cut between its last
    checkpoint and the export is exported. Raises RecipeError where there is nothing to resume.
    """
    if not (folder / "recipe.yaml").is_file():
        raise RecipeError(f"{folder}: not a run folder (no recipe.yaml)")
    saved = checkpoints(folder)
    if not saved:
        raise RecipeError(f"{folder}: no checkpoint was taken yet; start the recipe again")
    recipe = recipe or load_recipe(folder / "recipe.yaml", overrides)
    reached = int(saved[-1].stem)
    if reached >= recipe.training.iterations and not (folder / "policy").exists():
        if is_first():
            export(folder, folder / "policy")
            console.print(f"{folder}: all iterations were done; wrote policy/")
        return
    if reached >= recipe.training.iterations:
        raise RecipeError(
            f"{folder}: complete, all {recipe.training.iterations} iterations are done; "
            f"`--set training.iterations={2 * reached}` would train on"
        )
    if not is_first():
        return train(recipe, None, console=console, checkpoint=saved[-1], profile=profile)
    before = load_recipe(folder / "recipe.yaml")
    for change in changes(before.model_dump(mode="json"), recipe.model_dump(mode="json")):
        console.print(f"resuming with {change}", highlight=False)
    for name in ("metrics.jsonl", "samples.jsonl"):
        if (folder / name).is_file():
            lines = (folder / name).read_text(encoding="utf-8").split("\n")[:-1]  # a last one that was cut has no end
            kept = "".join(f"{line}\n" for line in lines if json.loads(line)["iteration"] <= reached)
            (folder / f".{name}").write_text(kept, encoding="utf-8")
            (folder / f".{name}").replace(folder / name)
    drop_after(folder, reached)
    train(recipe, folder, console=console, checkpoint=saved[-1], profile=profile)


def evaluate_run(folder: Path, samples: int = 0, ks: Sequence[int] = (1,)) -> dict[str, float]:
    """Greedy evaluation of a run's exported policy on the held-out problems and on the frozen sets.

    samples: so many responses to each problem are sampled besides, for avg@samples and pass@k of each of `ks`.
    Raises TrainingStopped where evidence fails under `on_error: fail`.
    """
    _quiet()
    if samples and not (ks and 1 <= min(ks) <= max(ks) <= samples):
        raise RecipeError(f"pass@k from {samples} samples: each k is from 1 to {samples}; found {', '.join(map(str, ks))}")
    if not (folder / "policy").is_dir():
        raise RecipeError(f"{folder}: no exported policy (policy/); the run has not ended yet")
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


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The events of metrics.jsonl; a last line that is being written is left out."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]


def closing_table(folder: Path, seconds: float) -> Table:
    """First, best and last of what matters, from metrics.jsonl."""
    events = [event for event in read_metrics(folder)]
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


def _logger(recipe: Recipe, folder: Path, first: int) -> Logger:
    version = f"from_{first:06d}"
    if recipe.logging.logger == "tensorboard":
        return TensorBoardLogger(folder, name="logs", version=version)
    return CSVLogger(folder, name="logs", version=version)


def _quiet() -> None:
    """Lightning's and transformers' chatter that has no meaning for a run made of rollouts."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="lightning")
