"""Folders as public models have them: what is sampled from, what ends a response, what is exported, what is refused."""

from __future__ import annotations

import io
import json

import pytest
import torch
from public_folders import PUBLIC, tokenizer_of, write_public
from rich.console import Console
from safetensors.torch import load_file
from test_models import NAMES, SMALL_RUN, make_folder, make_tokenizer
from test_training import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config, Gemma3ForConditionalGeneration, GenerationConfig

from cct.agent.building import build
from cct.agent.export import export, rehearse
from cct.cli import main
from cct.errors import TrainingStopped
from cct.loading import load_recipe
from cct.policy import end_tokens, policies
from cct.policy.base import encode_prompt
from cct.policy.builtin import Transformers
from cct.policy.weights import named_weights, save
from cct.recipe import RecipeError
from cct.run_folder import RunFolder
from cct.training.run import start, train

PROMPTS = ["1+2=", "what is 3-1?", "7"] * 2


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of a family, written once."""
    written = {}

    def of(name):
        if name not in written:
            written[name] = write_public(tmp_path_factory.mktemp("public") / name, name)
        return written[name]

    return of


def load(folder, **knobs):
    policy = policies["pretrained"](path=str(folder), **knobs)
    return policy, *policy.load(alphabet="", seed=0)


def distributions(actor, prompt, tokens):
    """Log-probabilities [T, V] that the actor gives to each token of a response."""
    with torch.no_grad():
        return actor(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def must_sample_from_the_actor(actor, tokenizer, prompts):
    """Sampled log-probabilities are the actor's within 1e-5, and greedy tokens its likeliest."""
    engine = Transformers(max_new_tokens=16).open(actor, tokenizer)
    for prompt, sampled in zip(prompts, engine.generate(prompts, range(len(prompts))), strict=True):
        own = distributions(actor, prompt, sampled.tokens).gather(1, torch.tensor([sampled.tokens]).T).squeeze(1)
        torch.testing.assert_close(torch.tensor(sampled.logprobs), own, rtol=0, atol=1e-5)
    for prompt, greedy in zip(prompts, engine.generate(prompts, None), strict=True):
        assert list(greedy.tokens) == distributions(actor, prompt, greedy.tokens).argmax(-1).tolist()


# --- what is sampled from -------------------------------------------------------------------------
@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_folder_samples_from_the_policy_and_nothing_else(folder_of, name):
    policy, actor, tokenizer = load(folder_of(name))
    must_sample_from_the_actor(actor, tokenizer, [policy.encode(tokenizer, text) for text in PROMPTS])


# One value that would change what is sampled, or break it, for each field of a generation configuration.
HARMFUL = {
    "max_length": 3,
    "max_new_tokens": 1,
    "min_length": 40,
    "min_new_tokens": 8,
    "early_stopping": True,
    "max_time": 1e-9,
    "stop_strings": ["a"],
    "do_sample": True,
    "num_beams": 2,
    "use_mtp": True,
    "use_cache": False,
    "cache_implementation": "static",
    "cache_config": {"nbits": 2},
    "max_cache_len": 2,
    "temperature": 0.1,
    "top_k": 1,
    "top_p": 0.1,
    "min_p": 0.5,
    "top_h": 0.1,
    "typical_p": 0.1,
    "epsilon_cutoff": 0.3,
    "eta_cutoff": 0.3,
    "repetition_penalty": 5.0,
    "encoder_repetition_penalty": 5.0,
    "length_penalty": -3.0,
    "no_repeat_ngram_size": 1,
    "bad_words_ids": [[5], [6], [7]],
    "renormalize_logits": True,
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 5,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": [1, 9.0],
    "suppress_tokens": [5, 6, 7, 8],
    "begin_suppress_tokens": [5, 6, 7, 8],
    "sequence_bias": [[[5], 50.0]],
    "token_healing": True,
    "guidance_scale": 3.0,
    "watermarking_config": {"greenlist_ratio": 0.1, "bias": 20.0, "seeding_scheme": "lefthash"},
    "num_return_sequences": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
    "return_dict_in_generate": True,
    "pad_token_id": 9,
    "bos_token_id": 9,
    "eos_token_id": 2,  # an end token by right: what reads it stands in the tests of ends
    "encoder_no_repeat_ngram_size": 1,
    "decoder_start_token_id": 9,
    "is_assistant": True,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.9,
    "prompt_lookup_num_tokens": 3,
    "max_matching_ngram_size": 1,
    "assistant_early_exit": 1,
    "assistant_lookbehind": 1,
    "target_lookbehind": 1,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "x",
    "compile_config": {"mode": "default"},
    "disable_compile": True,
    "continuous_batching_config": {"max_batch": 1},
    "low_memory": True,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "diversity_penalty": 1.0,
    "num_beam_groups": 2,
    "constraints": [1],
    "force_words_ids": [[5]],
    "prefill_chunk_size": 1,
    "a_field_of_ones_own": 1,
}


