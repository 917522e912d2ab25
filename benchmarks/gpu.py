"""What a GPU computes, held to the CPU: tensor functions, concentration, shared prompts; then a whole run of CompPO.

Expected are float64 for tensor functions and models, and attention written out for concentration. On a machine without a GPU
the same comparisons hold the CPU's float32 and its kernels to these.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from cct import load_recipe, train
from cct.agent.agent import Agent
from cct.policy.attention import Runs, attention_concentration, tappable

from .examples import FUNCTIONS, arguments, tensors
from .measure import Result, Table, Target, device, number

RECIPE = Path(__file__).parents[1] / "recipes/compo.yaml"
STATISTICS: tuple[Literal["shannon", "renyi2", "max"], ...] = ("shannon", "renyi2", "max")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of results of size 1; larger ones by their size


@dataclass(frozen=True)
class Size:
    rows: int = 64
    length: int = 512
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    sets: tuple[str, ...] = ()
    """Changes of the recipe."""
    least_accuracy: float = 0.98


QUICK = Size(
    rows=8,
    length=24,
    heads=4,
    kv_heads=2,
    head_dim=16,
    sets=(
        "training.iterations=1",
        "training.critic_warmup=0",
        "training.prompts_per_iteration=4",
        "training.responses_per_prompt=4",
        "training.minibatch_size=8",
        "policy.warm_start.steps=2",
        "task.held_out_size=8",
    ),
    least_accuracy=0.0,
)


def run(size: Size | None = None) -> Result:
    if size is None and not torch.cuda.is_available():
        return Result(notes=("Not run: there is no GPU on this machine.",))
    size = size or Size()
    found = {**functions(size), **concentration(size), **shared(size)}
    rows = tuple((name, f"{error:.1e}", f"{bound:g}") for name, (error, bound) in found.items())
    errors = Target("greatest error / its bound", (max(error / bound for error, bound in found.values()),), most=1.0)
    table, accuracy = whole_run(size)
    return Result((Table(f"Errors on {device()}", ("what", "greatest error", "bound"), rows), table), (errors, accuracy))


def error_of(found: Tensor, expected: Tensor) -> float:
    """The greatest difference, in units of the expected number where that is above 1. Infinite where only one is finite."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    if found.shape != expected.shape or not torch.equal(found.isfinite(), expected.isfinite()):
        return float("inf")
    difference = (found - expected).abs() / expected.abs().clamp(min=1)
    return max(difference[expected.isfinite()].tolist(), default=0.0)


Errors = dict[str, tuple[float, float]]


def functions(size: Size) -> Errors:
    """Of every public tensor function, in float32 on the device beside float64 on the CPU."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, size.length + 1, (size.rows, 1), generator=generator)
    gaps = torch.rand(size.rows, size.length, generator=generator) < 0.9
    mask = gaps & (torch.arange(size.length) < lengths)
    found = {}
    for name, function in FUNCTIONS.items():
        given = arguments(name, mask)

        def of(where: torch.device, dtype: torch.dtype, function: Callable = function, given: dict[str, Any] = given):
            moved = {
                key: x.to(where, dtype if x.is_floating_point() else x.dtype) if isinstance(x, Tensor) else x
                for key, x in given.items()
            }
            return tensors(function(**moved))

        pairs = zip(of(device(), torch.float32), of(torch.device("cpu"), torch.float64), strict=True)
        found[name] = (max(error_of(*pair) for pair in pairs), TOLERANCE[torch.float32])
    return found


def concentration(size: Size) -> Errors:
    """Of each statistic by the device's kernels, beside attention written out on the CPU; heads are grouped."""
    generator = torch.Generator().manual_seed(2)
    length, rows = size.length, 3
    query = torch.randn(rows, size.heads, length, size.head_dim, generator=generator)
    key = torch.randn(rows, size.kv_heads, length, size.head_dim, generator=generator)
    half, third = length // 2, length // 3
    masks = {
        "causal": None,
        "padded": Runs(((0, 0, length), (1, third, length), (2, 0, half))),
        "packed": Runs.packed([[length], [third, length - third], [half, length - half]]),
        "window": (torch.ones(length, length).tril() - torch.ones(length, length).tril(-third)).bool()[None, None],
    }
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, mask in masks.items():
            real = torch.ones(rows, length, dtype=torch.bool)
            if isinstance(mask, Runs):
                real = torch.zeros_like(real)
                for row, first, end in mask.spans:
                    real[row, first:end] = True
            for statistic in STATISTICS if torch.cuda.is_available() else STATISTICS[:2]:  # the CPU writes `max` out itself
                q, k = query.to(dtype), key.to(dtype)
                expected = attention_concentration(q.float(), k.float(), mask=mask, statistic=statistic, kernel="blocks")
                there = mask.to(device()) if isinstance(mask, Tensor) else mask
                got = attention_concentration(q.to(device()), k.to(device()), mask=there, statistic=statistic).cpu()
                error = error_of(got.transpose(1, 2)[real], expected.transpose(1, 2)[real])
                found[f"{statistic} concentration, {name}, {str(dtype).removeprefix('torch.')}"] = (error, TOLERANCE[dtype])
    return found


def shared(size: Size) -> Errors:
    """Log-probabilities and gradients of rows that share prompts, as a pack on the device; rows by themselves in float64."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=size.kv_heads * 16,
        intermediate_size=size.kv_heads * 32,
        num_hidden_layers=2,
        num_attention_heads=size.kv_heads,
        num_key_value_heads=max(1, size.kv_heads // 2),
        head_dim=16,
        max_position_embeddings=2 * size.length,
    )
    plain, prompt = Qwen3ForCausalLM(config), size.length // 2
    asked = torch.randint(2, 50, (2, prompt)).repeat_interleave(4, 0)
    ids = torch.cat([asked, torch.randint(2, 50, (8, size.length - prompt))], 1)
    lengths = torch.randint(1, size.length - prompt + 1, (8, 1))
    mask = (torch.arange(size.length) < prompt + lengths).long()

    def of(where: torch.device, dtype: torch.dtype, share: bool) -> list[Tensor]:
        model = tappable(nn.Module.to(copy.deepcopy(plain), where, dtype))
        responds = mask[:, prompt:].bool()
        read = Agent(model, None, share=share)(ids.to(where), mask.to(where), size.length - prompt).logprobs.cpu()
        read[responds].mean().backward()
        return [read[responds], torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None])]

    pairs = zip(of(device(), torch.float32, True), of(torch.device("cpu"), torch.float64, False), strict=True)
    return {
        f"shared prompts, {what}": (error_of(*pair), 1e-4) for what, pair in zip(("logprobs", "gradient"), pairs, strict=True)
    }


def whole_run(size: Size) -> tuple[Table, Target]:
    """CompPO from its recipe, on the device."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        events = train(load_recipe(RECIPE, list(size.sets)), runs=folder, quiet=True).metrics
    seconds = time.perf_counter() - started
    curve = [(event["iteration"], event["eval/accuracy"]) for event in events if "eval/accuracy" in event]
    speed = [event["train/tokens_per_second"] for event in events if "train/tokens_per_second" in event]
    row = (", ".join(f"{accuracy:.3f} at {n}" for n, accuracy in curve), number(sum(speed) / len(speed)), number(seconds))
    table = Table(f"{RECIPE.name} on {device()}", ("held-out accuracy at iteration", "tokens/s", "seconds"), (row,))
    return table, Target("compo: held-out accuracy at the end", (curve[-1][1],), least=size.least_accuracy)
