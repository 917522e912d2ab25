"""Passes of actor and TAC over rows that share prompts: as one pack, and row by row, by the CPU time of all threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cct.agent.agent import Agent
from cct.critic import critics
from cct.packing import pack
from cct.policy.attention import tappable

from .measure import Result, Table, Target, ratios, spread


@dataclass(frozen=True)
class Size:
    """Rows of one forward; `shortest` below `tokens` lets the length of responses vary evenly between the two."""

    prompts: int
    prompt: int
    responses: int
    tokens: int
    shortest: int
    least: float
    """Of the ratio of the update's forward and backward."""


SIZES = (
    Size(8, 130, 8, 32, 32, 2.0),
    Size(8, 512, 8, 128, 128, 2.0),
    Size(16, 15, 4, 48, 48, 1.0),
    Size(16, 13, 8, 34, 11, 1.0),
)
QUICK = (Size(2, 12, 3, 8, 4, 0.0),)


def run(sizes: tuple[Size, ...] = SIZES, rounds: int = 5, width: int = 128, layers: int = 4) -> Result:
    rows, targets = [], []
    for size in sizes:
        title = f"{size.prompts} prompts of {size.prompt}, {size.responses} x {size.shortest} to {size.tokens}"
        left, found = of_size(size, rounds, width, layers)
        each = {name: ratios(apart, shared) for name, (apart, shared) in found.items()}
        rows.append((title, f"{left:.2f}", *(spread(ratio) for ratio in each.values())))
        targets.append(Target(f"{title}: update, apart / shared", each["update"], least=size.least))
    columns = ("prompts and responses", "tokens left", "update", "behaviour", "behaviour with TAC", "TAC's pass")
    return Result(
        (Table(f"CPU time, row by row / shared, width {width}, {layers} layers", columns, tuple(rows)),), tuple(targets)
    )


def of_size(size: Size, rounds: int, width: int, layers: int) -> tuple[float, dict[str, tuple[list[float], list[float]]]]:
    """Share of tokens, padding not counted, that a pack holds; and CPU seconds of each pass, row by row and shared."""
    torch.manual_seed(0)
    heads = width // 32
    config = Qwen3Config(
        vocab_size=30,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=32,
        max_position_embeddings=size.prompt + size.tokens,
    )
    actor = tappable(Qwen3ForCausalLM(config))
    tac = critics["tac"]().build(actor, (0.0, 1.0))
    count = size.prompts * size.responses
    asked = torch.randint(2, 30, (size.prompts, size.prompt)).repeat_interleave(size.responses, 0)
    ids = torch.cat([asked, torch.randint(2, 30, (count, size.tokens))], 1)
    lengths = torch.randint(size.shortest, size.tokens + 1, (count, 1))
    mask = (torch.arange(ids.shape[1]) < size.prompt + lengths).long()
    agents = [Agent(actor, tac, share=share) for share in (False, True)]
    with torch.no_grad():
        traces = {agent: agent(ids, mask, size.tokens, with_critic=True).trace for agent in agents}

    def update(agent: Agent) -> None:
        agent(ids, mask, size.tokens, with_entropy=False).logprobs.sum().backward()

    def behaviour(agent: Agent, with_critic: bool = False) -> None:
        with torch.no_grad():
            agent(ids, mask, size.tokens, with_critic=with_critic)

    passes: dict[str, Callable[[Agent], None]] = {
        "update": update,
        "behaviour": behaviour,
        "behaviour with TAC": lambda agent: behaviour(agent, True),
        "TAC's pass": lambda agent: agent.values(traces[agent], size.tokens)[0].sum().backward(),
    }
    seconds = {name: ([0.0] * rounds, [0.0] * rounds) for name in passes}
    for number in range(-1, rounds):  # the first one does not count
        for name, one in passes.items():
            for place in (0, 1) if number % 2 else (1, 0):
                started = time.process_time()
                one(agents[place])
                if number >= 0:
                    seconds[name][place][number] = time.process_time() - started
    return len(pack(ids, mask, size.tokens)) / int(mask.sum()), seconds
