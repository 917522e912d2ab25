"""What watches a run: the recorder (metrics, evaluation, samples, checkpoints) and the live display."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from rich.console import Console
from rich.live import Live
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from cct.loading import dump_recipe
from cct.policy.weights import save
from cct.recipe import Recipe

from .folder import checkpoints, drop_lines_after, write_whole
from .module import CreditModule, RolloutData
from .profile import Profile
from .ranks import Ranks
from .rollouts import drop_after, store
from .rows import evaluate


class JsonLinesLogger(Logger):
    """metrics.jsonl: one JSON object per event, with its iteration."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    @property
    def name(self) -> str:
        return "jsonl"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: recipe.yaml holds them."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"iteration": step, **metrics}) + "\n")


class Recorder(Callback):
    """After every iteration: metrics to the loggers, samples, evaluation and checkpoint where due."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path | None,
        tokenizer: PreTrainedTokenizerBase,
        display: Display,
        profile: Profile | None = None,
    ):
        self.recipe, self._folder, self.tokenizer, self.display, self.profile = recipe, folder, tokenizer, display, profile
        self.resumed: int | None = None  # the iteration after which a run is gone on with, until it has done one
        self.pause = 0.0  # seconds since sampling began that are no part of the iteration

    @property
    def folder(self) -> Path:
        assert self._folder is not None
        return self._folder

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        self._folder = trainer.strategy.broadcast(self._folder)  # the first process made it

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, CreditModule)
        self.resumed = trainer.datamodule.done  # type: ignore[attr-defined]
        if module.current_epoch == 0:
            started = time.perf_counter()
            self._log(trainer, self._evaluate(trainer, 0), iteration=0)
            self.pause = time.perf_counter() - started  # Lightning had sampled the first iteration before

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.display.show(stage="update")

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, CreditModule)
        iteration, data = module.iteration, trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, RolloutData)
        ended = data.finish(iteration)
        if trainer.is_global_zero and self.resumed is not None:
            self._take_over(self.resumed)
        self.resumed = None
        metrics = ended.metrics | module.update_metrics()
        seconds, self.pause = time.perf_counter() - ended.started - self.pause, 0.0
        metrics |= {"time/iteration": seconds, "train/tokens_per_second": metrics["train/tokens"] / seconds}
        last = iteration == self.recipe.training.iterations
        if iteration > 0:
            metrics |= data.collector.sync()
        if iteration > 0 and (last or iteration % self.recipe.evaluation.every == 0):
            metrics |= self._evaluate(trainer, iteration)
        for line in ended.warnings:
            self.display.say(line)
        self._log(trainer, metrics, iteration)
        if self.profile is not None:
            self.profile.took(iteration, metrics)
        if trainer.is_global_zero:
            with (self.folder / "samples.jsonl").open("a", encoding="utf-8") as file:
                for sample in ended.samples:
                    file.write(json.dumps({"iteration": iteration, **asdict(sample)}, ensure_ascii=False) + "\n")
            store(ended.rollout, self.folder, iteration, self.recipe.logging)
        if last or (iteration > 0 and iteration % self.recipe.training.checkpoint_every == 0):
            whole = self.folder / "checkpoints" / f"{iteration:06d}.ckpt"
            unfinished = whole.with_name(f".{whole.name}")  # a run may be killed at any time
            trainer.save_checkpoint(unfinished)
            if trainer.is_global_zero:
                _put(unfinished, whole)
            for old in checkpoints(self.folder)[: -self.recipe.training.keep_checkpoints] if trainer.is_global_zero else []:
                _remove(old)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Export while every process still holds its part of the weights."""
        assert isinstance(module, CreditModule)
        self.display.show(stage="export")
        unfinished = self.folder / ".policy"
        save(module.agent.actor, self.tokenizer, unfinished if trainer.is_global_zero else None)
        if trainer.is_global_zero:
            _put(unfinished, self.folder / "policy")

    def _take_over(self, reached: int) -> None:
        """A resumed run has done its first iteration, so nothing refused it: what came after its checkpoint goes."""
        write_whole(self.folder / "recipe.yaml", dump_recipe(self.recipe))
        drop_lines_after(self.folder, reached)
        drop_after(self.folder, reached)
        for later in [path for path in checkpoints(self.folder) if int(path.stem) > reached]:  # they could not be read
            _remove(later)

    def _evaluate(self, trainer: Trainer, iteration: int) -> dict[str, float]:
        data = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, RolloutData)
        self.display.show(stage="evaluate")
        started = time.perf_counter()
        engine, say = data.collector.engine, self.display.say
        found = evaluate(self.recipe, engine, self.tokenizer, Ranks.current(), iteration, say)
        return found | {"time/evaluate": time.perf_counter() - started}

    def _log(self, trainer: Trainer, metrics: dict[str, float], iteration: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=iteration)
            logger.save()
        self.display.iteration(iteration, metrics)


def _put(unfinished: Path, place: Path) -> None:
    """Move a file or folder to its place, which it takes from an older one."""
    if place.exists():
        _remove(place)
    unfinished.rename(place)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()  # DeepSpeed's checkpoints are folders


class Display:
    """Live progress on a terminal; one line per iteration elsewhere."""

    def __init__(self, recipe: Recipe, console: Console):
        self.recipe, self.console = recipe, console
        self.state: dict[str, Any] = {"stage": "load", "iteration": "-"}
        self.history: list[tuple[int, dict[str, float]]] = []
        self.live = (
            Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Display:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live:
            self.live.stop()

    def show(self, **state: Any) -> None:
        self.state.update(state)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def warm_start(self, step: int, steps: int, loss: float) -> None:
        self.show(stage="warm start", step=f"{step}/{steps}", loss=f"{loss:.3f}")
        if step % 100 == 0 or step == steps:
            self.say(f"warm start  step {step}/{steps}  loss {loss:.3f}")

    def iteration(self, iteration: int, metrics: dict[str, float]) -> None:
        self.history.append((iteration, metrics))
        training = self.recipe.training
        times = [m["time/iteration"] for _, m in self.history if "time/iteration" in m]
        self.state = {"stage": self.state["stage"], "iteration": f"{iteration}/{training.iterations}"}
        if times:
            left = (training.iterations - iteration) * sum(times[-5:]) / len(times[-5:])
            self.state |= {
                "tokens/s": f"{metrics['train/tokens_per_second']:,.0f}",
                "reward": f"{metrics['train/reward']:.3f}",
                "time left": f"{int(left // 60)}:{int(left % 60):02d}",
            }
        if "critic/explained_variance" in metrics:
            self.state["explained variance"] = f"{metrics['critic/explained_variance']:.3f}"
        accuracy = next((m["eval/accuracy"] for _, m in reversed(self.history) if "eval/accuracy" in m), None)
        if accuracy is not None:
            self.state["held-out accuracy"] = f"{accuracy:.3f}"
        if not self.live or "eval/accuracy" in metrics:
            kind = "critic warm-up" if iteration <= 0 and times else "iteration"
            self.say(
                f"{kind} {'  '.join(f'{k} {v}' for k, v in self.state.items() if k not in ('stage', 'iteration'))}".replace(
                    kind, f"{kind} {iteration}", 1
                )
            )

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row(f"[bold]{self.recipe.name}[/bold]", *(f"[dim]{key}[/dim] {value}" for key, value in self.state.items()))
        return table
