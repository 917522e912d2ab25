"""Rows that share prompts as one sequence that holds each prompt once, and attention over it.

A pack is [prompt 1 | prompt 2 | ... | responses to prompt 1 | responses to prompt 2 | ...] without padding. Positions of each
response go on from its own prompt, and it attends to that prompt and to itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Prompts are shared by `auto` where a pack has at most this share of the rows' tokens.
SHARED_AT_MOST = 0.75


@dataclass(frozen=True)
class Spans:
    """Consecutive sequences of a pack, and the form in which a kernel takes them: padded on the right."""

    first: int
    """Place in the pack of their first token."""
    count: int
    """Tokens of all of them."""
    shape: tuple[int, int]
    """Sequences, and tokens of the longest."""
    slots: Tensor | None
    """[count] places of the tokens among the slots of the padded form; None where there is no padding."""

    @classmethod
    def of(cls, lengths: Tensor, first: int) -> Spans:
        """lengths: [A] of the sequences."""
        shape, count = (len(lengths), max(1, int(lengths.max()))), int(lengths.sum())
        filled = torch.arange(shape[1], device=lengths.device) < lengths.unsqueeze(1)
        return cls(first, count, shape, None if count == filled.numel() else filled.flatten().nonzero().flatten())

    def padded(self, x: Tensor) -> Tensor:
        """[N, ...] of the pack as [A, L, ...] of these sequences, 0 at padding."""
        here = x[self.first : self.first + self.count]
        if self.slots is not None:
            here = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:]).index_copy(0, self.slots, here)
        return here.unflatten(0, self.shape)

    def flat(self, x: Tensor) -> Tensor:
        """[A, L, ...] as [count, ...], in the pack's order."""
        x = x.flatten(0, 1)
        return x if self.slots is None else x.index_select(0, self.slots)

    @property
    def padding(self) -> Tensor | None:
        """[A, L] bool; None where there is none."""
        if self.slots is None:
            return None
        every = torch.ones(self.shape[0] * self.shape[1], dtype=torch.bool, device=self.slots.device)
        return every.index_fill(0, self.slots, False).unflatten(0, self.shape)


@dataclass(frozen=True)
class Packed:
    """B rows of S tokens, of which the last T respond, as one sequence of N tokens."""

    attention_mask: Tensor
    """[B, S] bool, of the rows."""
    width: int
    """T."""
    source: Tensor
    """[N] where the token stands in the rows, flattened; of a shared prompt in its first row."""
    places: Tensor
    """[B, S] place of each token in the pack; 0 at padding."""
    position_ids: Tensor
    """[1, N]"""
    before: Tensor
    """[N] place of the token before; 0 where there is none."""
    ends: Tensor
    """[R] of each of the R response tokens, the place of the last token of its prompt."""
    prompts: Spans
    responses: Spans
    """In the pack's order."""
    asked: Tensor
    """[A] the number of each response's prompt, in the pack's order."""
    padded: bool
    """Whether the rows have padding."""
    seen: Tensor
    """[A or 1, 1, Q, K] bool, what responses padded to Q tokens see of their prompt, padded, and of themselves."""

    def __len__(self) -> int:
        return len(self.source)

    def pack(self, x: Tensor) -> Tensor:
        """[B, S, ...] as [N, ...]."""
        return x.flatten(0, 1).index_select(0, self.source)

    def inputs(self, input_ids: Tensor) -> dict[str, Any]:
        """What a model whose attention can be tapped reads the pack by, in place of the rows' ids [B, S] and their mask."""
        there = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device)  # transformers leaves four dimensions alone
        ids = self.pack(input_ids).unsqueeze(0)
        return {"input_ids": ids, "attention_mask": there, "position_ids": self.position_ids, "packed": self}

    def unpack(self, x: Tensor) -> Tensor:
        """[N, ...] as [B, S, ...]; anything at padding."""
        return x.index_select(0, self.places.flatten()).unflatten(0, self.places.shape)

    def responding(self, x: Tensor) -> Tensor:
        """[R, ...] of the response tokens as [B, T, ...], 0 at padding."""
        places = (self.places[:, -self.width :] - self.prompts.count).clamp(min=0)
        there = self.attention_mask[:, -self.width :].reshape(*places.shape, *[1] * (x.dim() - 1))
        return x.index_select(0, places.flatten()).unflatten(0, places.shape).masked_fill(~there, 0)

    def earlier(self, x: Tensor) -> Tensor:
        """x [N, ...] of the token before each, 0 at the first."""
        first = (self.position_ids[0] == 0).reshape(len(x), *[1] * (x.dim() - 1))
        return x.index_select(0, self.before).masked_fill(first, 0)

    def running_max(self, x: Tensor) -> Tensor:
        """The largest x [N, M] of a sequence, its prompt included, up to each token."""
        prompt = self.prompts.flat(self.prompts.padded(x).cummax(1).values)
        own, asked = self.responses.flat(self.responses.padded(x).cummax(1).values), prompt.index_select(0, self.ends)
        return torch.cat([prompt, torch.where(own >= asked, own, asked)])

    def parts(self, query: Tensor, *of_keys: Tensor) -> Iterator[tuple[Spans, list[Tensor], Tensor | None]]:
        """Prompts, then responses, as batches that attend by themselves: sequences, [query, *keys], mask.

        query: [N, H, d], given as [A, H, Q, d]; of_keys: [N, H_kv, d] each, given as [A, H_kv, K, d], those of responses after
        their prompt's. mask: None is causal.
        """
        of_prompts, of_responses = ([spans.padded(x) for x in of_keys] for spans in (self.prompts, self.responses))
        whole = [
            torch.cat([prompt.index_select(0, self.asked), own], 1)
            for prompt, own in zip(of_prompts, of_responses, strict=True)
        ]
        for spans, keys, mask in ((self.prompts, of_prompts, None), (self.responses, whole, self.seen)):
            yield spans, [x.transpose(1, 2) for x in (spans.padded(query), *keys)], mask

    def visible(self) -> Tensor | None:
        """[B, 1, S, S] bool of the rows: causal, without padding; None where there is no padding and causal says it all."""
        if not self.padded:
            return None
        position = torch.arange(self.attention_mask.shape[1], device=self.places.device)
        return (position <= position.unsqueeze(1)) & self.attention_mask[:, None, None, :]


