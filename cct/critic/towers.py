"""The critics' torch modules. Each maps a `Trace` to raw outputs [B, S]; its head turns those into values and loss."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from cct.rollout import Attention, Trace


class Head:
    """From raw outputs to values, and the loss against targets, elementwise."""

    def __init__(self, output: str, bounds: tuple[float, float]):
        self.bounded, (self.low, self.high) = output == "bounded", bounds

    def value(self, raw: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * raw.sigmoid() if self.bounded else raw

    def loss(self, raw: Tensor, target: Tensor) -> Tensor:
        """bounded: cross-entropy of the target's place in the range (equal to its entropy at best). scalar: half the square."""
        if not self.bounded:
            return 0.5 * (raw - target).square()
        place = ((target - self.low) / (self.high - self.low)).clamp(0, 1)
        return F.binary_cross_entropy_with_logits(raw, place, reduction="none")


class Tower(nn.Module):
    """Base of all critics.

    reads_hidden: actor layers whose output it needs (0: the embeddings); reads_attention: layers whose
    queries and keys it needs; reads_concentration: a subset of those whose per-head concentration it needs.
    """

    reads_hidden: tuple[int, ...] = ()
    reads_attention: tuple[int, ...] = ()
    reads_concentration: tuple[int, ...] = ()

    def __init__(self, output: str, bounds: tuple[float, float]):
        super().__init__()
        self.head = Head(output, bounds)

    def forward(self, trace: Trace) -> Tensor:
        raise NotImplementedError


class TransportAlignedTower(Tower):
    """TAC. Everything it reads of the actor is detached, and at position p knows tokens up to p only."""

    def __init__(
        self,
        config: Any,
        output: str,
        bounds: tuple[float, float],
        *,
        width: int,
        depth: int,
        memory: int,
        borrow: bool,
        concentration: bool,
    ):
        super().__init__(output, bounds)
        n_layers, heads = config.num_hidden_layers, config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.ladder = self.reads_hidden = tuple(max(1, round((i + 1) * n_layers / depth)) for i in range(depth))
        layers = tuple(layer - 1 for layer in self.ladder)
        if borrow or concentration:
            self.reads_attention = layers
        if concentration:
            self.reads_concentration = layers
        features = 2 + (heads * len(set(layers)) if concentration else 0)
        self.blocks = nn.ModuleList(
            Block(config.hidden_size, features, width, heads, kv_heads, head_dim, borrow, memory) for _ in self.ladder
        )
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, trace: Trace) -> Tensor:
        emitted = [trace.token_logprobs.clamp(min=-20).unsqueeze(2), trace.entropy.unsqueeze(2)]
        concentration = [trace.concentration[layer].transpose(1, 2) for layer in sorted(set(self.reads_concentration))]
        features = torch.cat([*emitted, *concentration], 2)
        hidden = trace.attention_mask == 0
        x = features.new_zeros(())
        for block, layer in zip(self.blocks, self.ladder, strict=True):
            x = block(x, trace.hidden_states[layer].float(), features, trace.attention.get(layer - 1), hidden)
        return self.out(self.norm(x)).squeeze(2).float()


class Block(nn.Module):
    """Read one layer of the actor, mix with its attention, remember, think."""

    def __init__(
        self, actor_width: int, features: int, width: int, heads: int, kv_heads: int, head_dim: int, borrow: bool, memory: int
    ):
        super().__init__()
        self.kv_heads, self.grouped = kv_heads, heads != kv_heads
        self.read_norm = nn.LayerNorm(actor_width, elementwise_affine=False)
        self.read = nn.Linear(2 * actor_width + features, width)
        self.borrow = borrow
        if borrow:
            self.mix_norm = nn.LayerNorm(width)
            self.mix_value = nn.Linear(width, kv_heads * head_dim, bias=False)
            self.mix_out = nn.Linear(heads * head_dim, width, bias=False)
        self.memory = memory
        if memory:
            self.memory_norm = nn.LayerNorm(width)
            self.memory_in = nn.Linear(width, memory)
            self.memory_out = nn.Linear(memory, width, bias=False)
        self.think = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, state: Tensor, features: Tensor, attention: Attention | None, hidden: Tensor) -> Tensor:
        state = self.read_norm(state).masked_fill(hidden.unsqueeze(2), 0.0)
        before = F.pad(state[:, :-1], (0, 0, 1, 0))  # the state that emitted the token at this position
        x = x + self.read(torch.cat([state, before, features.masked_fill(hidden.unsqueeze(2), 0.0)], 2))
        if self.borrow and attention is not None:
            batch, length, _ = x.shape
            value = self.mix_value(self.mix_norm(x)).view(batch, length, self.kv_heads, -1).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(
                attention.query.float(),
                attention.key.float(),
                value,
                attn_mask=attention.mask,
                is_causal=attention.mask is None,
                scale=attention.scaling,
                enable_gqa=self.grouped,
            )
            x = x + self.mix_out(mixed.transpose(1, 2).reshape(batch, length, -1).masked_fill(hidden.unsqueeze(2), 0.0))
        x = x + self.think(x)
        if self.memory:
            seen = self.memory_in(self.memory_norm(x)).masked_fill(hidden.unsqueeze(2), -10.0)
            x = x + self.memory_out(seen.cummax(1).values)
        return x


class StandardTower(Tower):
    """A second Transformer. Reads token ids only."""

    def __init__(self, actor: PreTrainedModel, output: str, bounds: tuple[float, float]):
        super().__init__(output, bounds)
        self.body = copy.deepcopy(actor.base_model)
        self.out = nn.Linear(actor.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, trace: Trace) -> Tensor:
        position_ids = (trace.attention_mask.cumsum(1) - 1).clamp(min=0)
        body = self.body(
            input_ids=trace.input_ids, attention_mask=trace.attention_mask, position_ids=position_ids, use_cache=False
        )
        return self.out(body.last_hidden_state).squeeze(2).float()


class HeadTower(Tower):
    """A small head on the actor's last hidden state."""

    def __init__(self, config: Any, output: str, bounds: tuple[float, float], *, width: int):
        super().__init__(output, bounds)
        self.reads_hidden = (config.num_hidden_layers,)
        self.layers = nn.Sequential(nn.Linear(config.hidden_size, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, trace: Trace) -> Tensor:
        return self.layers(trace.hidden_states[self.reads_hidden[0]].float()).squeeze(2)
