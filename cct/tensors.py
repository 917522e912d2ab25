"""The rules for arguments that every public tensor function shares: one for masks, one for shapes, one for precision."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from cct.registry import described

P = ParamSpec("P")
R = TypeVar("R")

MASKS = ("mask", "valid", "starts", "ends", "marked", "attention_mask")
INDICES = ("groups", "episodes", "order", "anchors", "input_ids")
SCALARS = ("gamma", "lam", "lam_value", "std")  # a float, or a tensor without dimensions, or one of the mask's shape
PER_RESPONSE = (
    "scores",
    "groups",
    "episodes",
    "order",
    "bootstrap",
    "greedy_scores",
    "prompt_values",
)  # [B] beside a mask [B, T]


def as_mask(mask: Any, name: str = "mask") -> Tensor:
    """The mask as bool. Accepts bool tensors, and integer ones that hold only 0 and 1 (reading them waits for a GPU).

    Raises TypeError, naming what was found, on anything else: floats, other integers, None.
    """
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return mask
    found = described(mask)
    if isinstance(mask, Tensor) and not mask.is_floating_point() and not mask.is_complex():
        other = mask[(mask != 0) & (mask != 1)]
        if not len(other):
            return mask.bool()
        found = f"{found} that holds {other[0].item()}"
    raise TypeError(f"{name} must be a bool tensor, or an integer one of 0 and 1; got {found}")


def at_least_float32(x: Tensor) -> Tensor:
    """x itself in float32 and float64; half precision and integers in float32, where sums keep their digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def operator(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public tensor function: its masks are bool, its numbers float32 at least, its shapes agree.

    Arguments are known by their names: masks go through `as_mask` (None where the annotation allows it), indices stay as they
    are, all other tensors go through `at_least_float32`. Beside a mask, tensors have its shape, or [B] in `PER_RESPONSE`.
    Raises TypeError on a mask that is none, and ValueError on a shape that disagrees.
    """
    signature = inspect.signature(function)
    optional = {name for name, p in signature.parameters.items() if p.default is None or "None" in str(p.annotation)}
    leading = [name for name in ("mask", "valid", "starts", "attention_mask") if name in signature.parameters][:1]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        for name, value in given.items():
            if name in MASKS:
                given[name] = value if value is None and name in optional else as_mask(value, name)
            elif isinstance(value, Tensor) and name not in INDICES:
                given[name] = at_least_float32(value)
        for name in leading:
            if given.get(name) is not None:
                _agree(given, name)
        return function(*bound.args, **bound.kwargs)

    return checked


def _agree(given: dict[str, Any], leading: str) -> None:
    shape = given[leading].shape
    for name, value in given.items():
        if not isinstance(value, Tensor) or (name in SCALARS and not value.dim()):
            continue
        expected = shape[:1] if name in PER_RESPONSE else shape
        if value.shape != expected:
            raise ValueError(
                f"{name} must have shape {tuple(expected)} to match {leading} {tuple(shape)}; got {tuple(value.shape)}"
            )