@pytest.fixture(scope="module")
def sampler(folder_of):
    """A loaded policy and what it samples, and answers greedily, by itself."""
    policy, actor, tokenizer = load(folder_of("qwen2.5"))
    prompts = [policy.encode(tokenizer, text) for text in PROMPTS]

    def sample():
        engine = Transformers(max_new_tokens=8).open(actor, tokenizer)
        return engine.generate(prompts, range(len(prompts))), engine.generate(prompts, None)

    return actor, sample, sample()


def test_every_field_of_a_generation_configuration_is_accounted_for():
    its_own = {"_from_model_config", "transformers_version"}
    assert set(vars(GenerationConfig())) - its_own == set(HARMFUL) - {"a_field_of_ones_own"}


@pytest.mark.parametrize("field", [name for name in HARMFUL if name != "eos_token_id"])
def test_no_field_of_the_models_generation_configuration_changes_what_is_sampled(sampler, field):
    """Neither a folder's, which is not loaded, nor one that a policy of one's own leaves on its model."""
    actor, sample, before = sampler
    kept, actor.generation_config = actor.generation_config, GenerationConfig.from_dict(actor.generation_config.to_dict())
    setattr(actor.generation_config, field, HARMFUL[field])
    try:
        assert sample() == before
        assert getattr(actor.generation_config, field) == HARMFUL[field]  # and it is left as it was
    finally:
        actor.generation_config = kept


def test_of_generation_config_json_the_end_tokens_are_read_and_nothing_else(tmp_path):
    """Values that transformers refuses to load or to save are taken like any others."""
    make_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(HARMFUL | {"eos_token_id": [4, 0]}))
    assert load(tmp_path)[1].generation_config == GenerationConfig(eos_token_id=[2, 4, 0])


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_run_whose_folder_asks_for_penalties_has_no_gap_and_is_exported(tmp_path, name):
    make_folder(tmp_path / "model", end=[2, 4])
    file = tmp_path / "model" / name
    penalties = {"temperature": 0.9, "top_p": 0.6, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "max_length": 9}
    file.write_text(json.dumps(json.loads(file.read_text()) | penalties))
    if name == "config.json":
        (tmp_path / "model" / "generation_config.json").unlink()
    recipe = load_recipe(
        "recipes/grpo.yaml",
        [f"policy={{use: pretrained, path: {tmp_path / 'model'}}}", *SMALL_RUN[:-1], "training.minibatch_size=4"],
    )
    folder = RunFolder.new(tmp_path, "run").path
    train(recipe, folder, console=Console(file=io.StringIO()))
    assert RunFolder(folder).metrics[-1]["engine/logprob_gap_max"] < 1e-5
    ends = [2, 4] if name == "generation_config.json" else 2
    assert exported(folder / "policy") == {"bos_token_id": 1, "eos_token_id": ends, "pad_token_id": 0}


def exported(folder) -> dict:
    stored = json.loads((folder / "generation_config.json").read_text())
    return {key: value for key, value in stored.items() if key != "transformers_version"}


