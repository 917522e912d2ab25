"""Concentration from the kernel's log-sum-exp, beside attention weights written out, and what tapping costs a pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

from cct.agent.agent import Agent
from cct.policy import attention_concentration, tappable
from cct.statistic import Concentration

from .measure import Result, Table, Target, agree, device, extra_memory, in_turn, mib, number, ratios, spread


@dataclass(frozen=True)
class Size:
    """Of the attention that is read, and of the model that is tapped."""

    heads: int = 16
    head_dim: int = 64
    lengths: tuple[int, ...] = (1024, 4096)
    """The last one is held to the targets."""
    rows: int = 2
    prompt: int = 256
    response: int = 768
    width: int = 512
    layers: int = 8
    vocabulary: int = 8192


SIZE = Size()
QUICK = Size(lengths=(512,), prompt=64, response=192, width=256, layers=4)


def run(size: Size = SIZE, rounds: int = 5) -> Result:
    operator, taps = _operator(size, rounds), _taps(size, rounds)
    return Result(operator.tables + taps.tables, operator.targets + taps.targets)


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The definition, from the attention weights [B, H, S, S] that transformers' eager attention returns beside its output."""
    length = query.shape[2]
    module = nn.Module().eval()
    module.num_key_value_groups = query.shape[1] // key.shape[1]  # type: ignore[assignment]
    mask = torch.full((length, length), -math.inf, device=query.device).triu(1)[None, None]
    weights = eager_attention_forward(module, query, key, value, mask, query.shape[3] ** -0.5)[1]
    entropy = -(weights * weights.clamp(min=torch.finfo(weights.dtype).tiny).log()).sum(-1)
    n = torch.arange(1, length + 1, device=query.device)
    return torch.where(n < 2, 1.0, 1 - entropy / n.clamp(min=2).log())


def _operator(size: Size, rounds: int) -> Result:
    rows: list[tuple[str, ...]] = []
    targets: tuple[Target, ...] = ()
    for length in size.lengths:
        more, targets = _at(length, size, rounds)
        rows += more
    columns = ("T", "what", "ms", "extra memory", "eager weights take times as long", "greatest error")
    return Result((Table(f"Concentration, {size.heads} heads x {size.head_dim}", columns, tuple(rows)),), targets)


def _at(length: int, size: Size, rounds: int) -> tuple[list[tuple[str, ...]], tuple[Target, ...]]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, size.heads, length, size.head_dim, generator=generator).to(device()) for _ in "qkv")
    functions = {
        "attention alone (SDPA)": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),
        "Shannon": lambda: attention_concentration(query, key),
        "Renyi-2": lambda: attention_concentration(query, key, statistic="renyi2"),
        "eager weights": lambda: eager(query, key, value),
    }
    error = agree("concentration", attention_concentration(query, key), eager(query, key, value), 1e-5)
    seconds = in_turn(functions, rounds)
    memory = {name: extra_memory(function) for name, function in functions.items()}
    rows: list[tuple[str, ...]] = [
        (
            f"{length}",
            name,
            spread(taken, 1e-3),
            mib(memory[name]),
            spread(ratios(seconds["eager weights"], taken)),
            f"{error:.1e}" if name == "Shannon" else "",
        )
        for name, taken in seconds.items()
    ]
    name = f"T = {length}, {size.heads} heads x {size.head_dim}"
    targets = [Target(f"{name}: time of eager weights / Shannon", ratios(seconds["eager weights"], seconds["Shannon"]), 20)]
    if memory["Shannon"] and memory["eager weights"]:
        targets.append(Target(f"{name}: extra memory, likewise", (memory["eager weights"] / memory["Shannon"],), 50))
    return rows, tuple(targets)


def model(width: int, layers: int, vocabulary: int, positions: int) -> PreTrainedModel:
    """A Qwen3 with random weights, heads of 64, half as many for keys, three times the width inside."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        head_dim=64,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )
    return tappable(nn.Module.to(Qwen3ForCausalLM(config).eval(), device()))


def _taps(size: Size, rounds: int) -> Result:
    """A behaviour pass with and without reading the last quarter of the layers."""
    length = size.prompt + size.response
    agent = Agent(model(size.width, size.layers, size.vocabulary, length), None)
    ids = torch.randint(3, size.vocabulary, (size.rows, length), generator=torch.Generator().manual_seed(0)).to(device())
    whole = torch.ones_like(ids)
    padded = whole.clone()
    padded[::2, : size.prompt // 2] = 0
    padded[1::2, -size.response // 2 :] = 0
    quarter = {"concentration": Concentration(layers="last_quarter")}

    @torch.no_grad()
    def behaviour(mask: Tensor, statistics: dict[str, Concentration]) -> Tensor:
        return agent(ids, mask, size.response, statistics=statistics).logprobs

    functions = {
        "no padding, no tap": lambda: behaviour(whole, {}),
        "no padding, a quarter tapped": lambda: behaviour(whole, quarter),
        "padded, no tap": lambda: behaviour(padded, {}),
        "padded, a quarter tapped": lambda: behaviour(padded, quarter),
    }
    for mask in (whole, padded):
        of_tokens = mask[:, -size.response :].bool()
        tapped, plain = (behaviour(mask, statistics)[of_tokens] for statistics in (quarter, {}))
        agree("log-probabilities under the tap", tapped, plain, 1e-5)
    seconds = in_turn(functions, rounds)
    rows, targets = [], []
    for name in ("no padding", "padded"):
        with_tap, without = seconds[f"{name}, a quarter tapped"], seconds[f"{name}, no tap"]
        rows.append((name, spread(without, 1e-3), spread(with_tap, 1e-3), spread(ratios(with_tap, without))))
        targets.append(
            Target(f"behaviour pass, a quarter of the layers tapped / none, {name}", ratios(with_tap, without), most=1.2)
        )
    shape = f"{size.rows} x ({size.prompt} + {size.response}) tokens, Qwen3 of width {size.width}, {size.layers} layers"
    parameters = sum(p.numel() for p in agent.parameters())
    title = f"Behaviour pass, {shape}, {number(parameters / 1e6)}M parameters"
    return Result((Table(title, ("rows", "no tap, ms", "a quarter tapped, ms", "ratio"), tuple(rows)),), tuple(targets))
