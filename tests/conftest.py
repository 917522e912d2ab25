"""Shared fakes: random rollouts, tiny language models, padded batches."""

from __future__ import annotations

import copy
import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported; no test reaches the network

import pytest
import torch
from hypothesis import settings
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cct.policy import tappable
from cct.rollout import Rollout

torch.set_num_threads(1)
settings.register_profile("cct", deadline=None, max_examples=40, derandomize=True, database=None)
settings.load_profile("cct")

MODELS = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    # Positions are learnt, so that a model shifted by padding is another one; rotary ones only know distances.
    "opt": (OPTConfig, OPTForCausalLM, {"ffn_dim": 40, "word_embed_proj_dim": 32, "init_std": 0.3, "num_key_value_heads": 4}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "gemma": (GemmaConfig, GemmaForCausalLM, {}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, {"sliding_window": 4, "query_pre_attn_scalar": 5}),
    "gpt2": (GPT2Config, GPT2LMHeadModel, {}),  # queries, keys and values from one matrix, as the next two
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM, {"initializer_range": 0.5}),
    "granite": (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 4.0, "attention_multiplier": 0.3}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"sliding_window": None}),
}


def pytest_collection_finish():
    """What is imported by now stays: no collection of garbage goes over it again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # libraries look for what they have left behind


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory, worker_id):
    """Warm starts of tests are cached in a folder of this session, which its workers share, not in the user's."""
    root = tmp_path_factory.getbasetemp()
    os.environ["CCT_CACHE"] = str((root if worker_id == "master" else root.parent) / "cache")


def make_mask(*rows: str) -> torch.Tensor:
    """`make_mask("110011", "111...")`: 1 is a step, anything else is none."""
    return torch.tensor([[char == "1" for char in row] for row in rows])


def make_rollout(rows: int = 6, width: int = 9, prompt: int = 4, *, seed: int = 0, statistics=(), **fields) -> Rollout:
    """A random rollout, two responses to a prompt, of which one has a gap and the others end in padding.

    statistics: names of statistics to fill `stats` with. fields: replace fields of the rollout; where the
    mask is given, rows and width are its own.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    if "mask" in fields:
        rows, width = fields["mask"].shape
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    lengths[0] = width
    mask = torch.arange(width) < lengths
    mask[0, width // 3 : width // 2] = False
    mask = fields.pop("mask", mask)
    truncated = mask[:, -1].clone()
    base = Rollout(
        input_ids=torch.randint(3, 20, (rows, prompt + width), generator=generator),
        attention_mask=torch.cat([torch.ones(rows, prompt), mask], 1).long(),
        mask=mask,
        rewards=draw(rows, width) * mask,
        groups=torch.arange(rows) // 2,
        truncated=truncated,
        logprobs=-draw(rows, width),
        values=draw(rows, width),
        bootstrap=draw(rows) * truncated,
        reference_logprobs=-draw(rows, width),
        greedy_scores=draw(rows),
        stats={name: draw(rows, width) for name in statistics},
        rollout_logprobs=-draw(rows, width),
        anchors=torch.randint(0, 2, (rows, width), generator=generator),
        starts=draw(rows, width) < 0.3,
        branch_values=draw(rows, width),
        exact_values=draw(rows, width),
        seed=seed,
    )
    further = {"teacher_logprobs": -draw(rows, width), "prompt_values": draw(rows)}
    return base.replace(**(further | fields))


def tiny_model(
    family: str = "qwen3", *, layers: int = 3, heads: int = 4, kv_heads: int = 2, seed: int = 0, **config
) -> PreTrainedModel:
    """A random model whose attention is far from uniform and can be tapped."""
    make_config, make, its_own = MODELS[family]
    torch.manual_seed(seed)
    common = {
        "vocab_size": 20,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    model = make(make_config(**(common | its_own | config)))
    return tappable(model.eval())


def eager_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights under transformers' eager attention, which can return its attention maps."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


def padded(
    prompts: list[list[int]], responses: list[list[int]], *, left: int = 0, right: int = 0
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """input_ids, attention_mask and response width; prompts padded on the left, responses on the right.

    left, right: padding beyond what the longest needs.
    """
    before, width = left + max(map(len, prompts)), right + max(map(len, responses))
    ids = torch.zeros(len(prompts), before + width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        place = slice(before - len(prompt), before + len(response))
        ids[row, place] = torch.tensor([*prompt, *response])
        mask[row, place] = 1
    return ids, mask, width
