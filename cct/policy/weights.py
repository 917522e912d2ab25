"""A model's weights as others know them: whole under ZeRO-3, adapters merged, by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Weights gathered at once from the processes that share them; a layer of a Transformer has about ten.
GATHERED = 24

ADAPTER = "default"


def is_split(model: nn.Module) -> bool:
    """Whether ZeRO-3 or FSDP has split the weights between processes."""
    return any(hasattr(parameter, "ds_id") or isinstance(parameter, DTensor) for parameter in model.parameters())


@contextmanager
def _whole(parameters: list[nn.Parameter]) -> Iterator[None]:
    """While open, every process holds all of these weights, should ZeRO-3 have split them; all processes must enter."""
    split = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not split:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(split):
        yield


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight that `save_pretrained` of the plain model would know, detached, a few layers at a time.

    Tied weights come under each of their names; low-rank adapters are merged into the weight that they adapt.
    A tensor is good until the next one is asked for, and is no copy unless it had to be gathered or merged.
    """
    units = list(_units(model))
    for start in range(0, len(units), GATHERED):
        some = units[start : start + GATHERED]
        with _whole([p for _, weight, layer in some for p in (weight, *(_adapters(layer) if layer is not None else ()))]):
            for name, weight, layer in some:
                tensor = weight.detach()
                if isinstance(tensor, DTensor):
                    tensor = tensor.full_tensor()
                if layer is not None:
                    tensor = tensor + layer.get_delta_weight(ADAPTER).detach().to(tensor.dtype)
                yield name, tensor.clone() if hasattr(weight, "ds_id") else tensor


def _units(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Plain name, weight, and the adapted layer that it belongs to, if any."""
    for name, weight in model.state_dict(keep_vars=True).items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        adapted = plain != name and name.endswith(".weight")
        yield plain, weight, model.get_submodule(name.removesuffix(".base_layer.weight")) if adapted else None


def _adapters(layer: Any) -> list[nn.Parameter]:
    return [layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]


def add_lora(model: nn.Module, *, rank: int, alpha: int, targets: str | list[str]) -> None:
    """Freeze the model and put trainable low-rank adapters beside its linear layers, in place (Hu et al. 2021, by peft)."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    model.requires_grad_(False)
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout to 0, in place: with noise in the forward, the ratio to the behaviour policy is noise too."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def logprobs_of(model: Any, sequences: Tensor) -> Tensor:
    """Log-probabilities [B, S - 1] of tokens 1 .. S - 1 of unpadded sequences [B, S], float32."""
    with torch.no_grad():
        logits = model(input_ids=sequences, use_cache=False).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(2, sequences[:, 1:].unsqueeze(2)).squeeze(2)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path | None) -> None:
    """Write the plain model and its tokenizer in Hugging Face format; all processes call, all but the first with None."""
    state = {name: tensor.cpu() for name, tensor in named_weights(model) if folder is not None}
    for name, source in model.all_tied_weights_keys.items() if folder is not None else ():
        state[name] = state[source]  # one tensor again, where each was gathered by itself
    if folder is not None:
        model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)
