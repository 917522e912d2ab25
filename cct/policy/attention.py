"""Attention statistics without attention matrices, and the tap that reads queries and keys off a model.

A transformers model whose attention implementation is "cct" runs PyTorch's scaled dot-product
attention as usual; while a tap is open, the layers it names also leave their queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cct.rollout import QUERY_BLOCK, Attention

# An additive mask at or below this hides a key: its probability is 0 in float32 beside any logit that models have.
HIDDEN = -1e3


def attention_concentration(
    query: Tensor,
    key: Tensor,
    *,
    mask: Tensor | None = None,
    scaling: float | None = None,
    statistic: Literal["shannon", "renyi2", "max"] = "shannon",
    sinks: int = 0,
) -> Tensor:
    """1 - H(p) / log n for each query, where p is its attention over the n keys it sees; the largest p for `max`.

    query: [B, H, S, d]; key: [B, H_kv, S, d], H a multiple of H_kv. mask: [B or 1, 1, S, S], bool (True =
    visible) or additive; None is plain causal. scaling: of the logits, default d^-0.5. sinks: leading
    visible keys left out, the rest renormalised. Returns [B, H, S] float32, detached, in [0, 1]; 1 where
    fewer than two keys are left. O(B*H*S*d) memory where the kernel gives its log-sum-exp (CPU).

    Shannon: H = lse - scaling * q.k_mean with k_mean = attention(q, k, k). Renyi-2: H = -log sum p^2,
    sum p^2 = exp(lse(2 scaling) - 2 lse(scaling)). Max: exp(largest logit - lse), which no kernel returns, so the queries
    go through 256 at a time: H*256*S numbers a sequence on any device. Raises ValueError on an unknown statistic.
    """
    if statistic not in ("shannon", "renyi2", "max"):
        raise ValueError(f"statistic must be 'shannon', 'renyi2' or 'max'; got {statistic!r}")
    with torch.no_grad():
        query, key = query.detach().float(), key.detach().float()
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        visible = _visible(mask, query.shape[2], query.device)  # [B or 1, 1, S, S]
        if sinks:
            visible = visible & (visible.long().cumsum(-1) > sinks)
        n = visible.sum(-1)  # [B or 1, 1, S]
        causal_only = mask is None and not sinks
        additive = None
        if not causal_only:  # a query that sees nothing must not become NaN; its result is overwritten below
            additive = torch.zeros(visible.shape, device=query.device).masked_fill_(~visible & (n > 0).unsqueeze(-1), -math.inf)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        if statistic == "max":
            return torch.where(n < 2, 1.0, _largest(query, key, additive, scaling)).clamp(0, 1)
        lse, mean_key = _attend_to_keys(query, key, additive, scaling)
        if statistic == "shannon":
            entropy = lse - scaling * (query * mean_key).sum(-1)
        else:
            entropy = 2 * lse - _attend_to_keys(query, key, additive, 2 * scaling)[0]
        concentration = 1 - entropy / n.clamp(min=2).log()
        return torch.where(n < 2, 1.0, concentration).clamp(0, 1)


def _visible(mask: Tensor | None, length: int, device: torch.device) -> Tensor:
    if mask is None:
        return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
    return mask if mask.dtype == torch.bool else mask > HIDDEN


def _attend_to_keys(query: Tensor, key: Tensor, additive: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the logits [B, H, S] and the attention-weighted mean key [B, H, S, d]."""
    if query.device.type == "cpu":
        if additive is not None:
            additive = additive.expand(query.shape[0], 1, -1, -1)
        mean_key, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, key, 0.0, additive is None, attn_mask=additive, scale=scaling
        )
        return lse, mean_key
    lse, mean_key = query.new_empty(query.shape[:-1]), torch.empty_like(query)
    for block, logits in _logits(query, key, additive, scaling):
        lse[:, :, block] = logits.logsumexp(-1)
        mean_key[:, :, block] = logits.softmax(-1) @ key
    return lse, mean_key


def _largest(query: Tensor, key: Tensor, additive: Tensor | None, scaling: float) -> Tensor:
    """Largest attention probability of each query, [B, H, S]."""
    largest = query.new_empty(query.shape[:-1])
    for block, logits in _logits(query, key, additive, scaling):
        largest[:, :, block] = (logits.amax(-1) - logits.logsumexp(-1)).exp()
    return largest


