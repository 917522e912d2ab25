"""Attention statistics without attention matrices, and the tap that reads queries and keys off a model.

A transformers model whose attention implementation is "cct" runs PyTorch's scaled dot-product
attention as usual; while a tap is open, the layers it names also leave their queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cct.packing import Packed, shared_attention
from cct.statistic.forward import QUERY_BLOCK, Attention, PackedAttention
from cct.tensors import as_mask

# An additive mask at or below this hides a key: its probability is 0 in float32 beside any logit that models have.
HIDDEN = -1e3

Kernel = Literal["cpu", "flash", "efficient", "blocks"]


def kernel_of(query: Tensor) -> Kernel:
    """What gives the log-sum-exp of queries [..., d] on their device.

    cpu: the CPU's flash attention. flash, efficient: CUDA's, for half precision and for the rest. blocks: attention written
    out, `QUERY_BLOCK` queries at a time, for other devices and for heads whose width no kernel takes.
    """
    if query.device.type == "cpu":
        return "cpu"
    if not query.is_cuda or query.shape[-1] % 8 or query.shape[-1] > 256:
        return "blocks"
    return "flash" if query.dtype in (torch.bfloat16, torch.float16) else "efficient"


# Tokens of a sequence from which a mask is taken apart into runs on the CPU: one call for all rows is quicker below.
RUNS_FROM = 512


@dataclass(frozen=True)
class Runs:
    """Stretches of tokens in which each attends to all before it and to itself, and to nothing else.

    Rows padded on either side consist of one each, rows into which sequences are packed of several. What is in none is
    padding.
    """

    spans: tuple[tuple[int, int, int], ...]
    """Row, first token, and the one after the last."""

    @classmethod
    def packed(cls, lengths: Iterable[Iterable[int]]) -> Runs:
        """Of rows in which sequences of these lengths follow each other from the first token on."""
        spans = []
        for row, each in enumerate(lengths):
            first = 0
            for length in each:
                spans.append((row, first, first + length))
                first += length
        return cls(tuple(spans))

    @classmethod
    def of(cls, mask: Tensor) -> Runs | None:
        """Those that a mask [B, 1, S, S], bool or additive, consists of; None where it says anything else, such as a window.

        Queries that do not see themselves are padding, whatever they see. O(B * 256 * S) memory.
        """
        visible = _visible(mask[:, 0])
        position = torch.arange(visible.shape[2], device=mask.device)
        is_token = visible.diagonal(dim1=1, dim2=2)
        follows = is_token & F.pad(is_token[:, :-1] & visible.diagonal(-1, 1, 2), (1, 0))  # the token before is of its run
        first = torch.where(follows, 0, position).cummax(1).values
        for start in range(0, len(position), QUERY_BLOCK):
            block = slice(start, start + QUERY_BLOCK)
            expected = (position >= first[:, block, None]) & (position <= position[block, None])
            if bool(((expected != visible[:, block]) & is_token[:, block, None]).any()):
                return None
        starts = (is_token & ~follows).nonzero().tolist()
        ends = (is_token & ~F.pad(follows[:, 1:], (0, 1))).nonzero().tolist()
        return cls(tuple((row, begin, last + 1) for (row, begin), (_, last) in zip(starts, ends, strict=True)))


def attention_concentration(
    query: Tensor,
    key: Tensor,
    *,
    mask: Tensor | Runs | None = None,
    scaling: float | None = None,
    statistic: Literal["shannon", "renyi2", "max"] = "shannon",
    sinks: int = 0,
    kernel: Kernel | None = None,
) -> Tensor:
    """1 - H(p) / log n for each query, where p is its attention over the n keys it sees; the largest p for `max`.

    query: [B, H, S, d]; key: [B, H_kv, S, d], H a multiple of H_kv. mask: [B or 1, 1, S, S], bool or integers 0
    and 1 (True = visible), or additive; `Runs` of padded or packed rows say the same without S*S numbers; None is plain causal.
    scaling: of the logits, default d^-0.5. sinks: leading visible keys left out, the rest renormalised. Returns [B, H, S]
    float32, detached, in [0, 1]; 1 where fewer than two keys are left. At padding (queries that do not see themselves) it may
    be anything in [0, 1]. kernel: None takes `kernel_of(query)`.

    Shannon: H = lse - scaling * q.k_mean with k_mean = attention(q, k, k). Renyi-2: H = -log sum p^2,
    sum p^2 = exp(lse(2 scaling) - 2 lse(scaling)). Each is one more pass of the kernel that gives its log-sum-exp, in
    O(B*H*S*d) memory: float32 on the CPU, half precision on CUDA where queries come in it. A mask that is not made of runs
    adds B*256*S numbers. Max: exp(largest logit - lse), which no kernel returns, so H*256*S numbers a sequence are written
    out, as they are for every statistic on other devices. Raises ValueError on an unknown statistic.
    """
    if statistic not in ("shannon", "renyi2", "max"):
        raise ValueError(f"statistic must be 'shannon', 'renyi2' or 'max'; got {statistic!r}")
    with torch.no_grad():
        query, key = query.detach(), key.detach()
        kernel = kernel or kernel_of(query)
        if kernel != "flash":
            query, key = query.float(), key.float()
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if isinstance(mask, Tensor) and _has_values(mask) and (kernel != "cpu" or query.shape[2] >= RUNS_FROM):
            mask = Runs.of(mask.expand(len(query), -1, -1, -1)) or mask
        if mask is None:
            return _under_causal(query, key, scaling, statistic, sinks, kernel)
        if isinstance(mask, Runs):
            return _under_runs(query, key, mask, scaling, statistic, sinks, kernel)
        return _under_mask(query, key, _visible(mask), scaling, statistic, sinks, kernel)


def packed_concentration(
    query: Tensor, key: Tensor, packed: Packed, *, scaling: float, statistic: Literal["shannon", "renyi2"] = "shannon"
) -> Tensor:
    """`attention_concentration` over a pack: query [N, H, d]; key [N, H_kv, d]. Returns [N, H] float32."""
    with torch.no_grad():
        query, key = query.detach().float(), key.detach().float()
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)

        def of_keys(scale: float) -> tuple[Tensor, Tensor]:
            found: list[tuple[Tensor, Tensor]] = []
            for spans, (queries, keys), seen in packed.parts(query, key):
                additive = None if seen is None else queries.new_zeros(seen.shape).masked_fill_(~seen, -math.inf)
                lse, mean_key = _attend_to_keys(queries, keys, additive, scale, kernel_of(queries))
                found.append((spans.flat(lse.transpose(1, 2)), spans.flat(mean_key.transpose(1, 2))))
            lses, mean_keys = zip(*found, strict=True)
            return torch.cat(lses), torch.cat(mean_keys)

        return _of_entropy(_entropy(query, of_keys, scaling, statistic), packed.position_ids.T + 1)


def _has_values(mask: Tensor) -> bool:
    """Tensors by which memory is planned have a shape only."""
    return not isinstance(mask, FakeTensor)


def _visible(mask: Tensor) -> Tensor:
    return mask > HIDDEN if mask.is_floating_point() else as_mask(mask)


def _under_causal(query: Tensor, key: Tensor, scaling: float, statistic: str, sinks: int, kernel: Kernel) -> Tensor:
    # Without the first keys, and the queries that see only them, it is plain causal again.
    n = torch.arange(1, query.shape[2] - sinks + 1, device=query.device)
    if len(n) < 2:
        return torch.ones(query.shape[:3], device=query.device)
    return F.pad(
        _concentration(query[:, :, sinks:], key[:, :, sinks:], None, n, scaling, statistic, kernel), (sinks, 0), value=1.0
    )


def _under_runs(query: Tensor, key: Tensor, runs: Runs, scaling: float, statistic: str, sinks: int, kernel: Kernel) -> Tensor:
    result = torch.ones(query.shape[:3], device=query.device)
    spans = [(row, first + sinks, end) for row, first, end in runs.spans if end - first > sinks + 1]
    if kernel == "flash" and statistic != "max" and spans:
        rows = torch.cat([torch.full((end - first,), row) for row, first, end in spans]).to(query.device)
        places = torch.cat([torch.arange(first, end) for _, first, end in spans]).to(query.device)
        lengths = torch.tensor([end - first for _, first, end in spans])
        result[rows, :, places] = _of_packed(query[rows, :, places], key[rows, :, places], lengths, scaling, statistic)
        return result
    for row, first, end in spans:
        run = slice(row, row + 1), slice(None), slice(first, end)
        result[run] = _under_causal(query[run], key[run], scaling, statistic, 0, kernel)
    return result


def _of_packed(query: Tensor, key: Tensor, lengths: Tensor, scaling: float, statistic: str) -> Tensor:
    """Concentration [N, H] of sequences that follow each other, in one call on CUDA. query: [N, H, d]; key: [N, H_kv, d]."""
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    n = torch.arange(1, len(query) + 1) - offsets[:-1].repeat_interleave(lengths)
    ends, longest = offsets.to(query.device, torch.int32), int(lengths.max())

    def attend(scale: float) -> tuple[Tensor, Tensor]:
        mean_key, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, key, ends, ends, longest, longest, 0.0, True, False, scale=scale
        )
        return lse.T, mean_key  # lse: [H, N]

    return _of_entropy(_entropy(query, attend, scaling, statistic), n.to(query.device).unsqueeze(1))


def _under_mask(
    query: Tensor, key: Tensor, visible: Tensor, scaling: float, statistic: str, sinks: int, kernel: Kernel
) -> Tensor:
    """`QUERY_BLOCK` queries at a time, each block with the keys that any of it sees."""
    result = torch.ones(query.shape[:3], device=query.device)
    for start in range(0, query.shape[2], QUERY_BLOCK):
        block = slice(start, start + QUERY_BLOCK)
        seen = visible[:, :, block]
        if sinks:
            seen = seen & (seen.long().cumsum(-1) > sinks)
        columns = seen.flatten(0, 2).any(0).nonzero().flatten().tolist() if _has_values(seen) else [0, seen.shape[3] - 1]
        if not columns:
            continue
        keys = slice(columns[0], columns[-1] + 1)
        seen = seen[..., keys]
        n = seen.sum(-1)  # [B or 1, 1, block]
        # A query that sees nothing must not become NaN; its result is overwritten.
        additive = query.new_zeros(seen.shape).masked_fill_(~seen & (n > 0).unsqueeze(-1), -math.inf)
        result[:, :, block] = _concentration(query[:, :, block], key[:, :, keys], additive, n, scaling, statistic, kernel)
    return result


def _concentration(
    query: Tensor, key: Tensor, additive: Tensor | None, n: Tensor, scaling: float, statistic: str, kernel: Kernel
) -> Tensor:
    """Of queries [B, H, Q, d] that see n keys each; additive: [B or 1, 1, Q, S], None is causal with Q = S."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    if statistic == "max":
        return torch.where(n < 2, 1.0, _largest(query, key, additive, scaling)).clamp(0, 1)
    return _of_entropy(
        _entropy(query, lambda scale: _attend_to_keys(query, key, additive, scale, kernel), scaling, statistic), n
    )


