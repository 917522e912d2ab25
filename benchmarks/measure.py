"""Times, memory and ratios: taken in turn, so that what else the machine does meets both sides alike."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.testing import assert_close

MIB = 2**20


@dataclass(frozen=True)
class Target:
    """A ratio that is to be reached, and what was measured: one ratio for each round."""

    what: str
    ratios: tuple[float, ...]
    least: float | None = None
    most: float | None = None

    @property
    def reached(self) -> bool:
        median = statistics.median(self.ratios)
        return (self.least is None or median >= self.least) and (self.most is None or median <= self.most)

    @property
    def bound(self) -> str:
        return f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"


@dataclass(frozen=True)
class Table:
    """Rows of text under a title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Result:
    """What one benchmark found."""

    tables: tuple[Table, ...] = ()
    targets: tuple[Target, ...] = ()
    notes: tuple[str, ...] = ()
    """What was not run, and why; what else a reader must know."""
    figure: str | None = None
    """An SVG, where there is one."""


def device() -> torch.device:
    """CUDA where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def finish() -> None:
    """Wait until the device has done what it was asked for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def in_turn(functions: Mapping[str, Callable[[], object]], rounds: int, *, warm: int = 1) -> dict[str, list[float]]:
    """Seconds of each function, by name, one of each in every round; the first `warm` rounds do not count.

    Rounds go forwards and backwards through the functions, so that none always follows the same one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(warm + rounds):
        names = list(functions) if number % 2 == 0 else list(functions)[::-1]
        for name in names:
            finish()
            started = time.perf_counter()
            functions[name]()
            finish()
            if number >= warm:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def ratios(slow: list[float], fast: list[float]) -> tuple[float, ...]:
    """Round by round."""
    return tuple(a / b for a, b in zip(slow, fast, strict=True))


def spread(values: list[float] | tuple[float, ...], unit: float = 1.0) -> str:
    """`median [least..greatest]` with three digits, in multiples of `unit`."""
    middle, low, high = (number(x / unit) for x in (statistics.median(values), min(values), max(values)))
    return f"{middle} [{low}..{high}]" if len(values) > 1 else middle


def number(x: float) -> str:
    """Three digits: `0.0123`, `1.23`, `12.3`, `123`, `1,234`."""
    if x == 0 or abs(x) >= 100:
        return f"{x:,.0f}"
    return f"{x:#.3g}".rstrip(".")


def extra_memory(function: Callable[[], object]) -> int | None:
    """Bytes that the process, or the GPU, needs at most beyond what it had before; None where the system does not tell.

    On the CPU it is the resident set, which Linux lets a process reset: what kernels take inside counts, and what was freed
    before and kept by the allocator is given back first.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = _status("VmRSS")
        function()
        return max(0, _status("VmHWM") - before)
    except OSError:
        return None


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name} in /proc/self/status")


def mib(size: int | None) -> str:
    return "not measured" if size is None else f"{number(size / MIB)} MiB"


def agree(what: str, found: Tensor, expected: Tensor, tolerance: float) -> float:
    """The greatest difference. Raises AssertionError above `tolerance`: a ratio of two different results means nothing."""
    assert_close(found.double(), expected.double(), atol=tolerance, rtol=0, msg=lambda text: f"{what}: {text}")
    return float((found.double() - expected.double()).abs().max())


@dataclass(frozen=True)
class Machine:
    """Where and beside what it was measured."""

    processor: str
    cores: int
    threads: int
    gpu: str | None
    load: float
    """Processes that wanted a core in the minute before; near 0 on an idle machine."""
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Machine:
        from importlib.metadata import PackageNotFoundError, version

        versions = {"python": platform.python_version()}
        for name in ("torch", "transformers", "torchrl", "trl"):
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                versions[name] = "not installed"
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        return cls(_processor(), os.cpu_count() or 1, torch.get_num_threads(), gpu, os.getloadavg()[0], versions)

    def __str__(self) -> str:
        parts = [
            f"{self.processor}, {self.cores} cores, {self.threads} threads",
            f"GPU {self.gpu}" if self.gpu else "no GPU",
            ", ".join(f"{name} {found}" for name, found in self.versions.items()),
            f"load before: {self.load:.1f}",
        ]
        return "; ".join(parts)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
