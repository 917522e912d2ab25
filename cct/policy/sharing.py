"""Whether a model can read rows that share prompts as one pack."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from cct.packing import Packed, pack

from .attention import attention_modules, probing, tappable


class Sharing(NamedTuple):
    """Whether a model can read a pack."""

    refused: str = ""
    """Why not; empty where it can."""
    window: int | None = None
    """Tokens of a sequence within which every token sees all before it; None where there is no sliding window."""


def sharing_of(model: PreTrainedModel) -> Sharing:
    """Whether a model that `tappable` gave reads a pack as it reads its rows: two rows that share a prompt tell."""
    return _by_layers(model.config) or _tried(model, *_rows(model.config, model.device))


def sharing_of_config(config: Any) -> Sharing:
    """As far as a model's transformers configuration tells: all but whether it gives the same logits. No weights are made.

    Raises ValueError where there is no such model, or its attention cannot be tapped.
    """
    if refused := _by_layers(config):
        return refused
    rows = _rows(config, torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        return _tried(tappable(AutoModelForCausalLM.from_config(config)), *rows, compare=False)


def _by_layers(config: Any) -> Sharing | None:
    """The refusal of a model with layers that are known not to read a pack; None where there is no such layer."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    return Sharing(f"it has layers of {', '.join(sorted(kinds))}") if kinds else None


def _rows(config: Any, device: torch.device) -> tuple[Tensor, Tensor, Packed]:
    """Two rows with one prompt, [2, 5] ids and mask, and their pack."""
    ids = torch.tensor([[0, 5, 3, 8, 4], [0, 5, 3, 2, 7]], device=device) % config.get_text_config().vocab_size
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 1, 0]], device=device)
    return ids, mask, pack(ids, mask, 2)


def _tried(model: PreTrainedModel, ids: Tensor, mask: Tensor, packed: Packed, compare: bool = True) -> Sharing:
    config, modules = model.config.get_text_config(), attention_modules(model)
    try:
        with probing(model, modules) as probe:
            shared = packed.unpack(model(**packed.inputs(ids), use_cache=False).logits[0])
            called = [arguments for _, arguments in probe.called]
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            rows = (
                model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits if compare else shared
            )
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return Sharing(f"it cannot read them: {next(iter(str(error).splitlines()), type(error).__name__)}")
    if sum(arguments.get("packed") is not None for arguments in called) != len(modules):
        return Sharing("its layers do not hand to their attention what shared prompts need")
    precise, there = torch.finfo(rows.dtype).eps ** 0.5, mask.bool()
    if compare and not torch.allclose(rows[there], shared[there], rtol=precise, atol=precise * float(rows.abs().max())):
        return Sharing("it gives other logits then")
    windows = [arguments.get("sliding_window") for arguments in called]
    windows += [getattr(config, "sliding_window", None)] if "layer_types" not in vars(config) else []
    return Sharing(window=min((window for window in windows if window is not None), default=None))
