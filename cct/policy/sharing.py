"""Whether a model can read rows that share prompts as one pack."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from cct.packing import pack

from .attention import attention_modules, probing


class Sharing(NamedTuple):
    """Whether a model can read a pack."""

    refused: str = ""
    """Why not; empty where it can."""
    window: int | None = None
    """Tokens of a sequence within which every token sees all before it; None where there is no sliding window."""


def sharing_of(model: PreTrainedModel) -> Sharing:
    """Whether a model that `tappable` gave reads a pack as it reads its rows: two rows that share a prompt tell."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return Sharing(f"it has layers of {', '.join(sorted(kinds))}")
    vocabulary = torch.arange(config.vocab_size, device=model.device)
    ids = vocabulary[torch.tensor([[0, 5, 3, 8, 4], [0, 5, 3, 2, 7]]) % config.vocab_size]
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 1, 0]], device=model.device)
    packed, modules = pack(ids, mask, 2), attention_modules(model)
    try:
        with probing(model, modules) as probe:
            rows = model(
                input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=False
            ).logits[mask.bool()]
            probe.called.clear()
            shared = packed.unpack(model(**packed.inputs(ids), use_cache=False).logits[0])[mask.bool()]
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return Sharing(f"it cannot read them: {next(iter(str(error).splitlines()), type(error).__name__)}")
    if sum(arguments.get("packed") is not None for _, arguments in probe.called) != len(modules):
        return Sharing("its layers do not hand to their attention what shared prompts need")
    precise = torch.finfo(rows.dtype).eps ** 0.5
    if not torch.allclose(rows, shared, rtol=precise, atol=precise * float(rows.abs().max())):
        return Sharing("it gives other logits then")
    windows = [arguments.get("sliding_window") for _, arguments in probe.called]
    windows += [getattr(config, "sliding_window", None)] if "layer_types" not in vars(config) else []
    return Sharing(window=min((window for window in windows if window is not None), default=None))
