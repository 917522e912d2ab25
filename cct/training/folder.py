"""A run's folder without torch: its numbers, its checkpoints, and whether it can be gone on with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cct.loading import Source, changes, load_recipe, override, read_yaml, recipe_of, with_bases
from cct.recipe import Recipe, RecipeError
from cct.system.files import LOCK, Held, locked, sweep, write_text, writing

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
        with writing(folder):
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:  # another run took it
                number += 1


def must_be_run(folder: Path) -> None:
    """Raises RecipeError where the folder is not a run folder."""
    if not folder.is_dir():
        raise RecipeError(
            f"{folder}: {'is no folder' if folder.exists() else 'no such folder'}; a run's is like runs/compo/001"
        )
    if not (folder / "recipe.yaml").is_file():
        raise RecipeError(f"{folder}: not a run folder (no recipe.yaml)")


def load_run(folder: Path, overrides: Sequence[str] = (), *, trust: bool = False) -> Recipe:
    """The recipe of an existing run. Raises RecipeError where the folder is not a run folder.

    A plug-in is imported, which runs it, where it has the SHA-256 that the run recorded; with `trust` any is.
    """
    must_be_run(folder)
    path = folder / "recipe.yaml"
    source = with_bases(read_yaml(path), path)
    for text in overrides:
        source = override(text).lay_over(source)
    plugins = source.data.get("plugins")
    plugins = [dict(one) if isinstance(one, dict) else {"path": one} for one in plugins] if isinstance(plugins, list) else []
    for plugin in plugins:
        if trust:
            plugin["sha256"] = None
        elif not plugin.get("sha256"):
            raise RecipeError(
                f"{path}: the plug-in {plugin.get('path')} has no SHA-256, which a run records, so it may be anyone's code; "
                "--trust-plugins runs it"
            )
    return recipe_of(Source(source.data | ({"plugins": plugins} if plugins else {}), source.marks), path)


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """One process at a time trains in a folder. Raises RecipeError where another one does.

    What a killed process left half written is removed.
    """
    try:
        with locked(folder):
            for place in (folder, folder / "checkpoints", folder / "rollouts"):
                sweep(place)
            yield
    except Held as held:
        raise RecipeError(f"{folder}: {held} is training in it (its lock is {LOCK}); wait for it, or end it") from None


def must_be_trained(folder: Path) -> None:
    """Raises RecipeError where the folder is not a finished run."""
    must_be_run(folder)
    if not (folder / "policy").is_dir():
        raise RecipeError(f"{folder}: no exported policy (policy/); the run has not ended yet")


def checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoints, oldest first; each is named by the iteration after which it was taken."""
    return sorted((folder / "checkpoints").glob("[0-9]*.ckpt"), key=lambda path: int(path.stem))


def has_begun(folder: Path) -> bool:
    """Whether an iteration of the run was finished; before that it has evaluated its starting policy at most."""
    return bool(checkpoints(folder)) or any("train/reward" in event for event in read_metrics(folder))


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
            write_text(path, "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in kept))


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
    if recipe.task != before.task and recipe.policy.warm_start is not None and recipe.needs("reference"):
        refused.append("task: another one, on whose demonstrations the reference model would be made again")
    if recipe.critic is not None and recipe.reward_bounds != before.reward_bounds:
        bounds = f"{before.reward_bounds} -> {recipe.reward_bounds}"
        refused.append(f"evidence: rewards in {bounds}, which bound the critic's values")
    if recipe.policy.reads_alphabet and recipe.alphabet != before.alphabet:
        refused.append("task: other characters, of which the policy's tokenizer is made")
    if refused:
        more = f" and {len(refused) - SHOWN} more" if len(refused) > SHOWN else ""
        raise RecipeError(
            f"{folder}: a run goes on with its own {', '.join(kept)}; here would change {'; '.join(refused[:SHOWN])}{more}. "
            "Begin a new run for that"
        )
    reached = int(saved[-1].stem)
    if reached > recipe.training.iterations:
        raise RecipeError(
            f"{folder}: iteration {reached} is done, and training.iterations is {recipe.training.iterations}; "
            f"`cct export {folder} FOLDER --iteration N` writes the policy of an earlier checkpoint "
            f"(there are those of {', '.join(str(int(path.stem)) for path in saved)})"
        )
    if reached >= recipe.training.iterations and (folder / "policy").exists():
        raise RecipeError(
            f"{folder}: complete, all {recipe.training.iterations} iterations are done; "
            f"`--set training.iterations={2 * reached}` would train on"
        )
    return recipe, changed
