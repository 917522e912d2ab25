"""Every public tensor function, by introspection, with arguments of a call that works."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import cct.critic.functional
import cct.geometry.functional
import cct.transport.functional
from cct.tensors import MASKS

MASK = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]]).bool()
PACKAGE = cct.transport.functional
MODULES = [import_module(f"{PACKAGE.__name__}.{found.name}") for found in pkgutil.iter_modules(PACKAGE.__path__)]
MODULES += [cct.geometry.functional, cct.critic.functional]
FUNCTIONS = {
    name: function
    for module in MODULES
    for name, function in vars(module).items()
    if inspect.isfunction(function)
    and function.__module__ == module.__name__
    and not name.startswith("_")
    and "rollout" not in inspect.signature(function).parameters  # of a whole rollout, not of tensors
}


def parameters(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(FUNCTIONS[name]).parameters)


def arguments(name: str, mask: Tensor | None = None) -> dict[str, Any]:
    """Of a call that works: for each parameter without a default, and for each optional tensor."""
    generator = torch.Generator().manual_seed(3)
    mask = MASK if mask is None else mask
    rows, width = mask.shape

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) + 0.1

    def marks() -> Tensor:
        return (draw(rows, width) < 0.6) & mask

    of_tokens = "x rewards values entropy statistic gate a b log_ratio weights loss advantages returns old_logprobs logprobs"
    of_tokens += " reference_logprobs rollout_logprobs"
    of_responses = "scores lengths bootstrap end greedy_scores level first"
    known: dict[str, Any] = {name: draw(rows, width) for name in of_tokens.split()}
    known |= {name: draw(rows) for name in of_responses.split()}
    known |= {parameter: -known[parameter] for parameter in known if parameter.endswith("logprobs")}
    known |= dict(mask=mask, valid=mask.any(1), groups=torch.arange(rows) // 2, starts=marks(), ends=marks(), marked=marks())
    known |= dict(anchors=torch.zeros(rows, width, dtype=torch.long), input_ids=torch.arange(rows * width).view(rows, width))
    known |= dict(attention_mask=mask, target=draw(rows, width), atoms=torch.linspace(-1, 2, 7), bounds=(-0.5, 2.0))
    known |= dict(mean=0.4, std=0.2, low=0.2, high=0.9, slope=1.5, start=0.5, shape="linear", tokens=3.0, seed=7, cuts=2)
    known |= dict(gamma=0.9, lam=0.8, gamma_turn=0.8, lam_turn=0.7, threshold=0.7, share=0.4, beta=0.3, fraction=0.5, k=2)
    known |= dict(credit=draw(8), truth=draw(8) - 0.6)
    known |= dict(decay=0.9, kind="recent", alpha=0.5, sigma=0.3, bound=1.5)
    known |= dict(collision=draw(rows, width), teacher_logprobs=-draw(rows, width))
    special: dict[str, dict[str, Any]] = {
        "group_mean": {"x": known["scores"]},
        "informative_rescale": {"advantages": known["scores"]},
        "previous_step": {"first": 0.0},
        "position_curve": {"end": 1.0},
        "correction_weights": {"kind": "truncate", "level": "sequence"},
        "decoupled_advantage": {"components": draw(rows, 3), "weights": (1.0, 0.5, -2.0), "valid": draw(rows, 3) < 0.9},
        "tracked": {"past": (1.5, 3.0), "scores": (1.0, 0.0)},
        "varies": {"std": torch.tensor(0.2)},
        "mark_some_covariances": {"low": -1.0, "high": 1.0},
    }
    known |= special.get(name, {})
    optional = {"bootstrap", "lengths", "end", *MASKS}
    wanted = [p for p, what in parameters(name).items() if what.default is inspect.Parameter.empty or p in optional]
    assert set(wanted) <= set(known), f"{name} takes {set(wanted) - set(known)}: give an example in benchmarks/examples.py"
    return {parameter: known[parameter] for parameter in wanted}


def tensors(result: Any) -> list[Tensor]:
    """What a function returned, its tensors in order; a plain number is one."""
    if isinstance(result, dict):
        return tensors(tuple(result.values()))
    if isinstance(result, tuple):
        return [x for part in result for x in tensors(part)]
    return [torch.as_tensor(result)]
