"""`cct plan` against what runs really take, and against sizes known from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from cct.cli import main
from cct.loading import load_recipe
from cct.policy import engines
from cct.recipe import RecipeError
from cct.tools.memory import Live, footprint
from cct.tools.plan import GB, GPU_FIXED, GPUS, gpu_memory, plan

ROOT = Path(__file__).parents[1]

QWEN3_4B = Qwen3Config(
    hidden_size=2560,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=9728,
    vocab_size=151_936,
    max_position_embeddings=40_960,
    tie_word_embeddings=True,
)
LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14_336,
    vocab_size=128_256,
    max_position_embeddings=131_072,
    tie_word_embeddings=False,
)


# --- against real runs ------------------------------------------------------------------------
SHORT = ["training.iterations=1", "policy.warm_start=null", "training.threads=1", "task.held_out_size=32"]
SHORT_CRITIC = ["training.critic_warmup=1", "training.critic_epochs=1"]
LARGER = [
    "policy.hidden_size=512",
    "policy.layers=8",
    "policy.heads=8",
    "policy.kv_heads=4",
    "policy.intermediate_size=1536",
    "training.prompts_per_iteration=4",
    "training.minibatch_size=32",  # two steps, so that the optimizer has its states in the second
]
# Long prompts and responses of few tokens, which even an untrained policy does not end before.
SHARED = ["task.steps=30", "generation.max_new_tokens=4"]
# The most resident memory of this process image: getrusage's maximum would begin with that of the process it was forked from.
PEAK = """
import re, sys
from pathlib import Path
from cct.cli import main
assert main(sys.argv[1:]) == 0
status = Path("/proc/self/status")
if status.is_file():
    print("peak", int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]) * 1024)
else:
    import resource
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
PLANNED = """
import sys
from cct.tools.plan import plan
from cct.loading import load_recipe
print("peak", plan(load_recipe(sys.argv[1], sys.argv[2:])).peak)
"""


