"""Chat models as they are published: their real chat templates and special tokens, on tiny random models of single bytes.

Templates of Qwen3, Llama 3.1 and Gemma 3 come with TRL, Mistral's with mistral-common (both Apache 2.0, extra `dev`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Family:
    model: str
    """Of conftest.MODELS."""
    special: tuple[str, ...]
    """The special tokens that its template writes, and those that end a text or pad."""
    end: str
    """Ends a turn."""
    eos: str
    bos: str | None = None


FAMILIES = {
    "qwen3": Family("qwen3", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>"),
    "llama3": Family(
        "llama",
        ("<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        "<|eot_id|>",
        "<|end_of_text|>",
        "<|begin_of_text|>",
    ),
    "gemma3": Family(
        "gemma3", ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", "<eos>", "<bos>"
    ),
    "mistral": Family(
        "mistral",
        (
            *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        "</s>",
        "</s>",
        "<s>",
    ),
    "smollm2": Family("llama", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>"),
}


@cache
def template(name: str) -> str:
    if name == "smollm2":
        return (Path(__file__).parent / "templates" / "smollm2.jinja").read_text().removesuffix("\n")
    if name == "mistral":  # of tokenizer version 3, as Mistral-7B-Instruct-v0.3
        pytest.importorskip("mistral_common")
        from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
        from mistral_common.tokens.tokenizers.base import TokenizerVersion

        settings = dict.fromkeys(("model_settings_fields", "reasoning_effort_values", "reasoning_effort_default"))
        supports = dict.fromkeys(("image_support", "audio_support", "thinking_support", "plain_thinking_support"), False)
        version = TokenizerVersion.v3
        text = {"default_system_prompt": None, "use_special_token_variables": True}
        return generate_chat_template(spm=True, tokenizer_version=version, **supports, **settings, **text)
    found = find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("TRL is not installed (extra dev)")
    file = {"qwen3": "qwen3", "llama3": "llama3_1", "gemma3": "gemma3"}[name]
    return (Path(found.origin).parent / "chat_templates" / f"{file}.jinja").read_text()


def byte_tokenizer(special: tuple[str, ...], **roles) -> PreTrainedTokenizerFast:
    """Single bytes and two newlines as one token, behind the special tokens; every text survives encoding and decoding."""
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    core = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[("Ċ", "Ċ")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, extra_special_tokens=list(special), clean_up_tokenization_spaces=False, **roles
    )


def write_family(folder: Path, name: str, chat_template: str | None = None, **config) -> Path:
    """The folder of a chat model. chat_template: in place of its own."""
    family = FAMILIES[name]
    roles = {"eos_token": family.eos, "pad_token": family.special[0]} | ({"bos_token": family.bos} if family.bos else {})
    tokenizer = byte_tokenizer(family.special, chat_template=chat_template or template(name), **roles)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    model = tiny_model(family.model, layers=2, **(sizes | {"eos_token_id": tokenizer.eos_token_id} | config))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.convert_tokens_to_ids(end) for end in dict.fromkeys((family.eos, family.end))]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder
