"""rollouts/ of a run: what a transport reads of each iteration, as safetensors, so that other transports can be tried on it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cct.recipe import Logging, RecipeError
from cct.rollout import Rollout
from cct.system.files import damage, forget, kept, remove, write_text

NAMED = ("stats", "components")  # fields that hold [B, T] by name, stored as `stats/NAME`
FULL = "full"  # a file of this name: the limit was reached, nothing is kept from there on


def store(rollout: Rollout, folder: Path, iteration: int, logging: Logging) -> None:
    """Write `rollouts/ITERATION.safetensors`, unless the recipe says otherwise or the run's limit is reached."""
    place = folder / "rollouts"
    if logging.rollouts == "never" or (logging.rollouts == "auto" and (place / FULL).exists()):
        return
    tensors = {
        field.name: value.detach().cpu().contiguous()
        for field in fields(rollout)
        if isinstance(value := getattr(rollout, field.name), Tensor)
    }
    for kind in NAMED:
        some = getattr(rollout, kind).items()
        tensors |= {f"{kind}/{name}": x.detach().float().cpu().contiguous() for name, x in some}
    # Token numbers are small, and padding is seen from the mask: half the bytes.
    tensors = {name: x.to(torch.int32) if x.dtype == torch.int64 else x for name, x in tensors.items()}
    tensors["attention_mask"] = tensors["attention_mask"].bool()
    if logging.rollouts == "auto":
        size = sum(x.numel() * x.element_size() for x in tensors.values())
        there = sum(path.stat().st_size for path in place.glob("*.safetensors"))
        if there + size > logging.rollouts_mb * 1e6:
            write_text(place / FULL, f"{iteration}\n")
            return
    metadata = {"moments": json.dumps(rollout.moments), "seed": str(rollout.seed)}
    with kept(folder, place / f"{iteration}.safetensors") as unfinished:
        save_file(tensors, unfinished, metadata)


def stored(folder: Path) -> dict[int, Path]:
    """The rollouts of a run by iteration, the earliest first."""
    names = re.compile(r"-?\d+\.safetensors")
    found = {int(path.stem): path for path in (folder / "rollouts").glob("*.safetensors") if names.fullmatch(path.name)}
    return dict(sorted(found.items()))


def load(path: Path) -> Rollout:
    """A stored rollout, on the CPU. Raises RecipeError where the file is none, or not as it was written."""
    if (why := damage(path.parents[1], path)) is not None:
        raise RecipeError(f"{path}: {why}; remove it, and the others are read without it")
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise RecipeError(f"{path}: cannot be read ({error})") from None
    whole = {name: x.long() if x.dtype == torch.int32 or name == "attention_mask" else x for name, x in tensors.items()}
    named: dict[str, Any] = {
        kind: {name.removeprefix(f"{kind}/"): whole.pop(name) for name in list(whole) if name.startswith(f"{kind}/")}
        for kind in NAMED
    }
    moments = {name: (float(mean), float(std)) for name, (mean, std) in json.loads(metadata["moments"]).items()}
    assert all(math.isfinite(x) for pair in moments.values() for x in pair)
    return Rollout(**whole, **named, moments=moments, seed=int(metadata["seed"]))


def drop_after(folder: Path, iteration: int) -> None:
    """Remove what a resumed run will make again."""
    later = [path for number, path in stored(folder).items() if number > iteration]
    forget(folder, *later)
    full = folder / "rollouts" / FULL
    if full.exists() and int(full.read_text(encoding="utf-8")) > iteration:
        later.append(full)
    for path in later:
        remove(path)
