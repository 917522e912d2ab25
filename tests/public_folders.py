"""Folders as public chat models have them: their configuration files' fields and chat templates, weights tiny and random."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conftest import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789+-=;# ?\nabcdefghijklmnopqrstuvwxyz"

CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nbe helpful<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Public:
    """What one family's public folder says."""

    family: str
    special: tuple[str, ...]
    """Special tokens, which get the first ids."""
    template: str
    tokenizer: dict[str, Any]
    """Names of its tokens by their roles."""
    generation: dict[str, Any]
    """generation_config.json, ids by the names of their tokens."""
    ends: tuple[str, ...]
    """What should end a response."""
    config: dict[str, Any] = field(default_factory=dict)
    """Of config.json, beside the sizes."""
    starts: str | None = None
    """What the tokenizer's post-processor writes in front."""


# As of Qwen2.5-7B-Instruct, Llama-3-8B-Instruct, gemma-3-1b-it, Mistral-7B-Instruct-v0.3, gemma-7b-it.
PUBLIC = {
    "qwen2.5": Public(
        "qwen2",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        CHATML,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        {
            "bos_token_id": "<|endoftext|>",
            "pad_token_id": "<|endoftext|>",
            "do_sample": True,
            "eos_token_id": ["<|im_end|>", "<|endoftext|>"],
            "repetition_penalty": 1.1,
            "temperature": 0.7,
            "top_p": 0.8,
            "top_k": 20,
            "transformers_version": "4.37.0",
        },
        ("<|im_end|>", "<|endoftext|>"),
        {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 3, "tie_word_embeddings": True},
    ),
    "llama-3": Public(
        "llama",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        LLAMA3,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        {"eos_token_id": ["<|end_of_text|>"], "temperature": 0.6, "top_p": 0.9, "max_length": 24},
        ("<|end_of_text|>", "<|eot_id|>"),
        {
            "tie_word_embeddings": False,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 32,
                "rope_type": "llama3",
            },
        },
        "<|begin_of_text|>",
    ),
    "gemma-3": Public(
        "gemma3",
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        GEMMA,
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
        {
            "cache_implementation": "hybrid",
            "do_sample": True,
            "eos_token_id": ["<eos>", "<end_of_turn>"],
            "top_k": 64,
            "top_p": 0.95,
        },
        ("<eos>", "<end_of_turn>"),
        {"sliding_window": 16},
        "<bos>",
    ),
    "mistral": Public(
        "mistral",
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        MISTRAL,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        {"_from_model_config": True, "bos_token_id": "<s>", "eos_token_id": "</s>"},
        ("</s>",),
        {"sliding_window": None, "tie_word_embeddings": False},
        "<s>",
    ),
    "gemma-1": Public(
        "gemma",
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        GEMMA,
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
        {"_from_model_config": True, "bos_token_id": "<bos>", "eos_token_id": "<eos>", "pad_token_id": "<pad>"},
        ("<eos>", "<end_of_turn>"),
        {},
        "<bos>",
    ),
}


def tokenizer_of(
    special: tuple[str, ...], *, starts: str | None = None, closes: str | None = None, **roles: Any
) -> PreTrainedTokenizerFast:
    """Single characters behind special tokens; starts, closes: what the post-processor writes in front and behind."""
    names = [*special, *CHARACTERS]
    core = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, extra_special_tokens=list(special), **roles)
    around = [(name, names.index(name)) for name in (starts, closes) if name]
    single = " ".join(filter(None, (starts, "$A", closes)))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=around)
    return tokenizer


def write_public(folder: Path, name: str, **changes: Any) -> Path:
    """The folder of one family. changes: of its configuration."""
    public = PUBLIC[name]

    def ids(value: Any) -> Any:
        if isinstance(value, list):
            return [ids(each) for each in value]
        return public.special.index(value) if value in public.special else value

    config = {
        "vocab_size": len(public.special) + len(CHARACTERS) + 7,  # more than the tokenizer knows, as Qwen's
        "eos_token_id": ids(public.tokenizer["eos_token"]),
        "pad_token_id": None,
        "bos_token_id": None,
    }
    model = tiny_model(public.family, **(config | public.config | changes))
    model.save_pretrained(folder)
    tokenizer = tokenizer_of(public.special, starts=public.starts, chat_template=public.template, **public.tokenizer)
    tokenizer.save_pretrained(folder)
    stored = {key: ids(value) for key, value in public.generation.items()}
    (folder / "generation_config.json").write_text(json.dumps(stored))
    return folder