# --- what ends a response -------------------------------------------------------------------------
@pytest.mark.parametrize("name", PUBLIC)
def test_an_exported_folder_ends_a_response_as_training_does(folder_of, name, tmp_path):
    """By the tokenizer, the generation configuration or the chat template: read back by transformers, and by a next run."""
    policy, actor, tokenizer = load(folder_of(name))
    public = PUBLIC[name]
    assert end_tokens(actor, tokenizer) == tuple(public.special.index(end) for end in public.ends)
    save(actor, tokenizer, tmp_path / "policy")
    _, again, its = load(tmp_path / "policy")
    assert end_tokens(again, its) == end_tokens(actor, tokenizer)
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    ends = served.generation_config.eos_token_id
    assert (ends if isinstance(ends, list) else [ends]) == list(end_tokens(actor, tokenizer))
    prompt = policy.encode(tokenizer, "1+2=")
    trained = Transformers(max_new_tokens=24).open(actor, tokenizer).generate([prompt], None)[0].tokens
    assert served.generate(torch.tensor([prompt]), max_new_tokens=24)[0, len(prompt) :].tolist() == list(trained)


def test_ends_of_tokenizer_and_configuration_are_exported_both(tmp_path):
    """As of a base model whose chat tokenizer ends a turn by <|im_end|>, without a generation configuration."""
    make_folder(tmp_path / "model", tokenizer=make_tokenizer(eos_token="<|im_end|>"), end=0)
    (tmp_path / "model" / "generation_config.json").unlink()
    _, actor, tokenizer = load(tmp_path / "model")
    save(actor, tokenizer, tmp_path / "policy")
    assert end_tokens(actor, tokenizer) == (4, 0) and exported(tmp_path / "policy")["eos_token_id"] == [4, 0]


@pytest.mark.parametrize("stored, gives", [({}, (2,)), ({"eos_token_id": None}, (2,)), ({"eos_token_id": []}, (2,))])
def test_a_generation_configuration_without_an_end_leaves_the_models(tmp_path, stored, gives):
    make_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    assert end_tokens(*load(tmp_path)[1:]) == gives


