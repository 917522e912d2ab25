"""A run's folder without torch: its numbers, its checkpoints, and whether it can be gone on with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cct.loading import changes, load_recipe
from cct.recipe import Recipe, RecipeError

# What a resumed run keeps: the weights, what they were made from, and how epochs are counted.
KEPT = ("name", "seed", "policy", "critic", "training.critic_warmup")
# Beside these where DeepSpeed wrote the checkpoint: a folder of parts, one for each process.
KEPT_BY_DEEPSPEED = ("training.strategy", "training.offload", "training.devices", "training.nodes")
EXPLAINED = ("baseline/explained_variance", "critic/explained_variance")  # the first that there is, as the transport read it
LINES = ("metrics.jsonl", "samples.jsonl")
SHOWN, LONG = 4, 80  # changes named in a refusal, and characters of each


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


def must_be_run(folder: Path) -> None:
    """Raises RecipeError where the folder is none of a run."""
    if not folder.is_dir():
        raise RecipeError(
            f"{folder}: {'is no folder' if folder.exists() else 'no such folder'}; a run's is like runs/compo/001"
        )
    if not (folder / "recipe.yaml").is_file():
        raise RecipeError(f"{folder}: not a run folder (no recipe.yaml)")


def must_be_trained(folder: Path) -> None:
    """Raises RecipeError where the folder is none of a run that has ended."""
    must_be_run(folder)
    if not (folder / "policy").is_dir():
        raise RecipeError(f"{folder}: no exported policy (policy/); the run has not ended yet")


def checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoints, oldest first; each is named by the iteration after which it was taken."""
    return sorted((folder / "checkpoints").glob("[0-9]*.ckpt"), key=lambda path: int(path.stem))


def has_begun(folder: Path) -> bool:
    """Whether the folder holds anything that a run has found out."""
    return bool(read_metrics(folder) or checkpoints(folder))


# --- numbers ----------------------------------------------------------------------------------
def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The events of metrics.jsonl."""
    return read_lines(folder / "metrics.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; none where it is missing. A last line that is not whole is left out.

    Raises RecipeError where another line is no JSON.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n") if path.is_file() else []
    events = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            if not isinstance(event, dict):
                raise ValueError("not an object")
            events.append(event)
        except ValueError as error:
            if number < len(lines):
                raise RecipeError(f"{path}, line {number}: {error}; take the line out, or begin a new run") from None
    return events


def drop_lines_after(folder: Path, iteration: int) -> None:
    """Leave only events up to an iteration in metrics.jsonl and samples.jsonl; a resumed run makes the later ones again."""
    for path in (folder / name for name in LINES):
        kept = [event for event in read_lines(path) if event["iteration"] <= iteration]
        if path.is_file():
            write_whole(path, "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in kept))


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


# --- going on ---------------------------------------------------------------------------------
def to_resume(folder: Path, recipe: Recipe | None = None, overrides: Sequence[str] = ()) -> tuple[Recipe, list[str]]:
    """The recipe that a run is gone on with, its own under `overrides` unless one is given, and what it changes.

    Raises RecipeError where nothing is left to do, no checkpoint was taken, or the recipe is for other weights.
    """
    must_be_run(folder)
    saved = checkpoints(folder)
    if not saved:
        raise RecipeError(f"{folder}: no checkpoint was taken yet; start the recipe again")
    for name in LINES:
        read_lines(folder / name)  # or it would be found broken when the run has begun
    before = load_recipe(folder / "recipe.yaml")
    recipe = recipe or load_recipe(folder / "recipe.yaml", overrides)
    changed = changes(before.model_dump(mode="json"), recipe.model_dump(mode="json"))
    kept = KEPT + (KEPT_BY_DEEPSPEED if saved[-1].is_dir() or recipe.training.strategy.startswith("deepspeed") else ())
    refused = [line for line in changed if any(line.startswith((f"{place}:", f"{place}.")) for place in kept)]
    refused = [line if len(line) <= LONG else f"{line[:LONG]}..." for line in refused]
    if recipe.policy.reads_alphabet and recipe.task != before.task and recipe.task.alphabet != before.task.alphabet:
        refused.append("task: other characters, of which the policy's tokenizer is made")
    if refused:
        more = f" and {len(refused) - SHOWN} more" if len(refused) > SHOWN else ""
        raise RecipeError(
            f"{folder}: a run goes on with its own {', '.join(kept)}; here would change {'; '.join(refused[:SHOWN])}{more}. "
            "Begin a new run for that"
        )
    reached = int(saved[-1].stem)
    if reached >= recipe.training.iterations and (folder / "policy").exists():
        raise RecipeError(
            f"{folder}: complete, all {recipe.training.iterations} iterations are done; "
            f"`--set training.iterations={2 * reached}` would train on"
        )
    return recipe, changed
