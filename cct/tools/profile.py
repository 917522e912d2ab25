"""Where the time of an iteration goes: shares of its stages, tokens/s, the part of the machine's peak that is used, a trace."""

from __future__ import annotations

import gzip
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from cct import metrics
from cct.agent.agent import Agent
from cct.run_folder import RunFolder
from cct.system.files import whole
from cct.training.loop import Loop
from cct.training.minibatches import Batch, PolicyBatch

STAGES = (*metrics.STAGES, "sync")
TRACED = 2  # the iteration whose operations are recorded; recording slows it, so it does not count in the table
SHOWN = 1e-4  # seconds an iteration, of a stage that is listed
BACKWARD = 2  # a backward does twice the products of its forward


def measured_peak(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.5) -> float:
    """FLOP/s of the best of repeated products of two square matrices: what the machine gives at best."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def _attention_flops(query_shape: Any, key_shape: Any, value_shape: Any, *args: Any, out_shape: Any = None, **kw: Any) -> int:
    return sdpa_flop_count(query_shape, key_shape, value_shape)


@torch.no_grad()
def update_flops(agent: Agent, minibatches: Sequence[Sequence[Batch]]) -> float:
    """Floating point operations of an update over these minibatches on this process: its products, forward and backward.

    Recomputation, element-wise operations and the optimizer's step are not counted.
    """
    on_cpu = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
    with FlopCounterMode(display=False, custom_mapping=on_cpu) as counter:
        for batch in chain.from_iterable(minibatches):
            width = batch.mask.shape[1]
            if isinstance(batch, PolicyBatch):
                agent(batch.input_ids, batch.attention_mask, width, with_entropy=False)
            else:
                agent.values(batch.trace, width)
    return (1 + BACKWARD) * counter.get_total_flops()


def _write_trace(recorder: torch.profiler.profile, path: Path) -> None:
    with whole(path) as unfinished, tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        recorder.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(unfinished, "wb") as packed:
            shutil.copyfileobj(source, packed)


class Profile(Callback):
    """Counts and times a run; prints a table at its end and writes `trace.json.gz`, which https://ui.perfetto.dev opens."""

    def __init__(self, console: Console):
        self.console = console
        self.folder: RunFolder | None = None  # of the process that writes
        self.seconds: list[dict[str, float]] = []  # of each iteration but the traced one
        self.flops: list[float] = []
        self.tokens: list[float] = []
        self._recorder = ExitStack()
        self._stage: AbstractContextManager[Any] = nullcontext()

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        assert isinstance(module, Loop)
        self.folder = RunFolder(Path(trainer.default_root_dir)) if trainer.is_global_zero else None
        shown = module.on_stage

        def on_stage(name: str) -> None:
            shown(name)
            self.on_stage(name)

        module.on_stage = on_stage
        module.before_update = lambda minibatches: self.before_update(module.agent, module.iteration, minibatches)

    def on_stage(self, name: str) -> None:
        """A stage begins: its operations stand under its name in the trace."""
        self._stage.__exit__(None, None, None)
        self._stage = torch.profiler.record_function(f"stage: {name}")
        self._stage.__enter__()

    def before_update(self, agent: Agent, iteration: int, minibatches: Sequence[Sequence[Batch]]) -> None:
        if iteration > 0:
            self.flops.append(update_flops(agent, minibatches))

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """An iteration is over; the next one is recorded where it is the one to trace."""
        assert isinstance(module, Loop) and module.ended is not None
        iteration, found = module.ended.number, module.ended.metrics
        if iteration > 0 and iteration != TRACED:
            self.seconds.append({name: found[f"time/{name}"] for name in STAGES if f"time/{name}" in found})
            self.tokens.append(found["train/tokens"])
        elif iteration == TRACED:
            self._recorder.close()
            self.flops.pop()
        if iteration == TRACED - 1 and self.folder is not None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            recorder = torch.profiler.profile(activities=activities)
            self._recorder.callback(_write_trace, recorder, self.folder.trace_file)
            self._recorder.enter_context(recorder)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, Loop)
        self._recorder.close()
        if self.folder is not None and self.seconds:
            bf16 = module.recipe.training.precision == "bf16"
            peak = measured_peak(module.device, torch.bfloat16 if bf16 else torch.float32)
            rate = sum(self.flops) / sum(stages["update"] for stages in self.seconds)
            self.console.print(self.table())
            self.console.print(
                f"update: {rate / 1e9:,.1f} GFLOP/s, {rate / peak:.1%} of the {peak / 1e9:,.1f} of a large matrix product",
                soft_wrap=True,
            )
            if (trace := self.folder.trace_file).exists():
                self.console.print(f"iteration {TRACED} as a trace for https://ui.perfetto.dev: {trace}", soft_wrap=True)

    def table(self) -> Table:
        """Seconds, share and tokens/s of each stage, means over iterations."""
        tokens, whole = sum(self.tokens), sum(sum(stages.values()) for stages in self.seconds)
        table = Table(title=f"profile: mean of {len(self.seconds)} iterations", title_justify="left")
        for column in ("stage", "s", "share", "tokens/s"):
            table.add_column(column, justify="left" if column == "stage" else "right")
        for name in STAGES:
            seconds = sum(stages.get(name, 0.0) for stages in self.seconds)
            if seconds >= SHOWN * len(self.seconds):
                table.add_row(name, f"{seconds / len(self.seconds):.4f}", f"{seconds / whole:.1%}", f"{tokens / seconds:,.0f}")
        table.add_row("all", f"{whole / len(self.seconds):.4f}", "100.0%", f"{tokens / whole:,.0f}")
        return table
