"""`python -m benchmarks [NAME...] [--quick] [--prompt N --responses RxT] [--threads N] [--write FILE.md] [--json FILE.json]`.

Prints each benchmark's tables. `--write` puts them, with the machine and the command, between the marks of that benchmark in
a Markdown file (`docs/performance.md` holds those of one run); `--json` keeps every ratio.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from . import concentration, gpu, growth, large, scan, sharing, step
from .measure import Machine, Result, Table, spread

Benchmarks = Mapping[str, tuple[Callable[[], Result], Callable[[], Result]]]

BENCHMARKS: Benchmarks = {
    "scan": (scan.run, lambda: scan.run(scan.QUICK, rounds=3)),
    "concentration": (concentration.run, lambda: concentration.run(concentration.QUICK, rounds=3)),
    "sharing": (sharing.run, lambda: sharing.run(sharing.QUICK, rounds=1, width=64, layers=2)),
    "step": (step.run, lambda: step.run(step.QUICK, rounds=1)),
    "growth": (growth.run, lambda: growth.run(growth.QUICK)),
    "gpu": (gpu.run, lambda: gpu.run(gpu.QUICK)),
    "large": (large.run, lambda: large.run(large.QUICK)),
}
"""By name: at full size, and at one that takes seconds."""


def main(arguments: list[str] | None = None, benchmarks: Benchmarks = BENCHMARKS) -> int:
    """Run the benchmarks named, all where none is. Returns 1 where a target was missed."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(benchmarks)}; all where none is given")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works, not how fast")
    parser.add_argument("--prompt", type=int, metavar="N", help="of step: prompts of N tokens, shared and not")
    parser.add_argument("--responses", default="16x32", metavar="RxT", help="of --prompt: R responses of T tokens to each")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of torch (default 2)")
    parser.add_argument("--write", type=Path, help="Markdown file whose sections of these benchmarks are replaced")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    options = parser.parse_args(given)
    if unknown := [name for name in options.names if name not in benchmarks]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(benchmarks)}")
    torch.set_num_threads(options.threads)
    machine, found, missed = Machine.here(), {}, False
    print(machine)
    for name in options.names or benchmarks:
        full, quick = benchmarks[name]
        if name == "step" and options.prompt:
            full = partial(step.long_prompts, options.prompt, options.responses)
            quick = partial(full, rounds=1, iterations=2)
        started = time.perf_counter()
        result = (quick if options.quick else full)()
        text = markdown(result)
        print(f"\n## {name} ({time.perf_counter() - started:.0f} s)\n\n{text}", flush=True)
        if options.write:
            sizes = f" --prompt {options.prompt} --responses {options.responses}" if options.prompt else ""
            command = f"python -m benchmarks {name}{sizes}{' --quick' * options.quick}"
            write(
                options.write,
                f"{name}-{options.prompt}" if sizes else name,
                f"`{command}` on {machine}:\n\n{text}",
                result.figure,
            )
        found[name] = asdict(result)
        missed |= not all(target.reached for target in result.targets)
    if options.json:
        everything = {"command": shlex.join(["python", "-m", "benchmarks", *given]), "machine": asdict(machine), **found}
        options.json.write_text(json.dumps(everything, indent=1), encoding="utf-8")
    return int(missed)


def markdown(result: Result) -> str:
    """Tables, targets, notes."""
    targets = Table(
        "Targets",
        ("ratio", "wanted", "median [least..greatest]", ""),
        tuple((t.what, t.bound, spread(t.ratios), "reached" if t.reached else "missed") for t in result.targets),
    )
    tables = [*result.tables, *([targets] if result.targets else [])]
    return "\n\n".join([*map(_table, tables), *result.notes])


def _table(table: Table) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (table.columns, ("---",) * len(table.columns), *table.rows)]
    return "\n".join([f"**{table.title}**", "", *lines])


def write(path: Path, name: str, text: str, figure: str | None) -> None:
    """Replace what stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`; a figure goes beside the file."""
    whole, begin, end = path.read_text(encoding="utf-8"), f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found, rest = whole.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{path}: no {begin} ... {end} to write the results of '{name}' between")
    if figure is not None:
        path.with_name(f"{path.stem}-{name}.svg").write_text(figure, encoding="utf-8")
        text = f"![{name}]({path.stem}-{name}.svg)\n\n{text}"
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
