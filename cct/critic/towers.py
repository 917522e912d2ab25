"""The critics' torch modules. Each maps a `Trace` to raw outputs, [B, S] or [B, S, outputs], of which its head makes values
and a loss; those of an ensemble are stacked after S."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from cct.packing import Packed, shared_attention
from cct.rollout import Trace
from cct.statistic.forward import Attention, PackedAttention

from .functional import PAD_BINS, SIGMA_IN_BINS, hl_gauss, two_hot


class Head:
    """From raw outputs to values, and the loss against targets; this one is linear, with half the squared error.

    outputs: raw numbers per value. clip: see `loss`.
    """

    outputs = 1
    split: Literal["responses", "prompts"] = "responses"  # what an ensemble deals out among its critics

    def __init__(self, value_clip: float | None = None):
        self.clip = value_clip

    def value(self, raw: Tensor) -> Tensor:
        """Values [...] of raw outputs, [...] or [..., outputs]."""
        return raw

    def fit(self, raw: Tensor, target: Tensor) -> Tensor:
        """Loss [...] against targets [...], without clipping."""
        return 0.5 * (raw - target).square()

    def held(self, value: Tensor, target: Tensor, loss: Tensor) -> Tensor:
        """What a value held back costs; no gradient."""
        return 0.5 * (value - target).square()

    def loss(self, raw: Tensor, target: Tensor, old: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """Loss [...] against targets [...].

        old: values [...] when the responses were sampled. With a clip c it is the larger one of the loss and
        that of old + clip(V - old, -c, c), as PPO2 has it (Dhariwal et al. 2017), so no gradient where the latter is.
        keys: a number for each row [B], by which an ensemble divides rows.
        """
        loss = self.fit(raw, target)
        if self.clip is None or old is None:
            return loss
        value = self.value(raw.detach())
        kept = old + (value - old).clamp(-self.clip, self.clip)
        behind = (kept - target).abs() > (value - target).abs()
        return torch.where(behind, self.held(kept, target, loss.detach()), loss)

    def members(self, raw: Tensor) -> Tensor:
        """Values of which the clip counts: of each critic by itself."""
        return self.value(raw)

    def statistics(self, raw: Tensor) -> dict[str, Tensor]:
        """Further statistics of the rollout, [B, S], by name."""
        return {}


class BoundedHead(Head):
    """A sigmoid over a range, trained by the cross-entropy of the target's place in it (equal to its entropy at best)."""

    def __init__(self, bounds: tuple[float, float], value_clip: float | None = None):
        super().__init__(value_clip)
        self.low, self.high = bounds

    def value(self, raw: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * raw.sigmoid()

    def fit(self, raw: Tensor, target: Tensor) -> Tensor:
        place = ((target - self.low) / (self.high - self.low)).clamp(0, 1)
        return F.binary_cross_entropy_with_logits(raw, place, reduction="none")

    def held(self, value: Tensor, target: Tensor, loss: Tensor) -> Tensor:
        return loss


class BinnedHead(BoundedHead):
    """A distribution over bins, trained by cross-entropy towards `hl_gauss` or `two_hot` targets; its mean is the value."""

    def __init__(self, output: str, bounds: tuple[float, float], bins: int, value_clip: float | None = None):
        super().__init__(bounds, value_clip)
        self.gauss, self.width = output == "hl_gauss", (self.high - self.low) / (bins - 1)
        self.pad = PAD_BINS if self.gauss else 0
        self.bins, self.outputs = bins, bins + 2 * self.pad

    def atoms(self, like: Tensor) -> Tensor:
        """The bins' middles [outputs], in float32 as values are."""
        steps = torch.arange(-self.pad, self.bins + self.pad, device=like.device, dtype=torch.float32)
        return self.low + self.width * steps

    def value(self, raw: Tensor) -> Tensor:
        return (raw.float().softmax(-1) * self.atoms(raw)).sum(-1).clamp(self.low, self.high)

    def fit(self, raw: Tensor, target: Tensor) -> Tensor:
        target, atoms = target.clamp(self.low, self.high), self.atoms(raw)
        wanted = hl_gauss(target, atoms, SIGMA_IN_BINS * self.width) if self.gauss else two_hot(target, atoms)
        return -(wanted * raw.float().log_softmax(-1)).sum(-1)


class EnsembleHead(Head):
    """Several critics of one kind, stacked in dimension 2 of raw outputs. The value is their mean."""

    def __init__(self, one: Head, count: int, split: Literal["responses", "prompts"] = "responses"):
        super().__init__(one.clip)
        self.one, self.count, self.split = one, count, split

    def members(self, raw: Tensor) -> Tensor:
        return self.one.value(raw)

    def value(self, raw: Tensor) -> Tensor:
        return self.members(raw).mean(2)

    def statistics(self, raw: Tensor) -> dict[str, Tensor]:
        return {"value_disagreement": self.members(raw).std(2, correction=0)}

    def loss(self, raw: Tensor, target: Tensor, old: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """Of each row, the loss of the critic that its key says; the mean over all critics where no keys are given."""
        each = self.one.loss(raw, target.unsqueeze(2).expand(*target.shape, self.count), old)
        if keys is None:
            return each.mean(2)
        return each.gather(2, (keys % self.count).view(-1, 1, 1).expand(*target.shape, 1)).squeeze(2)


def make_head(output: str, bounds: tuple[float, float], *, bins: int = 51, value_clip: float | None = None) -> Head:
    """The head of a critic's `output`."""
    if output == "scalar":
        return Head(value_clip)
    return BoundedHead(bounds, value_clip) if output == "bounded" else BinnedHead(output, bounds, bins, value_clip)


class Tower(nn.Module):
    """Base of all critics.

    reads_hidden: actor layers whose output it needs (0: the embeddings); reads_attention: layers whose
    queries and keys it needs; reads_concentration: a subset of those whose per-head concentration it needs. reads_packed: it
    can read a trace over a pack, `Trace.packed`, and gives [1, N (, outputs)] of it.
    """

    reads_hidden: tuple[int, ...] = ()
    reads_attention: tuple[int, ...] = ()
    reads_concentration: tuple[int, ...] = ()
    reads_packed = False

    def __init__(self, head: Head):
        super().__init__()
        self.head = head

    def forward(self, trace: Trace) -> Tensor:
        raise NotImplementedError

    def shaped(self, raw: Tensor) -> Tensor:
        """[B, S, outputs] as the head reads it: [B, S] where there is one output."""
        return raw.squeeze(2).float() if self.head.outputs == 1 else raw.float()


class EnsembleTower(Tower):
    """Several critics side by side."""

    def __init__(self, members: Sequence[Tower], split: Literal["responses", "prompts"] = "responses"):
        super().__init__(EnsembleHead(members[0].head, len(members), split))
        self.members = nn.ModuleList(members)
        together = lambda name: tuple(sorted({layer for tower in members for layer in getattr(tower, name)}))  # noqa: E731
        self.reads_hidden, self.reads_attention = together("reads_hidden"), together("reads_attention")
        self.reads_concentration = together("reads_concentration")
        self.reads_packed = all(tower.reads_packed for tower in members)

    def forward(self, trace: Trace) -> Tensor:
        return torch.stack([tower(trace) for tower in self.members], 2)


class TransportAlignedTower(Tower):
    """TAC. Everything it reads of the actor is detached, and at position p knows tokens up to p only."""

    reads_packed = True

    def __init__(
        self,
        config: Any,
        head: Head,
        *,
        width: int,
        ladder: tuple[int, ...],
        memory: int,
        borrow: bool,
        concentration: bool,
    ):
        super().__init__(head)
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.ladder = self.reads_hidden = ladder
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
        self.out = nn.Linear(width, head.outputs)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, trace: Trace) -> Tensor:
        emitted = [trace.token_logprobs.clamp(min=-20).unsqueeze(2), trace.entropy.unsqueeze(2)]
        concentration = [trace.concentration[layer].transpose(1, 2) for layer in sorted(set(self.reads_concentration))]
        features = torch.cat([*emitted, *concentration], 2)
        hidden = trace.attention_mask == 0 if trace.packed is None else torch.zeros_like(features[..., 0], dtype=torch.bool)
        x = features.new_zeros(())
        for block, layer in zip(self.blocks, self.ladder, strict=True):
            x = block(x, trace.hidden_states[layer].float(), features, trace.attention.get(layer - 1), hidden, trace.packed)
        return self.shaped(self.out(self.norm(x)))


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

    def forward(
        self,
        x: Tensor,
        state: Tensor,
        features: Tensor,
        attention: Attention | None,
        hidden: Tensor,
        packed: Packed | None = None,
    ) -> Tensor:
        state = self.read_norm(state).masked_fill(hidden.unsqueeze(2), 0.0)
        before = F.pad(state[:, :-1], (0, 0, 1, 0)) if packed is None else packed.earlier(state[0]).unsqueeze(0)
        x = x + self.read(torch.cat([state, before, features.masked_fill(hidden.unsqueeze(2), 0.0)], 2))
        if self.borrow and attention is not None:
            value = self.mix_value(self.mix_norm(x)).unflatten(2, (self.kv_heads, -1))
            mixed = self._mixed(attention, value, packed).flatten(2)
            x = x + self.mix_out(mixed.masked_fill(hidden.unsqueeze(2), 0.0))
        x = x + self.think(x)
        if self.memory:
            seen = self.memory_in(self.memory_norm(x)).masked_fill(hidden.unsqueeze(2), -10.0)
            most = seen.cummax(1).values if packed is None else packed.running_max(seen[0]).unsqueeze(0)
            x = x + self.memory_out(most)
        return x

    def _mixed(self, attention: Attention, value: Tensor, packed: Packed | None) -> Tensor:
        """The actor's attention over value vectors [B, S, H_kv, d], [B, S, H, d]."""
        if packed is not None:
            assert isinstance(attention, PackedAttention)
            query, key = (x.float() for x in attention.of_pack)
            return shared_attention(query, key, value[0], packed, attention.scaling).unsqueeze(0)
        mixed = F.scaled_dot_product_attention(
            attention.query.float(),
            attention.key.float(),
            value.transpose(1, 2),
            attn_mask=attention.mask,
            is_causal=attention.mask is None,
            scale=attention.scaling,
            enable_gqa=self.grouped,
        )
        return mixed.transpose(1, 2)


class StandardTower(Tower):
    """A second Transformer. Reads token ids only."""

    reads_packed = True

    def __init__(self, actor: PreTrainedModel, head: Head):
        super().__init__(head)
        self.body = copy.deepcopy(actor.base_model)
        self.out = nn.Linear(actor.config.get_text_config().hidden_size, head.outputs)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, trace: Trace) -> Tensor:
        if trace.packed is not None:
            body = self.body(**trace.packed.inputs(trace.input_ids), use_cache=False)
            return self.shaped(self.out(body.last_hidden_state))
        position_ids = (trace.attention_mask.cumsum(1) - 1).clamp(min=0)
        body = self.body(
            input_ids=trace.input_ids, attention_mask=trace.attention_mask, position_ids=position_ids, use_cache=False
        )
        return self.shaped(self.out(body.last_hidden_state))


class HeadTower(Tower):
    """A small head on the actor's last hidden state."""

    reads_packed = True

    def __init__(self, config: Any, head: Head, *, width: int):
        super().__init__(head)
        self.reads_hidden = (config.num_hidden_layers,)
        self.layers = nn.Sequential(nn.Linear(config.hidden_size, width), nn.GELU(), nn.Linear(width, head.outputs))

    def forward(self, trace: Trace) -> Tensor:
        return self.shaped(self.layers(trace.hidden_states[self.reads_hidden[0]].float()))
