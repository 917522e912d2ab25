"""What is watched while an operator runs: memory, precision, and what it must leave alone."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .base import Broken
from .cases import numbers

# A tensor may hold so many times more numbers at four times the length: four, and what does not grow is small change.
GROWTH = 5.0
HALF = (torch.float16, torch.bfloat16)
LATER = 86_400.0  # seconds


class Meddles(Broken):
    """What ran inside `alone` did more than give an answer."""


@contextmanager
def restored() -> Iterator[None]:
    """Whatever is done within to global generators and to torch's settings is undone."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    dtype, gradients = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)


@contextmanager
def alone(seed: int) -> Iterator[None]:
    """Global generators from this seed, which must not be drawn from, and torch's settings, which must stay. Raises Meddles."""

    def world() -> dict[str, Any]:
        generators = random.getstate(), pickle.dumps(numpy.random.get_state()), torch.get_rng_state().numpy().tobytes()
        return {
            "draws from a global generator, which the run's seed does not reach": generators,
            "changes torch's default type, or whether it keeps gradients": (torch.get_default_dtype(), torch.is_grad_enabled()),
        }

    with restored():
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        before = world()
        yield
        for what, state in world().items():
            if state != before[what]:
                raise Meddles(f"it {what}")


@contextmanager
def later() -> Iterator[None]:
    """A day later, for who asks `time.time`."""
    now, now_ns = time.time, time.time_ns
    with mock.patch.multiple(time, time=lambda: now() + LATER, time_ns=lambda: now_ns() + int(LATER) * 10**9):
        yield


def unchanged(name: str, before: Any, after: Any) -> None:
    """Raises Broken where a value that an operator was given is another one now; dataclasses and mappings by their parts."""
    if is_dataclass(before):
        for field in fields(before):
            unchanged(f"{name}.{field.name}", getattr(before, field.name), getattr(after, field.name))
    elif isinstance(before, dict):
        if before.keys() != after.keys():
            raise Broken(f"it wrote into {name}: its keys {[*before]} became {[*after]}")
        for key, value in before.items():
            unchanged(f"{name}[{key!r}]", value, after[key])
    elif isinstance(before, Tensor):
        if not identical(before, after):
            raise Broken(f"it wrote into {name}: {numbers(before)} became {numbers(after)}")
    elif before != after:
        raise Broken(f"it wrote into {name}: {before!r} became {after!r}")


def identical(x: Tensor, y: Tensor) -> bool:
    """The same bits; NaN is NaN."""
    return x.shape == y.shape and x.dtype == y.dtype and bool(((x == y) | ((x != x) & (y != y))).all())


class _Made(TorchDispatchMode):
    """Watches the tensors that are made inside."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, Tensor):
                self.see(x)
        return made

    def see(self, x: Tensor) -> None:
        raise NotImplementedError


class NoHalf(_Made):
    """Raises Broken, at its end, where a tensor of sixteen bits was made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.halves: set[torch.dtype] = set()

    def see(self, x: Tensor) -> None:
        self.halves |= {x.dtype} & {*HALF}

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        if kind is None and self.halves:
            raise Broken(f"given float32 and float64, it computes in {' and '.join(sorted(map(str, self.halves)))}")


class LargestTensor(_Made):
    """Watches how many numbers the largest tensor holds that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def see(self, x: Tensor) -> None:
        self.numbers = max(self.numbers, x.untyped_storage().nbytes() // max(1, x.element_size()))


def grows_linearly(make: Any, lengths: tuple[int, ...] = (64, 256, 1024, 4096, 16384)) -> None:
    """`make(length)()` at each length: no tensor may grow faster than the length. Raises Broken."""
    before = 0
    for length in lengths:
        call = make(length)
        with LargestTensor() as watch:
            call()
        if before and watch.numbers > GROWTH * before:
            raise Broken(
                f"at {length} tokens the largest tensor holds {watch.numbers:,} numbers, {watch.numbers / before:.1f} times as "
                f"many as at {length // 4}: memory grows faster than responses x tokens"
            )
        before = watch.numbers
