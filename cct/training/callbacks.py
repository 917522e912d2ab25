"""Observers of a run: the recorder (metrics, samples, checkpoints), the live display, and the recipe's callbacks."""

from __future__ import annotations

import io
import json
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from cct.agent.export import export
from cct.errors import TrainingStopped
from cct.loading import dump_recipe
from cct.loggers import log_samples
from cct.metrics import TERMINAL
from cct.policy.checkpoints import why_unreadable
from cct.policy.weights import save
from cct.recipe import Recipe, RecipeError
from cct.registry import RAISED, error_text
from cct.run_folder import RunFolder
from cct.system.files import NO_ROOM, WriteError, append, kept, write_text, writing
from cct.system.signals import Ending, Interrupted
from cct.system.terminal import shortened
from cct.watching import LightningCallback

from .loop import Iteration, Loop
from .processes import Ranks

MOST_OF_A_SAMPLE = 80  # characters of a prompt and of a response that are shown on a line


class Recorder(Checkpoint):
    """After every iteration: metrics to the loggers, samples, rollouts, and a checkpoint where due. At the end: the export.

    Lightning calls checkpoint callbacks after all others, so whether one of them stops the run is known here.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder | None,
        tokenizer: PreTrainedTokenizerBase,
        display: Display,
        ending: Ending,
        resumed: int | None = None,
    ):
        self.recipe, self._folder, self.tokenizer = recipe, folder, tokenizer
        self.display, self.ending = display, ending
        self.best: tuple[int, float] | None = None  # iteration and value of `evaluation.best`
        self.ended = resumed or 0  # the newest iteration
        self.resumed = resumed  # the iteration of the checkpoint, until the resumed run has done one

    @property
    def folder(self) -> RunFolder:
        assert self._folder is not None
        return self._folder

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        self._folder = trainer.strategy.broadcast(self._folder)  # the first process made it

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, Loop)
        reached = self.resumed if self.resumed is not None else 0
        if trainer.is_global_zero:
            self.best = self.folder.best(self.recipe, reached)
        if module.current_epoch == 0:
            self._log(trainer, module.evaluate(0), iteration=0)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, Loop) and module.ended is not None
        ended, module.ended = module.ended, None
        iteration, training = ended.number, self.recipe.training
        self.ended = iteration
        with self._agreed():
            if trainer.is_global_zero and self.resumed is not None:
                self._take_over(self.resumed)
        self.resumed = None
        self._log(trainer, ended.metrics, iteration)
        with self._agreed():
            if trainer.is_global_zero:
                samples = [{"iteration": iteration, **sample} for sample in samples_of(ended, self.recipe.logging.samples)]
                append(self.folder.samples_file, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in samples))
                log_samples(trainer.loggers, samples, iteration)
                if "eval/accuracy" in ended.metrics and samples:
                    self.display.sample(samples[0])
                self.folder.store(ended.rollout, iteration, self.recipe.logging)
        asked = next((number for number in Ranks.current().gather(self.ending.asked) if number is not None), None)
        last = iteration == training.iterations or trainer.should_stop
        due = iteration % training.checkpoint_every == 0 or asked is not None
        if self._is_best(iteration, ended.metrics) or last or (iteration > 0 and due):
            self._checkpoint(trainer, iteration)
        if asked is not None and not last:
            self.ending.close()
            raise Interrupted(asked)
        if iteration > 0:
            self.ending.lap()

    def _checkpoint(self, trainer: Trainer, iteration: int) -> None:
        """Called by all processes; the parts of a DeepSpeed checkpoint are collected at the first one's path."""
        path = self.folder.checkpoint_file(iteration)
        with self._agreed(), ExitStack() as stack:
            place = stack.enter_context(kept(self.folder.path, path)) if trainer.is_global_zero else path
            stack.enter_context(writing(path))
            trainer.save_checkpoint(trainer.strategy.broadcast(place))
            if (refused := getattr(trainer.strategy.checkpoint_io, "refused", None)) is not None:
                raise refused
        if trainer.is_global_zero:
            older = self.folder.checkpoints[: -self.recipe.training.keep_checkpoints]
            self.folder.drop(*(path for path in older if self.best is None or int(path.stem) != self.best[0]))

    def _is_best(self, iteration: int, metrics: dict[str, float]) -> bool:
        """Whether its checkpoint is to be kept as the best one; the first process decides."""
        name = self.recipe.evaluation.best
        if name is None:
            return False
        event = {"iteration": iteration, **metrics}
        before = [{"iteration": self.best[0], name: self.best[1]}] if self.best is not None else []
        self.best = Ranks.current().gather(self.recipe.evaluation.best_of([*before, event]))[0]
        return self.best is not None and self.best[0] == iteration

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Export while every process still has its part of the weights."""
        assert isinstance(module, Loop)
        self.display.show(stage="export")
        if self.best is not None and self.best[0] != self.ended:
            with self._agreed():
                if trainer.is_global_zero:
                    export(self.folder.path, self.folder.policy, self.best[0], trust=True, replace=True)
                    self.display.say(f"policy/ is that of iteration {self.best[0]}, the best by {self.recipe.evaluation.best}")
            return
        with self._agreed(), kept(self.folder.path, self.folder.policy) if trainer.is_global_zero else nullcontext() as place:
            save(module.agent.actor, self.tokenizer, place)

    @contextmanager
    def _agreed(self) -> Iterator[None]:
        """If this raises on the first process, raise on every process, so that none waits for it."""
        raised: Exception | None = None
        try:
            yield
        except Exception as error:  # a logger's or a callback's too, of any kind
            raised = error
        told = raised if raised is None or isinstance(raised, WriteError) else TrainingStopped(error_text(raised))
        found = next((error for error in Ranks.current().gather(told) if error is not None), None)
        if raised is not None and not isinstance(raised, WriteError):
            raise raised
        if found is not None:
            raise found

    def _take_over(self, reached: int) -> None:
        """A resumed run has done its first iteration, so it was not refused: remove what came after its checkpoint."""
        write_text(self.folder.recipe_file, dump_recipe(self.recipe))
        self.folder.drop_after(reached)

    def _log(self, trainer: Trainer, metrics: dict[str, float], iteration: int) -> None:
        with self._agreed(), writing(self.folder.path / "logs"):
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=iteration)
                logger.save()
        self.display.iteration(iteration, metrics)


def samples_of(ended: Iteration, count: int) -> list[dict[str, Any]]:
    """The first responses of an iteration, for people, in the order of the prompts; `advantage` is the mean over the tokens.

    An episode has its turns; one of several rows the advantage of its first.
    """
    mask = ended.rollout.mask
    means = (ended.credit.advantages.masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)).tolist()
    every = sorted(zip(ended.order, ended.rows, means, strict=True), key=lambda each: each[0])
    return [
        {
            "prompt": row.prompt.text,
            "response": row.response.text,
            "reward": sum(row.rewards),
            "advantage": mean,
            "finished": row.response.finished,
            **({"turns": [asdict(turn) for turn in row.response.turns]} if row.response.turns else {}),
        }
        for _, row, mean in [each for each in every if each[1].order == 0][:count]
    ]


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
        self.console.print(text, soft_wrap=True)

    def warm_start(self, step: int, steps: int, loss: float) -> None:
        self.show(stage="warm start", step=f"{step}/{steps}", loss=f"{loss:.3f}")
        if step % 100 == 0 or step == steps:
            self.say(f"warm start  step {step}/{steps}  loss {loss:.3f}")

    def iteration(self, iteration: int, metrics: dict[str, float]) -> None:
        self.history.append((iteration, metrics))
        iterations = self.recipe.training.iterations
        newest: dict[str, Any] = {name: value for _, event in self.history for name, value in event.items()}
        times = [event["time/iteration"] for _, event in self.history if "time/iteration" in event][-5:]
        if times:
            left = (iterations - iteration) * sum(times) / len(times)
            newest["left"] = f"{int(left // 60)}:{int(left % 60):02d}"
        self.state = {"stage": self.state["stage"], "iteration": f"{iteration}/{iterations}"}
        self.state |= {label: format(newest[name], form) for name, (label, form) in TERMINAL.items() if name in newest}
        if not self.live or "eval/accuracy" in metrics:
            kind = "critic warm-up" if iteration <= 0 and times else "iteration"
            shown = "  ".join(f"{key} {value}" for key, value in self.state.items() if key not in ("stage", "iteration"))
            self.say(f"{kind} {iteration} {shown}")

    def sample(self, sample: dict[str, Any]) -> None:
        """A prompt and what the policy answered, on one line."""
        prompt, response = (shortened(" ".join(sample[key].split()), MOST_OF_A_SAMPLE) for key in ("prompt", "response"))
        self.say(f"  sampled {prompt!r}: {response!r}, reward {sample['reward']:.3g}")

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 2))
        states = (Text.assemble((key, "dim"), f" {value}") for key, value in self.state.items())
        table.add_row(Text(self.recipe.name, "bold"), *states)
        return table


# --- callbacks of the recipe ------------------------------------------------------------------
def made(callback: LightningCallback) -> Callback:
    """The callback that a recipe names. Raises RecipeError if there is no such class, or it cannot be created."""
    try:
        return callback.made(Callback, "lightning.pytorch.Callback")
    except RAISED as error:
        raise RecipeError(f"callbacks: {callback.use}: {error_text(error)}") from error


@contextmanager
def named(callbacks: Sequence[tuple[str, Callback]]) -> Iterator[None]:
    """Raises TrainingStopped with the name of the callback that raised; cct's errors pass unchanged."""
    try:
        yield
    except (TrainingStopped, RecipeError, WriteError):
        raise
    except RAISED as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise
        for frame, _ in traceback.walk_tb(error.__traceback__):
            for name, callback in callbacks:
                if frame.f_locals.get("self") is callback:
                    raise TrainingStopped(f"callback '{name}': {error_text(error)}") from error
        if callbacks and isinstance(error, MisconfigurationException):  # one that does not go with how cct sets Lightning up
            raise TrainingStopped(f"callbacks: {error_text(error)}") from error
        raise


def must_be_plain(callbacks: Sequence[tuple[str, Callback]]) -> None:
    """Raises TrainingStopped if a callback's state cannot be read back, because a checkpoint with it would be unreadable."""
    for name, callback in callbacks:
        file = io.BytesIO()
        try:
            torch.save(callback.state_dict(), file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except RAISED as error:
            raise TrainingStopped(
                f"callback '{name}': its state_dict cannot be read back from a checkpoint, which may only hold tensors and "
                f"plain data: {why_unreadable(error)}"
            ) from error
