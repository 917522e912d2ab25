"""On a GPU, in bfloat16: Qwen3-shaped random models of 0.6B and 4B parameters, prompt 256 + response 1024."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from cct.agent.agent import Agent
from cct.critic import critics
from cct.policy import tappable
from cct.statistic import Concentration

from .measure import Result, Table, device, extra_memory, in_turn, mib, number, ratios, spread


@dataclass(frozen=True)
class Model:
    """A shape, and the rows that go through it at once."""

    name: str
    width: int
    inside: int
    layers: int
    heads: int
    kv_heads: int
    rows: int
    head_dim: int = 128
    vocabulary: int = 151_936


@dataclass(frozen=True)
class Size:
    models: tuple[Model, ...] = (
        Model("Qwen3-0.6B", 1024, 3072, 28, 16, 8, rows=8),
        Model("Qwen3-4B", 2560, 9728, 36, 32, 8, rows=4),
    )
    prompt: int = 256
    response: int = 1024
    sampled: int = 128
    """Tokens of each response that are sampled to see how fast that goes."""


SIZE = Size()
QUICK = Size(tuple(Model(m.name, m.width, m.inside, 4, m.heads, m.kv_heads, m.rows) for m in SIZE.models[:1]), sampled=16)


def run(size: Size = SIZE, rounds: int = 3) -> Result:
    """Nothing but a note where there is no GPU."""
    if not torch.cuda.is_available():
        return Result(notes=("Not run: there is no GPU on this machine.",))
    return on_device(size, rounds)


def on_device(size: Size, rounds: int) -> Result:
    tables = []
    for model in size.models:
        tables.append(_one(model, size, rounds))
        gc.collect()  # the model is gone, its memory may be too
        torch.cuda.empty_cache()
    return Result(tuple(tables))


def _one(shape: Model, size: Size, rounds: int) -> Table:
    torch.manual_seed(0)
    length = size.prompt + size.response
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inside,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    with torch.device(device()):
        made = Qwen3ForCausalLM(config).eval()
    actor = tappable(nn.Module.to(made, torch.bfloat16))
    ids = torch.randint(3, shape.vocabulary, (shape.rows, length), generator=torch.Generator().manual_seed(0)).to(device())
    whole, quarter, half = torch.ones_like(ids), Concentration(layers="last_quarter"), Concentration()
    with torch.device(device()):
        towers = {name: critics[name]().build(actor, (0.0, 1.0)) for name in ("tac", "standard")}
    alone, with_tac, with_standard = (Agent(actor, tower, bf16=True) for tower in (None, towers["tac"], towers["standard"]))
    counts = {name: sum(p.numel() for p in tower.parameters()) for name, tower in towers.items()}

    @torch.no_grad()
    def read(agent: Agent, statistic: Concentration | None = None):
        statistics = {"concentration": statistic} if statistic else {}
        return agent(ids, whole, size.response, statistics=statistics, with_critic=True)

    def update() -> None:
        alone(ids, whole, size.response).logprobs.mean().backward()
        actor.zero_grad()

    def learn(agent: Agent, trace) -> None:
        agent.values(trace, size.response)[0].float().square().mean().backward()
        agent.zero_grad()

    def sample() -> None:
        stop = GenerationConfig(max_new_tokens=size.sampled, min_new_tokens=size.sampled, do_sample=False, pad_token_id=0)
        actor.generate(ids[:, : size.prompt], attention_mask=whole[:, : size.prompt], generation_config=stop)  # type: ignore[operator]

    traces = {name: read(agent).trace for name, agent in (("tac", with_tac), ("standard", with_standard))}
    functions = {
        "behaviour pass, no tap": lambda: read(alone),
        "behaviour pass, a quarter of the layers tapped": lambda: read(alone, quarter),
        "behaviour pass, half of the layers tapped, TAC": lambda: read(with_tac, half),
        "behaviour pass, half of the layers tapped, full critic": lambda: read(with_standard, half),
        "update of the policy, forward and backward": update,
        f"critic pass, TAC ({number(counts['tac'] / 1e6)}M parameters)": lambda: learn(with_tac, traces["tac"]),
        f"critic pass, full critic ({number(counts['standard'] / 1e6)}M)": lambda: learn(with_standard, traces["standard"]),
        f"sampling {size.sampled} tokens, transformers": sample,
    }
    seconds = in_turn(functions, rounds)
    plain = seconds["behaviour pass, no tap"]
    rows = []
    for name, function in functions.items():
        tokens = shape.rows * (size.sampled if name.startswith("sampling") else length)
        rows.append(
            (
                name,
                spread(seconds[name], 1e-3),
                number(tokens / sorted(seconds[name])[rounds // 2]),
                spread(ratios(seconds[name], plain)),
                mib(extra_memory(function)),
            )
        )
    parameters = number(sum(p.numel() for p in actor.parameters()) / 1e6)
    title = f"{shape.name} shape ({parameters}M parameters), {shape.rows} x ({size.prompt} + {size.response}) tokens, bfloat16"
    return Table(title, ("", "ms", "tokens/s", "times the pass without tap", "extra memory"), tuple(rows))