@pytest.mark.parametrize("stored", ["[", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [[2]]}'])
def test_a_generation_configuration_that_cannot_be_read_is_one_error(tmp_path, stored):
    make_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(stored)
    with pytest.raises(ValueError, match=r"generation_config\.json of '.*' cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize("stored", [b"{", b"[]", b"null", b"\xff", b'{"text_config": 1}', b'{"text_config": null}'])
def test_a_configuration_that_cannot_be_read_is_one_error(tmp_path, stored, capsys):
    make_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(stored)
    sets = ("--set", f"policy={{use: pretrained, path: {tmp_path}}}", "--set", "generation.max_new_tokens=8")
    readable = stored.startswith(b'{"')
    assert main(["check", "recipes/grpo.yaml", *sets]) == (0 if readable else 2)
    assert readable or "config.json of " in capsys.readouterr().err


def test_a_template_that_is_not_used_ends_nothing(folder_of):
    assert end_tokens(*load(folder_of("gemma-1"), chat="never")[1:]) == (1,)


# --- prompts --------------------------------------------------------------------------------------
@pytest.mark.parametrize("closes", [None, "<eos>", "<sep>"])
@pytest.mark.parametrize("starts", [None, "<bos>"])
@pytest.mark.parametrize("text", ["1+2=", "", "<bos>1", "<eos>"])
def test_nothing_that_a_tokenizer_puts_behind_a_text_ends_a_prompt(starts, closes, text):
    special = ("<bos>", "<eos>", "<sep>")
    tokenizer = tokenizer_of(special, starts=starts, closes=closes, bos_token="<bos>", eos_token="<eos>", sep_token="<sep>")
    assert tokenizer.decode(encode_prompt(tokenizer, text)) == (starts or "") + text


@pytest.mark.parametrize("name", ["llama-3", "gemma-3", "mistral"])
def test_a_chat_template_that_writes_the_start_token_is_the_only_one_to(folder_of, name):
    policy, _, tokenizer = load(folder_of(name))
    ids = policy.encode(tokenizer, "1+2=")
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    assert ids == tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+2="}], add_generation_prompt=True, return_dict=False
    )


# --- adapters -------------------------------------------------------------------------------------
def with_lora(seed=0, *, dtype="float32", tied=True, tmp_path=None, **lora):
    make_folder(tmp_path, tied=tied)
    knobs = f"path: {tmp_path}, dtype: {dtype}, lora: {json.dumps({'rank': 4} | lora)}"
    return load_recipe("recipes/grpo.yaml", [f"policy={{use: pretrained, {knobs}}}", f"seed={seed}", *SMALL_RUN[:-1]])


def adapters(recipe):
    return {name: p.detach() for name, p in build(recipe)[0].actor.named_parameters() if ".lora_" in name}


def test_adapters_begin_with_the_same_weights_for_a_seed_and_others_for_another(tmp_path):
    one, again, other = (adapters(with_lora(seed, tmp_path=tmp_path)) for seed in (0, 0, 1))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_making_adapters_leaves_the_random_numbers_of_others_alone(tmp_path):
    recipe = with_lora(tmp_path=tmp_path)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    build(recipe)
    assert torch.equal(torch.rand(3), expected)


def test_adapters_on_a_bfloat16_policy_are_float32_and_move_by_small_steps(tmp_path):
    recipe = with_lora(dtype="bfloat16", tmp_path=tmp_path)
    actor = build(recipe)[0].actor
    assert {p.dtype for n, p in actor.named_parameters() if ".lora_" in n} == {torch.float32}
    assert {p.dtype for n, p in actor.named_parameters() if ".lora_" not in n} == {torch.bfloat16}
    weight = next(p for n, p in actor.named_parameters() if ".lora_A" in n)
    before = weight.detach().clone()
    optimizer = torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0)
    actor(torch.tensor([[1, 7, 9]])).logits.float().sum().backward()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert not torch.equal(weight, before)


def test_merged_adapters_are_rounded_once(tmp_path):
    actor = build(with_lora(dtype="bfloat16", tmp_path=tmp_path))[0].actor
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if ".lora_B" in name:
                parameter.fill_(1e-3)
    layer = actor.model.layers[0].self_attn.q_proj
    exact = (
        layer.base_layer.weight.float()
        + layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(dict(named_weights(actor, torch.float32))[name], exact, rtol=0, atol=1e-7)
    assert torch.equal(dict(named_weights(actor))[name], exact.bfloat16())


@pytest.mark.parametrize(
    "targets, tied, says",
    [
        (["q_proj", "lm_head"], True, r"policy\.lora\.targets: lm_head\.weight is tied to another weight"),
        (["embed_tokens"], True, r"policy\.lora\.targets: model\.embed_tokens\.weight is tied to another weight"),
        (["q_proj", "qproj"], False, r"policy\.lora\.targets: no layer is called qproj; there are .*k_proj, lm_head"),
        (["norm"], False, r"policy\.lora\.targets: no layer is called norm"),
    ],
)
def test_adapters_that_cannot_be_exported_are_refused_before_the_run(tmp_path, targets, tied, says):
    with pytest.raises(RecipeError, match=says):
        build(with_lora(tied=tied, targets=targets, tmp_path=tmp_path))


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "lm_head"], ["embed_tokens", "v_proj"]])
def test_an_exported_policy_with_adapters_says_what_the_trained_one_does(tmp_path, targets):
    agent, tokenizer, _ = build(with_lora(tied=False, targets=targets, tmp_path=tmp_path / "model"))
    with torch.no_grad():
        for name, parameter in agent.actor.named_parameters():
            if ".lora_" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.1)
        save(agent.actor, tokenizer, tmp_path / "policy")
        ids = torch.tensor([[1, 7, 9, 12]])
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")(ids).logits
        torch.testing.assert_close(again, agent.actor(ids).logits, rtol=1e-5, atol=1e-5)