def same_prompts(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """A number for each prompt [B], 0, 1, ..., the same for the same tokens. Both [B, P], padded on the left."""
    if not input_ids.shape[1]:
        return torch.zeros(len(input_ids), dtype=torch.long, device=input_ids.device)
    return torch.unique(input_ids.masked_fill(attention_mask == 0, -1), dim=0, return_inverse=True)[1]


def can_pack(attention_mask: Tensor, width: int) -> bool:
    """Whether `pack` takes rows with this mask [B, S], of which the last `width` tokens respond."""
    return bool(attention_mask[:, :-width].any(1).all()) and bool(attention_mask[:, -width:].any())


def worth_sharing(input_ids: Tensor, attention_mask: Tensor, width: int) -> bool:
    """Whether a pack of these rows has at most `SHARED_AT_MOST` of their tokens, padding left out."""
    asked = attention_mask[:, :-width].sum(1)
    group = same_prompts(input_ids[:, :-width], attention_mask[:, :-width])
    once = asked.new_zeros(len(group)).scatter(0, group, asked).sum()
    whole = attention_mask.sum()
    return bool(whole - asked.sum() + once <= SHARED_AT_MOST * whole)


def pack(input_ids: Tensor, attention_mask: Tensor, width: int) -> Packed:
    """Rows [B, S], prompts padded on the left, `width` response tokens on the right, with each prompt once.

    Rows may stand in any order. Raises ValueError where a prompt has no token, or no row responds.
    """
    mask, device = attention_mask.bool(), input_ids.device
    asked, length = mask[:, :-width].sum(1), mask[:, -width:].sum(1)
    if not bool(asked.all()) or not bool(length.any()):
        raise ValueError("a pack needs a token in every prompt, and one in the responses")
    group = same_prompts(input_ids[:, :-width], mask[:, :-width])
    count = int(group.max()) + 1
    of_prompt = asked.new_zeros(count).scatter(0, group, asked)
    per_prompt = length.new_zeros(count).index_add(0, group, length)
    order = group.argsort(stable=True)
    prompts = Spans.of(of_prompt, 0)
    responses = Spans.of(length[order], prompts.count)
    starts = torch.empty_like(length)
    starts[order] = prompts.count + length[order].cumsum(0) - length[order]
    first = (of_prompt.cumsum(0) - of_prompt)[group]
    position = mask.cumsum(1) - 1
    places = torch.cat([first.unsqueeze(1) + position[:, :-width], (starts - asked).unsqueeze(1) + position[:, -width:]], 1)
    places = places.masked_fill(~mask, 0)
    n, every = prompts.count + responses.count, torch.arange(mask.numel(), device=device)[mask.flatten()]
    source = every.new_zeros(n).scatter_reduce(0, places[mask], every, "amin", include_self=False)
    before = torch.arange(-1, n - 1, device=device)
    before[first] = 0
    before[starts[length > 0]] = (first + asked - 1)[length > 0]
    return Packed(
        mask,
        width,
        source,
        places,
        position.flatten()[source].unsqueeze(0),
        before,
        (of_prompt.cumsum(0) - 1).repeat_interleave(per_prompt),
        prompts,
        responses,
        group[order],
        not bool(mask.all()),
        _seen(prompts.padding, prompts.shape[1], responses.shape[1], group[order]),
    )


def _seen(padding: Tensor | None, asked: int, width: int, of: Tensor) -> Tensor:
    """`Packed.seen`, of the padding of prompts of `asked` tokens, and the prompt of each response."""
    prompt = torch.ones(1, asked, dtype=torch.bool, device=of.device) if padding is None else ~padding[of]
    own = torch.ones(width, width, dtype=torch.bool, device=of.device).tril().expand(len(prompt), -1, -1)
    return torch.cat([prompt.unsqueeze(1).expand(-1, width, -1), own], 2).unsqueeze(1)


def shared_attention(query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float) -> Tensor:
    """Attention [N, H, d] over a pack. query: [N, H, d]; key, value: [N, H_kv, d], H a multiple of each one's H_kv.

    Prompts attend causally to themselves, responses to their prompt and, causally, to themselves. As PyTorch's own, it computes
    in autocast's precision.
    """
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    if query.is_cuda:  # whose kernels that take a mask want as many heads of keys as of queries
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    grouped = not query.shape[1] == key.shape[1] == value.shape[1]
    attended = []
    for spans, (queries, keys, values), mask in packed.parts(query, key.to(query.dtype), value.to(query.dtype)):
        found = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
        attended.append(spans.flat(found.transpose(1, 2)))
    return torch.cat(attended)