def _logits(query: Tensor, key: Tensor, additive: Tensor | None, scaling: float) -> Iterator[tuple[slice, Tensor]]:
    """Masked logits, `QUERY_BLOCK` queries at a time."""
    position = torch.arange(query.shape[2], device=query.device)
    for start in range(0, query.shape[2], QUERY_BLOCK):
        block = slice(start, start + QUERY_BLOCK)
        logits = query[:, :, block] @ key.transpose(-1, -2) * scaling
        if additive is not None:
            yield block, logits + additive[:, :, block]
        else:
            yield block, logits.masked_fill(position > position[block].unsqueeze(1), -math.inf)


class Tap:
    """Queries and keys of the layers it was opened for, as the kernel saw them."""

    def __init__(self, layers: Iterable[int]):
        self.layers = frozenset(layers)
        self.attention: dict[int, Attention] = {}


# What a model may hand to the attention interface that makes its attention more than a softmax of scaled q.k under a mask.
MORE_THAN_SOFTMAX = {"softcap": "soft-capped logits", "s_aux": "learnt sinks", "position_bias": "a position bias"}

# Tokens of the forward that finds the modules which call the attention interface.
PROBE = 2


class _Refused(ValueError):
    """Met during the probing forward: what of a model's attention the tap would leave out."""


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs):
    more = [f"{what} ({name})" for name, what in MORE_THAN_SOFTMAX.items() if kwargs.get(name) is not None]
    if more:
        raise _Refused(f"{type(module).__name__} has {' and '.join(more)}, and is more than the softmax that the tap reads")
    tap, index = getattr(module, "_cct_tap", None), getattr(module, "layer_idx", None)
    if isinstance(tap, _Probe):
        tap.called.append(module)
    elif tap is not None and index in tap.layers:
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        tap.attention[index] = Attention(query.detach(), key.detach(), attention_mask, scaling)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("cct", _attention)
AttentionMaskInterface.register("cct", sdpa_mask)


class _Probe:
    """Collects the modules that call the attention interface."""

    def __init__(self) -> None:
        self.called: list[nn.Module] = []


def _attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that `tappable` found."""
    return [module for module in model.modules() if "_cct_tap" in module.__dict__]


def tappable(model: PreTrainedModel) -> PreTrainedModel:
    """Switch the model to the tapped attention. Raises ValueError, naming what was found, where it cannot be tapped.

    One forward of two tokens tells which modules call transformers' attention interface, and with what:
    how a model makes its queries and keys does not matter.
    """
    name, layers = type(model).__name__, model.config.get_text_config().num_hidden_layers
    model.set_attn_implementation("cct")
    probe, training, modules = _Probe(), model.training, list(model.modules())
    for module in modules:
        object.__setattr__(module, "_cct_tap", probe)
    try:
        with torch.no_grad():
            model.eval()(input_ids=torch.zeros(1, PROBE, dtype=torch.long, device=model.device), use_cache=False)
    except _Refused as refused:
        raise ValueError(f"the attention of {name} cannot be tapped: {refused}") from None
    finally:
        model.train(training)
        for module in modules:
            object.__delattr__(module, "_cct_tap")
    indices = [getattr(module, "layer_idx", None) for module in probe.called]
    if sorted(indices, key=str) != sorted(range(layers), key=str):
        raise ValueError(
            f"the attention of {name} cannot be tapped: {len(set(indices))} of {layers} layers go through transformers' "
            "attention interface"
        )
    for module in probe.called:
        object.__setattr__(module, "_cct_tap", None)
    return model


@contextmanager
def tap(model: nn.Module, layers: Iterable[int]) -> Iterator[Tap]:
    """While open, forwards of `model` leave the named layers' queries and keys in the tap (the last forward's)."""
    opened, modules = Tap(layers), _attention_modules(model)
    for module in modules:
        object.__setattr__(module, "_cct_tap", opened)
    try:
        yield opened
    finally:
        for module in modules:
            object.__setattr__(module, "_cct_tap", None)