# --- exports --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of one iteration, its checkpoint there."""
    root = tmp_path_factory.mktemp("finished")
    return start(tiny("grpo", "training.iterations=1"), root, console=Console(file=io.StringIO()))


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
def test_weights_are_exported_in_the_type_asked_for(finished, tmp_path, dtype):
    export(finished, tmp_path / "policy", dtype=dtype)
    wanted = getattr(torch, dtype or "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype="auto")
    assert {p.dtype for p in model.parameters()} == {wanted}
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["dtype"] == (dtype or "float32")
    trained = AutoModelForCausalLM.from_pretrained(finished / "policy")
    for (name, ours), (_, theirs) in zip(trained.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(ours.to(wanted), theirs), name
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").eos_token == "<end>"


def test_a_weight_beyond_the_range_of_float16_is_not_written_as_infinity(tmp_path):
    make_folder(tmp_path / "model")
    _, actor, tokenizer = load(tmp_path / "model")
    with torch.no_grad():
        actor.model.norm.weight[0] = 1e5
    with pytest.raises(ValueError, match=r"model\.norm\.weight has weights beyond 65504.*use bfloat16"):
        save(actor, tokenizer, tmp_path / "policy", dtype=torch.float16)


SHARING = """
from cct.policy import policies

@policies.register("sharing")
class Sharing(policies["scratch"]):
    'Two layers share a weight, which its class does not declare: safetensors refuses it.'
    def load(self, *, alphabet, seed):
        model, tokenizer = super().load(alphabet=alphabet, seed=seed)
        layers = model.model.layers
        layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
        return model, tokenizer
"""


def test_a_policy_that_could_not_be_exported_is_refused_before_the_first_iteration(tmp_path):
    (tmp_path / "sharing.py").write_text(SHARING)
    recipe = tiny("grpo", f"plugins=[{tmp_path / 'sharing.py'}]", "policy.use=sharing")
    refused = "the trained policy could not be exported: .*shared tensors"
    with pytest.raises(RecipeError, match=refused):
        start(recipe, tmp_path / "runs", console=Console(file=io.StringIO()))
    assert not [*(tmp_path / "runs").glob("*/*")]  # nothing was found out, so no folder is left
    agent, tokenizer, _ = build(recipe)
    with pytest.raises(RecipeError, match=refused):  # of a large model as well, whose weights are not written whole
        rehearse(recipe, agent.actor, tokenizer, tmp_path, most=0)


@pytest.mark.parametrize("sets", [[], ["policy={use: scratch, hidden_size: 32, heads: 2, kv_heads: 1, lora: {rank: 2}}"]])
def test_a_rehearsal_of_a_large_model_writes_a_column_of_each_weight_and_leaves_nothing(tmp_path, sets):
    recipe = tiny("grpo", *sets)
    agent, tokenizer, _ = build(recipe)
    rehearse(recipe, agent.actor, tokenizer, tmp_path, most=0)
    save(agent.actor, tokenizer, tmp_path / "columns", columns=1)
    stored = load_file(tmp_path / "columns" / "model.safetensors")
    assert {weight.shape[-1] for weight in stored.values()} == {1} and len(stored) > 10
    assert [path.name for path in tmp_path.iterdir()] == ["columns"]


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("chat", ["auto", "never"])
def test_a_public_folder_can_be_exported(folder_of, tmp_path, name, chat):
    recipe = load_recipe("recipes/grpo.yaml", [f"policy={{use: pretrained, path: {folder_of(name)}, chat: {chat}}}"])
    _, actor, tokenizer = load(folder_of(name), chat=chat)
    for most in (0, 2**30):
        rehearse(recipe, actor, tokenizer, tmp_path, most)


# --- what cannot be trained -----------------------------------------------------------------------
def test_a_folder_of_an_adapter_is_refused(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"}))
    with pytest.raises(ValueError, match=r"holds an adapter \(adapter_config\.json\).*merge_and_unload"):
        policies["pretrained"](path=str(tmp_path)).ready()


@pytest.mark.parametrize("method", ["gptq", "fp8"])
def test_quantized_weights_are_refused(tmp_path, method):
    make_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"are quantized \({method}\), and cannot be trained"):
        load(tmp_path)


def test_a_folder_without_a_head_of_its_own_that_does_not_tie_it_is_refused(tmp_path):
    """transformers would make the missing head up at random."""
    make_folder(tmp_path, tied=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"are incomplete: lm_head\.weight missing; .* tie_word_embeddings: true"):
        load(tmp_path)


def test_weights_that_are_no_weights_are_one_error(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ValueError, match="policy.path: cannot load"):
        load(tmp_path)


def test_code_in_a_folder_is_not_run(tmp_path):
    make_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match="policy.path: cannot load"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


# --- what is odd, and works -----------------------------------------------------------------------
def must_work(folder, prompts=("1+2=", "12")):
    policy, actor, tokenizer = load(folder)
    must_sample_from_the_actor(actor, tokenizer, [policy.encode(tokenizer, text) for text in prompts])
    return actor, tokenizer


@pytest.mark.parametrize("kind", ["sharded", "pickled"])
def test_weights_in_shards_or_pickled(tmp_path, kind):
    saved = make_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    if kind == "sharded":
        saved.save_pretrained(tmp_path, max_shard_size="20KB")
        assert (tmp_path / "model.safetensors.index.json").is_file()
    else:
        torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    actor, _ = must_work(tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(actor.parameters(), saved.parameters(), strict=True))


def test_a_pad_token_beyond_the_embedding_pads_with_the_end(tmp_path):
    tokenizer = make_tokenizer(pad_token=None)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    make_folder(tmp_path, tokenizer=tokenizer)
    actor, its = must_work(tmp_path)
    assert tokenizer.pad_token_id == actor.config.vocab_size and its.pad_token_id == its.eos_token_id == 2


def test_an_end_token_beyond_the_embedding_ends_nothing(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|done|>"})
    make_folder(tmp_path, tokenizer=tokenizer)
    actor, its = must_work(tmp_path)
    assert end_tokens(actor, its) == (2,) and its.eos_token == "</s>"


def test_a_prompt_with_a_token_that_the_model_does_not_know_stops_the_run_before_it_begins(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["+" * 3])
    make_folder(tmp_path / "model", tokenizer=tokenizer)
    task = tmp_path / "problems.jsonl"
    task.write_text('{"prompt": "1+++", "answer": "2"}\n')
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "1+1", "answer": "2"}\n')
    policy = f"policy={{use: pretrained, path: {tmp_path / 'model'}}}"
    recipe = load_recipe("recipes/grpo.yaml", [policy, f"task={{use: jsonl, path: {task}, held_out_path: {held_out}}}"])
    with pytest.raises(TrainingStopped, match=r"'1\+\+\+' has the token '\+\+\+' \(48\), but the model knows tokens up to 47"):
        build(recipe)


def test_a_multimodal_model_reads_text(tmp_path):
    """As Gemma 3 from 4B on: the language model's sizes stand in text_config."""
    text = {"vocab_size": len(NAMES), "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4, "max_position_embeddings": 64}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    config = Gemma3Config(text_config=text | heads, vision_config=vision, mm_tokens_per_image=4, eos_token_id=[2, 4])
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    actor, tokenizer = must_work(tmp_path / "model")
    assert end_tokens(actor, tokenizer) == (2, 4)
    policy = f"policy={{use: pretrained, path: {tmp_path / 'model'}}}"
    recipe = load_recipe("recipes/compo.yaml", [policy, *SMALL_RUN, "training.minibatch_size=4"])
    folder = RunFolder.new(tmp_path, "run").path
    train(recipe, folder, console=Console(file=io.StringIO()))
    assert RunFolder(folder).metrics[-1]["actor/gradient_norm"] > 0


def test_a_tokenizer_that_pads_on_the_right(tmp_path):
    make_folder(tmp_path, tokenizer=make_tokenizer(padding_side="right"))
    assert must_work(tmp_path)[1].padding_side == "left"