def _entropy(query: Tensor, attend: Callable[[float], tuple[Tensor, Tensor]], scaling: float, statistic: str) -> Tensor:
    """Of each query's attention, in nats. attend: from a scaling to the log-sum-exp and the mean key."""
    lse, mean_key = attend(scaling)
    if statistic == "shannon":
        return lse - scaling * mean_key.float().mul_(query).sum(-1)
    return 2 * lse - attend(2 * scaling)[0]


def _of_entropy(entropy: Tensor, n: Tensor) -> Tensor:
    return torch.where(n < 2, 1.0, 1 - entropy / n.clamp(min=2).log()).clamp(0, 1)


def _attend_to_keys(
    query: Tensor, key: Tensor, additive: Tensor | None, scaling: float, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the logits [B, H, Q] and the attention-weighted mean key [B, H, Q, d]."""
    aten, causal = torch.ops.aten, additive is None
    if kernel == "cpu":
        mask = additive.expand(len(query), 1, -1, -1) if additive is not None else None
        mean_key, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, key, 0.0, causal, attn_mask=mask, scale=scaling
        )
        return lse, mean_key
    if kernel == "flash" and causal:
        mean_key, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, key, 0.0, True, scale=scaling)
        return lse, mean_key
    if kernel in ("flash", "efficient"):
        if additive is not None:  # the kernel wants its bias with a stride of a multiple of 16 numbers
            width = additive.shape[3]
            additive = F.pad(additive, (0, -width % 16))[..., :width].expand(*query.shape[:2], -1, -1)
        mean_key, lse, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, key, additive, True, 0.0, causal, scale=scaling
        )
        return lse[..., : query.shape[2]], mean_key  # which it pads to a multiple of 32
    lse, mean_key = query.new_empty(query.shape[:-1], dtype=torch.float32), torch.empty_like(query)
    for block, logits in _logits(query, key, additive, scaling):
        lse[:, :, block] = logits.logsumexp(-1)
        mean_key[:, :, block] = logits.softmax(-1).to(key.dtype) @ key
    return lse, mean_key


def _largest(query: Tensor, key: Tensor, additive: Tensor | None, scaling: float) -> Tensor:
    """Largest attention probability of each query, [B, H, Q]."""
    largest = query.new_empty(query.shape[:-1], dtype=torch.float32)
    for block, logits in _logits(query, key, additive, scaling):
        largest[:, :, block] = (logits.amax(-1) - logits.logsumexp(-1)).exp()
    return largest


def _logits(query: Tensor, key: Tensor, additive: Tensor | None, scaling: float) -> Iterator[tuple[slice, Tensor]]:
    """Masked logits in float32, `QUERY_BLOCK` queries at a time."""
    position = torch.arange(query.shape[2], device=query.device)
    for start in range(0, query.shape[2], QUERY_BLOCK):
        block = slice(start, start + QUERY_BLOCK)
        logits = (query[:, :, block] @ key.transpose(-1, -2)).float() * scaling
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
    tap, index = getattr(module, "_cct_tap", None), getattr(module, "layer_idx", -1)
    taps = tap if isinstance(tap, Tap) and index in tap.layers else None
    scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
    if isinstance(tap, _Probe):
        tap.called.append((module, kwargs))
    if (packed := kwargs.get("packed")) is not None:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        if taps is not None:
            taps.attention[index] = PackedAttention(query.detach(), key.detach(), packed, scaling)
        return shared_attention(query, key, value, packed, scaling).unsqueeze(0), None
    if taps is not None:
        taps.attention[index] = Attention(query.detach(), key.detach(), attention_mask, scaling)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("cct", _attention)
AttentionMaskInterface.register("cct", sdpa_mask)


class _Probe:
    """Collects the modules that call the attention interface, and with what."""

    def __init__(self) -> None:
        self.called: list[tuple[nn.Module, dict[str, Any]]] = []


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that `tappable` found."""
    return [module for module in model.modules() if "_cct_tap" in module.__dict__]


def tappable(model: PreTrainedModel) -> PreTrainedModel:
    """Switch the model to the tapped attention. Raises ValueError, naming what was found, where it cannot be tapped.

    One forward of two tokens tells which modules call transformers' attention interface, and with what:
    how a model makes its queries and keys does not matter.
    """
    name, layers = type(model).__name__, model.config.get_text_config().num_hidden_layers
    model.set_attn_implementation("cct")
    try:
        with probing(model, list(model.modules())) as probe:
            model(input_ids=torch.zeros(1, PROBE, dtype=torch.long, device=model.device), use_cache=False)
    except _Refused as refused:
        raise ValueError(f"the attention of {name} cannot be tapped: {refused}") from None
    indices = [getattr(module, "layer_idx", None) for module, _ in probe.called]
    if sorted(indices, key=str) != sorted(range(layers), key=str):
        raise ValueError(
            f"the attention of {name} cannot be tapped: {len(set(indices))} of {layers} layers go through transformers' "
            "attention interface"
        )
    for module, _ in probe.called:
        object.__setattr__(module, "_cct_tap", None)
    return model


@contextmanager
def probing(model: PreTrainedModel, modules: Iterable[nn.Module]) -> Iterator[_Probe]:
    """While open, the attention of these modules is seen by a probe; no gradient, no dropout."""
    probe, training, modules = _Probe(), model.training, list(modules)
    before = {module: module.__dict__["_cct_tap"] for module in modules if "_cct_tap" in module.__dict__}
    for module in modules:
        object.__setattr__(module, "_cct_tap", probe)
    try:
        with torch.no_grad():
            model.eval()
            yield probe
    finally:
        model.train(training)
        for module in modules:
            object.__delattr__(module, "_cct_tap")
        for module, tap in before.items():
            object.__setattr__(module, "_cct_tap", tap)


@contextmanager
def tap(model: nn.Module, layers: Iterable[int]) -> Iterator[Tap]:
    """While open, forwards of `model` leave the named layers' queries and keys in the tap (the last forward's)."""
    opened, modules = Tap(layers), attention_modules(model)
    for module in modules:
        object.__setattr__(module, "_cct_tap", opened)
    try:
        yield opened
    finally:
        for module in modules:
            object.__setattr__(module, "_cct_tap", None)
