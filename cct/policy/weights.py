"""A model's weights as others know them: whole under ZeRO-3, adapters merged, by their Hugging Face names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from .base import end_tokens

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


def named_weights(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight that `save_pretrained` of the plain model would know, detached, a few layers at a time.

    Tied weights come under each of their names; low-rank adapters are merged into the weight that they adapt, in the
    adapters' precision, and rounded once. dtype: of the weights that come out; None leaves each its own.
    A tensor is good until the next one is asked for, and is no copy unless it had to be gathered, merged or rounded.
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
                    tensor = tensor + layer.get_delta_weight(ADAPTER).detach()
                tensor = tensor.to(dtype if dtype is not None and tensor.is_floating_point() else weight.dtype)
                yield name, tensor.clone() if hasattr(weight, "ds_id") else tensor


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Of every weight that `named_weights` gives."""
    return {name: weight.shape for name, weight, _ in _units(model)}


def _units(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Plain name, weight, and the adapted layer that it belongs to, if any."""
    for name, weight in model.state_dict(keep_vars=True).items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        adapted = plain != name and name.endswith(".weight")
        yield plain, weight, model.get_submodule(name.removesuffix(".base_layer.weight")) if adapted else None


def _adapters(layer: Any) -> list[nn.Parameter]:
    return [parameter for name, parameter in layer.named_parameters() if name.startswith("lora_")]


def add_lora(model: nn.Module, *, rank: int, alpha: int, targets: str | tuple[str, ...], seed: int = 0) -> None:
    """Freeze the model and put trainable low-rank adapters beside its linear layers, in place (Hu et al. 2021, by peft).

    Adapters are float32, whatever the model is: in bfloat16 an AdamW step below 1/256 of a weight is lost. seed: of their
    initial weights. Raises ValueError where a target names no layer, one that takes no adapter, or one whose weight is tied
    to another's.
    """
    from peft import LoraConfig, inject_adapter_in_model

    _must_name_layers(model, () if isinstance(targets, str) else targets)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=targets if isinstance(targets, str) else list(targets), task_type="CAUSAL_LM"
    )
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    names = Counter(id(weight) for _, weight, _ in _units(model))
    for name, weight, layer in _units(model):
        if layer is not None and names[id(weight)] > 1:
            raise ValueError(
                f"targets: {name} is tied to another weight (tie_word_embeddings), and an adapter would change only one of the "
                "two; leave it out of targets"
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if ".lora_" in name:
            parameter.data = parameter.data.float()


def _must_name_layers(model: nn.Module, targets: tuple[str, ...]) -> None:
    """Raises ValueError where a target is neither the name of a layer with a matrix nor the end of one."""
    parameters = model.named_parameters(remove_duplicate=False)
    there = [f".{name.removesuffix('.weight')}" for name, weight in parameters if weight.dim() == 2]
    missing = [target for target in targets if not any(name.endswith(f".{target}") for name in there)]
    if missing:
        known = sorted({name.rpartition(".")[2] for name in there})
        raise ValueError(f"targets: no layer is called {' or '.join(missing)}; there are {', '.join(known)}")


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


def probe(actor: PreTrainedModel, shape: tuple[int, int]) -> tuple[list[list[int]], Tensor]:
    """Fixed random sequences of token ids, and the actor's log-probabilities of all but the first of each, float32 on the CPU.

    shape: number of sequences B and length S; the log-probabilities are [B, S - 1]. All processes must call.
    """
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(0, actor.config.get_text_config().vocab_size, shape, generator=generator)
    training = actor.training
    actor.eval()
    logprobs = logprobs_of(actor, sequences.to(actor.device)).cpu()
    actor.train(training)
    return sequences.tolist(), logprobs


@contextmanager
def generating_by(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """While open, `config` is all the model has of a generation configuration.

    transformers' `generate` takes whatever its caller leaves open from the model's own, which is that of some folder.
    """
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


def exported_generation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """The generation configuration of an exported policy: what ends a response, and nothing of how to sample.

    A penalty or temperature of the folder that training began with was no part of the policy that was trained.
    """
    ends = list(end_tokens(model, tokenizer))
    return GenerationConfig(
        eos_token_id=ends if len(ends) > 1 else ends[0],
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | None,
    *,
    dtype: torch.dtype | None = None,
    columns: int | None = None,
) -> None:
    """Write the plain model and its tokenizer in Hugging Face format; all processes call, all but the first with None.

    dtype: of the weights; None leaves each its own. columns: of each weight, for a folder without its bulk; None writes all.
    Raises ValueError where a weight is beyond the range of float16.
    """
    state = {
        name: (tensor[..., :columns] if tensor.dim() else tensor).cpu()
        for name, tensor in named_weights(model, dtype)
        if folder is not None
    }
    if folder is None:
        return
    if dtype == torch.float16 and (beyond := [name for name, tensor in state.items() if tensor.isinf().any()]):
        raise ValueError(f"{beyond[0]} has weights beyond 65504, the largest number of float16; use bfloat16")
    for name, source in model.all_tied_weights_keys.items():
        state[name] = state[source]  # one tensor again, where each was gathered by itself
    with generating_by(model, exported_generation(model, tokenizer)):
        model.save_pretrained(folder, state_dict=state)
    if dtype is not None:
        model.config.dtype = dtype  # which `save_pretrained` wrote of the model, not of what it was handed
        model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