def fresh(*arguments: str) -> int:
    """What a process of its own printed as its peak."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return int(re.search(r"peak (\d+)", done.stdout)[1])


@pytest.mark.parametrize(
    "name, sets",
    [
        pytest.param("compo", SHORT_CRITIC, id="compo"),
        pytest.param("gae", SHORT_CRITIC, id="gae", marks=pytest.mark.slow),
        pytest.param("grpo", [], id="grpo", marks=pytest.mark.slow),
        pytest.param("grpo", [*LARGER, "training.share_prefix=false"], id="grpo-larger"),
        pytest.param("grpo", [*LARGER, *SHARED], id="grpo-larger-shared", marks=pytest.mark.slow),
        pytest.param(
            "compo",
            [*LARGER, *SHORT_CRITIC, "training.micro_batch_size=16", "training.share_prefix=false"],
            id="compo-larger",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_plan_is_within_a_fifth_of_what_a_run_takes(tmp_path, name, sets):
    recipe, sets = f"recipes/{name}.yaml", [*SHORT, *sets]
    measured = fresh("-c", PEAK, "run", recipe, "--runs", str(tmp_path), *(x for s in sets for x in ("--set", s)))
    planned = fresh("-c", PLANNED, recipe, *sets)
    print(f"{name}: measured {measured / GB:.3f} GB, planned {planned / GB:.3f} GB")
    assert planned == pytest.approx(measured, rel=0.2)


# --- counting ---------------------------------------------------------------------------------
def test_live_counts_what_is_alive_and_the_most_at_once():
    weight = torch.nn.Parameter(torch.zeros(100, 100))
    with Live(vocabulary=7) as live:
        a = torch.zeros(1000)  # 4000 bytes
        b = a.view(10, 100) + 1  # 4000; the view none
        del a
        c = b @ weight.t()  # 4000; the weight was there before
        logits = torch.zeros(2, 5, 7)  # 280
        del b, c
        assert live.now == 280 + 0 and live.logits == 280
        del logits
    peak = live.closing()
    assert (peak.total, peak.logits, peak.left) == (2 * 4000 + 280, 280, 0)


def small(*sets: str):
    return load_recipe(ROOT / "recipes" / "compo.yaml", ["policy.warm_start=null", *sets])


def feet(*sets: str, accumulates: bool = True, prompts: int | None = None):
    recipe = small(*sets)
    return footprint(
        recipe,
        recipe.policy.config(alphabet=recipe.task.alphabet),
        14,
        recipe.generation.max_new_tokens,
        rows=recipe.training.rows_per_forward(14 + recipe.generation.max_new_tokens),
        prompts=prompts,
        accumulates=accumulates,
    )


def test_what_the_passes_hold_follows_the_micro_batch_the_length_and_checkpointing():
    whole, half = feet(), feet("training.micro_batch_size=32")
    assert half.policy_pass.total == pytest.approx(whole.policy_pass.total / 2, rel=0.05)
    assert half.read.left == pytest.approx(whole.read.left / 2, rel=0.05)
    assert feet("generation.max_new_tokens=96").policy_pass.total > 1.5 * whole.policy_pass.total
    assert feet("training.gradient_checkpointing=true").policy_pass.total < 0.6 * whole.policy_pass.total
    assert feet("training.precision=bf16").policy_pass.total < 0.8 * whole.policy_pass.total
    first = feet(accumulates=False)  # the gradients of its 445,216 parameters are made in the pass
    assert first.policy_pass.left - whole.policy_pass.left == 4 * 445_216


def test_a_shared_prompt_is_held_once():
    """64 rows of 14 + 48 tokens, whose 4 prompts leave 3128 of 3968; responses get copies of their keys and values."""
    apart, shared = feet(), feet(prompts=4)
    for name in ("read", "critic_pass", "policy_pass"):
        ratio = getattr(shared, name).total / getattr(apart, name).total
        assert 3128 / 3968 - 0.02 < ratio < 0.95, name
    every = ["logging.statistics=[{use: preplan}, {use: anchor}, {use: concentration}]"]
    assert feet(*every, prompts=4).read.total >= shared.read.total


def test_the_plan_knows_shared_prompts():
    long = ["training.minibatch_size=64", "generation.max_new_tokens=8", "training.prompts_per_iteration=4"]
    shared, apart = (plan(small(*long, f"training.share_prefix={on}")) for on in ("auto", "false"))
    assert "share_prefix" in "".join(shared.notes) and "share_prefix" not in "".join(apart.notes)
    assert shared.phases["policy pass"]["activations"] < 0.8 * apart.phases["policy pass"]["activations"]


def test_the_trace_of_tac_is_counted_and_grows_with_its_depth():
    """Two ladder rungs: hidden states [64, 62, 96], queries and keys [64, 3, 62, 32] of each."""
    rung = 64 * 62 * (96 + 2 * 96) * 4
    assert feet().read.left >= 2 * rung
    assert feet("critic.depth=4").read.left - feet().read.left == pytest.approx(2 * rung, rel=0.1)


def test_adapters_are_all_that_learns_with_lora():
    foot, plain = feet("policy.lora={rank: 4}"), feet()
    width, inner = 96, 256
    per_layer = 4 * 4 * (width + width) + 4 * 3 * (width + inner)  # q, k, v, o; gate, up, down
    assert foot.trained == 4 * per_layer and foot.actor == plain.actor + foot.trained
    assert plain.trained == plain.actor
    only_queries = feet("policy.lora={rank: 4, targets: [q_proj]}")
    assert only_queries.trained == 4 * 4 * (width + width)


# --- parts by strategy ------------------------------------------------------------------------
def parts(*sets: str, gpu: int | None = 80 * GB) -> dict[str, dict[str, int]]:
    return plan(small(*sets), gpu).phases


def test_each_strategy_divides_what_it_divides():
    learning = sum(recipe_sizes())
    bf16 = ["training.devices=4", "training.precision=bf16"]
    one = parts()["policy pass"]
    assert one["weights"] == 4 * learning and one["optimizer states"] == 8 * learning and "communication" not in one
    ddp = parts("training.devices=4")["policy pass"]
    assert (ddp["weights"], ddp["optimizer states"], ddp["communication"]) == (4 * learning, 8 * learning, 4 * learning)
    for stage, weights, gradients in [(1, 4, 4), (2, 4, 1), (3, 1, 1)]:
        found = parts(*bf16, f"training.strategy=deepspeed_{stage}")
        assert found["policy pass"]["optimizer states"] == 12 * learning // 4
        assert found["policy pass"]["weights"] == pytest.approx(weights * learning, abs=4)
        assert found["policy pass"]["gradients"] == pytest.approx(gradients * learning, abs=4)
        assert ("gathered weights" in found["policy pass"]) == ("engine weights" in found["generate"]) == (stage == 3)
    fsdp = parts("training.devices=4", "training.strategy=fsdp")["policy pass"]
    assert (fsdp["weights"], fsdp["optimizer states"]) == (learning, 2 * learning)


def recipe_sizes() -> tuple[int, int]:
    found = plan(small(), 80 * GB)
    return found.actor, found.critic


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_an_engine_that_samples_beside_the_update_keeps_all_it_has(engine):
    lagging = parts(f"generation={{use: {engine}, lag: 1}}", "geometry.correction=truncate")
    sampling = sum(
        lagging["generate"][name] for name in lagging["generate"] if "engine" in name or name in ("KV cache", "logits")
    )
    assert lagging["generate"]["engine weights"] > 0
    for phase in ("read", "policy pass"):
        assert lagging[phase]["engine beside the update"] == sampling


def test_what_is_offloaded_is_not_on_the_device():
    stage = "training.strategy=deepspeed_3"
    assert "optimizer states" not in parts(stage, "training.offload=optimizer")["policy pass"]
    both = parts(stage, "training.offload=parameters")["policy pass"]
    assert "optimizer states" not in both and "weights" not in both and both["gathered weights"] > 0


def test_the_reference_model_is_there_where_a_part_needs_it():
    actor, _ = recipe_sizes()
    assert parts("geometry.kl_coef=0.1")["read"]["reference model"] == 4 * actor
    assert "reference model" not in parts()["read"]


def test_vllm_takes_its_share_and_frees_it_where_it_sleeps():
    recipe, actor = small(), recipe_sizes()[0]
    for sleep in (True, False):
        engine = engines["vllm"](max_new_tokens=48, max_length=64, memory_fraction=0.5, sleep=sleep)
        found = plan(recipe.model_copy(update={"generation": engine}), GB)
        assert found.prompt == 16
        generate = found.phases["generate"]
        assert generate["engine weights"] == 2 * actor and generate["engine weights"] + generate["engine KV cache"] == GB // 2
        assert ("engine weights" in found.phases["policy pass"]) != sleep
        assert any("room for" in note for note in found.notes)
    little = engines["vllm"](max_new_tokens=48, max_length=64, memory_fraction=0.0009)
    assert "leave 0.00 GB for its KV cache" in plan(recipe.model_copy(update={"generation": little}), GB).problems[0]


def test_auto_is_transformers_on_a_cpu_and_vllm_on_a_gpu():
    recipe = small("generation={use: auto, max_new_tokens: 48}")
    assert "engine KV cache" in plan(recipe, GB).phases["generate"] and "KV cache" in plan(recipe).phases["generate"]


def test_servers_take_nothing_of_the_trainers_memory():
    recipe = small().model_copy(update={"generation": engines["vllm_server"](servers=2, max_new_tokens=48)})
    found = plan(recipe, GB)
    assert not any("engine" in name or "KV cache" in name for phase in found.phases.values() for name in phase)
    assert any("servers are not in this plan" in note for note in found.notes)


# --- models of known size ---------------------------------------------------------------------
DEEPSPEED = [
    "training.devices=8",
    "training.strategy=deepspeed_3",
    "generation={use: vllm, max_length: 1024}",
    "training.precision=bf16",
    "training.gradient_checkpointing=true",
    "training.micro_batch_size=1",
    "generation.max_new_tokens=512",
]


@pytest.mark.parametrize(
    "config, count, recipe",
    [(QWEN3_4B, 4_022_468_096, "compo"), (LLAMA_8B, 8_030_261_248, "grpo")],
    ids=["qwen3-4b", "llama-8b"],
)
def test_a_folder_with_a_configuration_alone_is_enough(capsys, tmp_path, config, count, recipe):
    config.save_pretrained(tmp_path)
    sets = [f"policy={{use: pretrained, path: {tmp_path}}}", *DEEPSPEED]
    argv = ["plan", str(ROOT / "recipes" / f"{recipe}.yaml"), *(x for s in sets for x in ("--set", s)), "--gpu"]
    assert main([*argv, "H100"]) == 0
    output = capsys.readouterr().out
    assert f"actor: {count:,} parameters" in output and "at most 512 + 512 tokens" in output
    shown = float(re.search(r"weights +│ +([\d.]+)", output)[1])
    assert shown == pytest.approx(4 * count / GB / 8, abs=0.01)  # float32, an eighth in each process; the critic is small
    assert re.search(r"^peak: \d+\.\d of 80 GB: fits$", output, re.M) and ("critic (tac): 1," in output)
    assert main([*argv, "24GB"]) == 1
    output = capsys.readouterr().out
    assert re.search(r"^peak: \d+\.\d of 24 GB: does not fit$", output, re.M)
    assert "to reduce it: " in output or "GB for its KV cache" in output


def test_without_a_tokenizer_prompts_are_guessed_from_their_characters(tmp_path):
    Qwen3Config(hidden_size=32, intermediate_size=40, num_hidden_layers=2, vocab_size=64).save_pretrained(tmp_path)
    found = plan(small(f"policy={{use: pretrained, path: {tmp_path}}}"), GB)
    assert found.prompt == 14 // 3 + 1 and any("no tokenizer is at hand" in note for note in found.notes)


# --- the command ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name, size",
    [("H100", 80), ("h100-80gb", 80), ("A100 40GB", 40), ("rtx 4090", 24), ("24", 24), ("1.5 gb", 1.5)],
)
def test_a_gpu_by_name_or_size(name, size):
    assert gpu_memory(name) == size * GB


@pytest.mark.parametrize("name, says", [("A100", "A100-40GB or A100-80GB"), ("TPU", "is not known"), ("", "is not known")])
def test_a_gpu_that_is_not_known_or_not_the_only_one(name, says):
    with pytest.raises(RecipeError, match=f"{says}; there are: {next(iter(GPUS))}"):
        gpu_memory(name)


def test_plan_on_the_command_line(capsys):
    argv = ["plan", str(ROOT / "recipes" / "compo.yaml"), "--set", "policy.warm_start=null"]
    assert main([*argv, "--gpu", "24"]) == 0
    output = capsys.readouterr().out
    assert "MB in one process, a GPU of 24 GB" in output and output.endswith(" of 24 GB: fits\n")
    weights = 4 * (445_216 + 92_673) / 10**6  # float32, of actor and critic
    assert re.search(rf"weights +│ +{weights:.1f} ", output)
    assert "actor: 445,216 parameters" in output and "critic (tac): 92,673 parameters, 20.8% of the actor" in output
    assert "for comparison, critic (standard): 445,313 parameters" in output
    assert "256 responses of at most 14 + 48 tokens, 15,872 in all" in output
    assert main([*argv, "--gpu", f"{GPU_FIXED / GB}GB"]) == 1
    assert main([*argv, "--gpu", "TPU"]) == 2 and main([*argv, "--set", "policy={use: pretrained, path: nowhere}"]) == 2
    assert "cannot load 'nowhere'" in capsys.readouterr().err
