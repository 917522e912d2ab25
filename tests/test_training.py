"""Runs as a whole, at a size that takes seconds."""

import io
import json
import multiprocessing
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from conftest import tiny_model
from held import Held
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from cct.agent.building import build, sharing
from cct.agent.export import export
from cct.agent.warm_start import warm_start
from cct.cli import main
from cct.errors import TrainingStopped
from cct.evidence import Evidence, close_workers
from cct.evidence.exact_match import ExactMatch
from cct.evidence.python import PythonFunction
from cct.loading import dump_recipe, load_recipe
from cct.recipe import RecipeError
from cct.rollout import Prompt, Response, derive_seed
from cct.run_folder import RunFolder
from cct.system.files import WriteError
from cct.training.judge import judge
from cct.training.minibatches import CriticBatch, PolicyBatch
from cct.training.processes import Ranks
from cct.training.run import evaluate_run, resume, start, train
from cct.training.sampler import Sampler

RECIPES = Path(__file__).parents[1] / "recipes"
TINY = [
    "policy.hidden_size=32",
    "policy.intermediate_size=32",
    "policy.layers=2",
    "policy.heads=2",
    "policy.kv_heads=1",
    "policy.warm_start=null",
    "generation.max_new_tokens=8",
    "task.held_out_size=8",
    "training.iterations=2",
    "training.prompts_per_iteration=4",
    "training.responses_per_prompt=4",
    "training.minibatch_size=8",
]
TINY_CRITIC = ["training.critic_warmup=1", "training.critic_epochs=2"]
TINY_CHAIN = ["task.steps=2"]


def tiny(recipe="compo", *sets):
    whole = load_recipe(RECIPES / f"{recipe}.yaml")
    critic = TINY_CRITIC if whole.critic else []
    chain = TINY_CHAIN if whole.task.use == "chain_arithmetic" else []
    return load_recipe(RECIPES / f"{recipe}.yaml", [*TINY, *critic, *chain, *sets])


def run(recipe, root, **options):
    folder = RunFolder.new(root, recipe.name).path
    train(recipe, folder, console=Console(file=io.StringIO()), **options)
    return folder


def final_state(folder):
    return torch.load(RunFolder(folder).checkpoints[-1], weights_only=False)


def assert_same_tensors(a, b, path=""):
    """Bit for bit, through nested containers."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same_tensors(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_tensors(x, y, f"{path}/{index}")
    else:
        assert a == b, path


SCRATCH = sorted(path.stem for path in RECIPES.glob("*.yaml") if load_recipe(path).policy.use == "scratch")


@pytest.mark.parametrize("name", SCRATCH)  # the others need weights from elsewhere; tests/test_recipe.py validates them too
def test_every_shipped_recipe_trains_two_iterations(name, tmp_path):
    folder = run(tiny(name), tmp_path)
    events = RunFolder(folder).metrics
    assert [e["iteration"] for e in events if e["iteration"] > 0] == [1, 2]
    assert events[0].keys() >= {"eval/accuracy"} and events[-1].keys() >= {
        "train/reward",
        "eval/accuracy",
        "policy/loss",
        "time/generate",
    }
    recipe = load_recipe(folder / "recipe.yaml")
    assert recipe.name == name
    assert ("critic/explained_variance" in events[-1]) == (recipe.critic is not None)
    assert ("gate/mean" in events[-1]) == (recipe.transport.use == "comp_gae")


CHECKSUM = "def score(prompt, response):\n    return sum(map(ord, prompt.text + response.text)) % 97 / 97\n"


def scattered(tmp_path, recipe="remax", *sets):
    """A recipe whose scores differ between prompts and responses, those of an untrained policy included."""
    (tmp_path / "checksum.py").write_text(CHECKSUM)
    path = tmp_path / "checksum.yaml"
    inline = "workers: 0, time_limit: null"
    path.write_text(f"base: {RECIPES / recipe}.yaml\nevidence: [{{use: python, path: checksum.py, {inline}}}]\n")
    return load_recipe(path, [*TINY, *TINY_CHAIN, *sets])


def test_remax_takes_the_score_of_the_present_policy_s_greedy_response(tmp_path):
    recipe = scattered(tmp_path)
    agent, tokenizer, _ = build(recipe)
    collector = Held(recipe, agent, tokenizer)
    found = collector.collect(2)
    prompts = recipe.task.prompts(recipe.seed, 4, 4)
    responses = [one.response for one in collector.sampler.respond(prompts, None)]
    greedy = [recipe.evidence[0](prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    assert len(set(greedy)) > 1
    rollout = found.rollout
    expected = torch.tensor(greedy)[rollout.groups]
    assert torch.equal(rollout.greedy_scores, expected) and not torch.equal(rollout.scores, expected)
    assert torch.equal(found.credit.advantages, (rollout.scores - expected).unsqueeze(1) * rollout.mask)
    assert found.metrics["train/greedy_reward"] == pytest.approx(sum(greedy) / 4)
    assert found.metrics["time/greedy"] > 0 and found.metrics["time/generate"] > 0


def test_greedy_responses_are_sampled_only_where_a_part_needs_them(tmp_path):
    def collect(*sets):
        recipe = scattered(tmp_path, "rloo", *sets)
        agent, tokenizer, _ = build(recipe)
        return Held(recipe, agent, tokenizer).collect(1)

    plain, wrapped = collect(), collect("transport={use: high_entropy, of: remax}")
    assert plain.rollout.greedy_scores is None and not {"train/greedy_reward", "time/greedy"} & {*plain.metrics}
    assert "train/greedy_reward" in wrapped.metrics
    assert torch.equal(plain.rollout.input_ids, wrapped.rollout.input_ids)  # the sampled responses are the same


def test_processes_share_the_greedy_responses(tmp_path):
    class Alone(Ranks):
        """What one of three processes has to offer."""

        def gather(self, value):
            return [value]

    recipe = scattered(tmp_path)
    agent, tokenizer, _ = build(recipe)
    prompts = recipe.prompts(1, 1)
    whole = Sampler(recipe, agent.actor, tokenizer).greedy_scores(prompts, 1)
    parts = [Sampler(recipe, agent.actor, tokenizer, ranks=Alone(rank, 3)).greedy_scores(prompts, 1) for rank in range(3)]
    assert [len(part) for part in parts] == [1, 1, 2] and [score for part in parts for score in part] == whole


def test_a_greedy_response_that_could_not_be_judged_is_no_baseline(tmp_path):
    recipe = scattered(tmp_path, "remax", "evidence.0.on_error=drop")
    (tmp_path / "checksum.py").write_text(
        "def score(prompt, response):\n    if not response.logprobs:\n        raise RuntimeError\n    return 0.5\n"
    )
    agent, tokenizer, _ = build(recipe)
    found = Held(recipe, agent, tokenizer).collect(1)
    assert found.rollout.greedy_scores.isnan().all() and found.credit.advantages.eq(0).all() and found.rollout.valid.all()
    assert found.metrics["evidence/errors/python"] == 4 and "train/greedy_reward" not in found.metrics


def test_remax_trains_two_iterations_and_says_what_it_cost(tmp_path):
    events = [e for e in RunFolder(run(scattered(tmp_path), tmp_path)).metrics if e["iteration"] > 0]
    assert len(events) == 2 and all(0 <= e["train/greedy_reward"] <= 1 and e["time/greedy"] > 0 for e in events)
    assert all(e["actor/gradient_norm"] > 0 for e in events)


def test_a_run_folder_holds_what_the_docs_say_and_a_second_run_takes_another(tmp_path):
    first, second = run(tiny(), tmp_path), run(tiny(), tmp_path)
    assert (first.name, second.name) == ("001", "002")
    for name in (
        "recipe.yaml",
        "metrics.jsonl",
        "samples.jsonl",
        "policy/config.json",
        "logs/from_000000/metrics.csv",
        "rollouts/1.safetensors",
    ):
        assert (first / name).is_file(), name
    samples = [json.loads(line) for line in (first / "samples.jsonl").read_text().splitlines()]
    assert samples[0].keys() == {"iteration", "prompt", "response", "reward", "advantage", "finished"}

    def strip(folder):
        events = RunFolder(folder).metrics
        return [{k: v for k, v in e.items() if "time" not in k and "second" not in k} for e in events]

    assert strip(first) == strip(second)  # one seed, one result


def test_a_checkpoint_of_a_version_without_lessons_is_gone_on_with(tmp_path):
    folder = run(tiny("compo", "training.iterations=2"), tmp_path)
    saved = final_state(folder)
    assert saved["RolloutData"].pop("lessons") == []
    torch.save(saved, RunFolder(folder).checkpoints[-1])
    (folder / "SHA256SUMS").unlink()
    resume(folder, None, ["training.iterations=3"], console=Console(file=io.StringIO()))
    assert RunFolder(folder).metrics[-1]["iteration"] == 3


def test_the_exported_policy_is_the_trained_one_and_needs_no_cct(tmp_path):
    folder = run(tiny(), tmp_path)
    assert "cct" not in (folder / "policy" / "config.json").read_text()
    exported = AutoModelForCausalLM.from_pretrained(folder / "policy", attn_implementation="eager")
    trained = final_state(folder)["state_dict"]
    for name, weight in exported.named_parameters():
        assert torch.equal(weight, trained[f"agent.actor.{name}"]), name
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    assert tokenizer.decode(tokenizer("3+5-7=")["input_ids"]) == "3+5-7="
    assert evaluate_run(folder)["eval/accuracy"] == RunFolder(folder).metrics[-1]["eval/accuracy"]


@pytest.mark.parametrize("knobs", ["compo", "gae", "grpo", "compo training.critic_window=3"])
def test_resuming_gives_the_same_bits_as_an_uninterrupted_run(knobs, tmp_path):
    whole = run(tiny(*knobs.split(), "training.iterations=4", "training.checkpoint_every=2"), tmp_path)
    cut = Path(shutil.copytree(whole, tmp_path / "cut"))
    RunFolder(cut).checkpoints[-1].unlink()  # as if the run had been killed after iteration 2
    resume(cut, None, [], console=Console(file=io.StringIO()))
    a, b = final_state(whole), final_state(cut)
    assert_same_tensors(a["state_dict"], b["state_dict"])
    assert_same_tensors(a["optimizer_states"], b["optimizer_states"])
    assert any(state["step"] > 0 for state in a["optimizer_states"][0]["state"].values())
    assert [e["iteration"] for e in RunFolder(cut).metrics] == [e["iteration"] for e in RunFolder(whole).metrics]
    for key in ("train/reward", "policy/loss"):
        assert [e[key] for e in RunFolder(cut).metrics if key in e] == [e[key] for e in RunFolder(whole).metrics if key in e]


def test_a_complete_run_can_be_extended(tmp_path):
    whole = run(tiny("compo", "training.schedule=constant", "training.iterations=4"), tmp_path / "whole")
    half = run(tiny("compo", "training.schedule=constant", "training.iterations=2"), tmp_path / "half")
    resume(half, None, ["training.iterations=4"], console=Console(file=io.StringIO()))
    assert_same_tensors(final_state(whole)["state_dict"], final_state(half)["state_dict"])


def test_resuming_drops_events_after_the_checkpoint_and_makes_them_again(tmp_path):
    folder = run(tiny("grpo"), tmp_path)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 3, "train/reward": -1.0}) + "\n")
    resume(folder, None, ["training.iterations=3"], console=Console(file=io.StringIO()))
    events = [e for e in RunFolder(folder).metrics if e["iteration"] == 3]
    assert len(events) == 1 and events[0]["train/reward"] >= 0


def test_resuming_drops_lines_that_were_cut_and_checkpoints_that_were_not_finished(tmp_path):
    folder = run(tiny("grpo"), tmp_path)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"iteration": 3, "prom')
    (folder / "checkpoints" / ".000003.ckpt.0123abcd.tmp").write_bytes(b"cut")
    assert [e["iteration"] for e in RunFolder(folder).metrics] == [0, 1, 2]
    resume(folder, None, ["training.iterations=3"], console=Console(file=io.StringIO()))
    assert [e["iteration"] for e in RunFolder(folder).metrics] == [0, 1, 2, 3]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {sample["iteration"] for sample in samples} == {1, 2, 3}
    assert [path.name for path in folder.rglob(".*")] == [".lock"]  # nothing unfinished is left


def test_a_run_that_was_cut_before_its_export_is_exported(tmp_path):
    folder = run(tiny("grpo"), tmp_path)
    weights = (folder / "policy" / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "policy")
    assert main(["run", "--resume", str(folder)]) == 0
    assert (folder / "policy" / "model.safetensors").read_bytes() == weights


def test_a_run_into_a_given_folder(tmp_path, capsys):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(dump_recipe(tiny("grpo", "training.iterations=1")))
    folder = tmp_path / "here" / "it"
    assert main(["run", str(recipe), "--into", str(folder)]) == 0
    assert (folder / "policy").is_dir() and (folder / "metrics.jsonl").is_file()
    assert main(["run", str(recipe), "--into", str(folder)]) == 2
    assert f"{folder}: the folder is not empty" in capsys.readouterr().err and (folder / "policy").is_dir()


def test_resuming_a_complete_run_is_refused(tmp_path):
    folder = run(tiny("grpo"), tmp_path)
    with pytest.raises(RecipeError, match=r"complete.*training\.iterations=4"):
        resume(folder, None, [], console=Console(file=io.StringIO()))


@pytest.mark.parametrize("split", ["micro_batch_size=2", "micro_batch_tokens=48"])
def test_the_micro_batch_split_changes_no_weight(split, tmp_path):
    sgd_like = ["geometry.aggregation=sequence_mean", "training.iterations=1"]
    whole, split = (
        run(tiny("compo", *sgd_like), tmp_path),
        run(tiny("compo", *sgd_like, f"training.{split}"), tmp_path),
    )
    a, b = final_state(whole)["optimizer_states"][0]["state"], final_state(split)["optimizer_states"][0]["state"]
    for index in a:  # Adam's first moments: sums of gradients, which the split must not change
        torch.testing.assert_close(a[index]["exp_avg"], b[index]["exp_avg"], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("split", ["micro_batch_size=4", "micro_batch_tokens=60"])
def test_sharing_prompts_changes_no_number_beyond_rounding(split, tmp_path):
    knobs = ["training.iterations=1", "training.critic_window=2", f"training.{split}"]
    apart = run(tiny("compo", *knobs, "training.share_prefix=false"), tmp_path)
    shared = run(tiny("compo", *knobs, "training.share_prefix=true"), tmp_path)
    a, b = (final_state(folder)["optimizer_states"][0]["state"] for folder in (apart, shared))
    for index in a:
        torch.testing.assert_close(a[index]["exp_avg"], b[index]["exp_avg"], rtol=1e-3, atol=1e-6)
    for event, other in zip(RunFolder(apart).metrics, RunFolder(shared).metrics, strict=True):
        for name in ("train/entropy", "advantage/std", "critic/explained_variance", "policy/loss", "eval/accuracy"):
            assert (name in event) == (name in other), name
            assert event.get(name, 0) == pytest.approx(other.get(name, 0), rel=1e-3, abs=1e-5), name


def test_a_policy_that_cannot_share_prompts_is_refused_where_it_must(tmp_path):
    model = tiny_model("llama")
    model.model.register_forward_pre_hook(lambda _, args, kw: (args, {**kw, "position_ids": None}), with_kwargs=True)
    with pytest.raises(RecipeError, match=r"share_prefix: LlamaForCausalLM cannot share prompts: it gives other logits then"):
        sharing(tiny("grpo", "training.share_prefix=true"), model, print)
    said: list[str] = []
    assert sharing(tiny("grpo"), model, said.append) == (False, None)
    assert said == [
        "training.share_prefix: LlamaForCausalLM cannot share prompts: it gives other logits then; "
        "the prompt is computed again for each response"
    ]
    assert sharing(tiny("grpo", "training.share_prefix=false"), model, said.append) == (False, None) and len(said) == 1
    assert sharing(tiny("grpo"), tiny_model("llama"), said.append) == ("auto", None) and len(said) == 1


def test_a_single_step_on_policy_needs_no_forward_before_it(tmp_path):
    one_step = ["training.minibatch_size=16", "training.micro_batch_size=4"]
    without = run(tiny("grpo", *one_step), tmp_path)
    before = run(tiny("grpo", *one_step, "transport={use: high_entropy, of: grpo, fraction: 1.0}"), tmp_path)
    for (name, weight), (_, other) in zip(
        *(final_state(folder)["state_dict"].items() for folder in (without, before)), strict=True
    ):
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-6, msg=name)
    for short, long in zip(RunFolder(without).metrics[1:], RunFolder(before).metrics[1:], strict=True):
        assert "time/behaviour" not in short and long["time/behaviour"] > 0
        assert short["policy/entropy"] == pytest.approx(long["train/entropy"], rel=1e-5)
        assert short["policy/ratio"] == pytest.approx(1, abs=1e-6) and short["policy/clip_fraction"] == 0
    two_steps = RunFolder(run(tiny("grpo", "training.minibatch_size=8"), tmp_path)).metrics[-1]
    corrected = RunFolder(run(tiny("grpo", *one_step, "geometry.correction=truncate"), tmp_path)).metrics[-1]
    assert "time/behaviour" in two_steps and "time/behaviour" in corrected


def test_statistics_are_logged_and_stored_whatever_the_transport_reads(tmp_path):
    asked = "logging.statistics=[entropy, {use: anchor, near: 1}]"
    folder = run(tiny("grpo", "training.minibatch_size=16", asked), tmp_path)
    events = RunFolder(folder).metrics[1:]
    assert len(events) == 2 and all(event["time/behaviour"] > 0 for event in events)  # grpo alone would need no such forward
    for event in events:
        assert event["statistic/token_entropy/mean"] == pytest.approx(event["train/entropy"])
        assert event["statistic/token_entropy/std"] > 0 and 0 < event["statistic/anchor/last_half/1-64/mean"] < 1
    first, second = (RunFolder(folder).rollout(iteration) for iteration in (1, 2))
    assert {"token_entropy", "anchor/last_half/1-64"} <= first.stats.keys()
    assert first.moments == {} and second.moments["token_entropy"][0] == pytest.approx(events[0]["train/entropy"])


def test_a_ratio_to_the_engine_needs_no_forward_before_the_update(tmp_path):
    to_trainer = run(tiny("grpo", "training.minibatch_size=8"), tmp_path)
    to_engine = run(tiny("grpo", "training.minibatch_size=8", "geometry.ratio_to=engine"), tmp_path)
    for (name, weight), (_, other) in zip(
        *(final_state(folder)["state_dict"].items() for folder in (to_trainer, to_engine)), strict=True
    ):
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-6, msg=name)  # the engine is the policy itself
    short, long = RunFolder(to_engine).metrics[-1], RunFolder(to_trainer).metrics[-1]
    assert "time/behaviour" not in short and "train/entropy" not in short
    assert short["policy/entropy"] == pytest.approx(long["train/entropy"], rel=0.1)  # along the update, not before it
    with_critic = run(tiny("compo", "geometry.ratio_to=engine"), tmp_path)
    assert "time/behaviour" in RunFolder(with_critic).metrics[-1]


def collected(recipe):
    agent, tokenizer, reference = build(recipe)
    return agent, Held(recipe, agent, tokenizer, reference).collect(1)


def test_the_critic_goes_over_the_responses_of_its_window_as_the_policy_reads_them_now():
    recipe = tiny("compo", "training.critic_window=2", "training.critic_epochs=3", "training.micro_batch_tokens=60")
    agent, tokenizer, reference = build(recipe)
    collector, lessons = Held(recipe, agent, tokenizer, reference), []
    for number in (1, 2, 3):
        iteration = collector.collect(number)
        lessons.append([batch for batch in iteration.updates if isinstance(batch, CriticBatch)])
        first = iteration.updates[0]
        read = first.trace.input_ids, first.trace.attention_mask
        again = agent(*read, first.mask.shape[1], with_critic=True).trace
        for layer, state in again.hidden_states.items():
            torch.testing.assert_close(first.trace.hidden_states[layer], state, rtol=0, atol=1e-5)
        with torch.no_grad():  # as an update would
            for weight in agent.actor.parameters():
                weight.mul_(1.01)

    def learnt(batches):
        """Every response with its targets, as often as it is learnt from."""
        rows = [
            (tuple(ids[seen].tolist()), tuple(targets[mask].tolist()))
            for batch in batches
            for ids, seen, targets, mask in zip(
                batch.trace.input_ids, batch.trace.attention_mask.bool(), batch.value_targets, batch.mask, strict=True
            )
        ]
        assert sum(float(batch.token_weights[batch.mask].sum()) for batch in batches) == pytest.approx(
            len(rows) / recipe.training.minibatch_size
        )
        return Counter(rows)

    one, two, three = map(learnt, lessons)
    assert all(times % 3 == 0 for times in one.values())
    assert two - one and sum(two.values()) == 2 * sum(one.values()) and not one - two  # all of the first, and as many new ones
    new = two - one
    assert not new - three and not (three - new) & one  # the window has moved on


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_before_the_first_update_the_ratio_is_one_and_nothing_is_clipped(temperature):
    recipe = tiny("compo", f"generation.temperature={temperature}", "training.micro_batch_size=2")
    agent, iteration = collected(recipe)
    policy = [batch for batch in iteration.updates if isinstance(batch, PolicyBatch)]
    assert len(policy) == 8
    for batch in policy:
        logprobs = agent(batch.input_ids, batch.attention_mask, batch.mask.shape[1]).logprobs
        _, metrics = recipe.geometry(logprobs, batch.logprobs, batch.advantages, batch.mask, None)
        torch.testing.assert_close(metrics["ratio"], torch.ones_like(logprobs), rtol=0, atol=1e-5)
        assert metrics["clip_fraction"].sum() == 0


def test_only_responses_cut_by_the_limit_bootstrap():
    _, iteration = collected(tiny("compo", "generation.max_new_tokens=3"))
    rollout = iteration.rollout
    assert rollout.truncated.any()
    assert (rollout.bootstrap[rollout.truncated] > 0).all() and (rollout.bootstrap[~rollout.truncated] == 0).all()


def test_where_the_limit_is_part_of_the_task_a_cut_response_ends_with_its_score():
    settings = ["generation.max_new_tokens=3", "transport.whiten=false", "transport.gate={use: constant, gamma: 1.0}"]
    _, iteration = collected(tiny("compo", *settings, "training.bootstrap_truncated=false"))
    rollout, advantages = iteration.rollout, iteration.credit.advantages
    last = rollout.mask.sum(1) - 1
    assert rollout.truncated.any() and rollout.bootstrap is None
    at_last = [x.gather(1, last.unsqueeze(1)).squeeze(1) for x in (advantages, rollout.rewards, rollout.values)]
    torch.testing.assert_close(at_last[0], at_last[1] - at_last[2])


def test_the_warm_up_trains_the_critic_and_leaves_the_policy_alone(tmp_path):
    recipe = tiny("compo")
    agent, tokenizer, _ = build(recipe)
    iteration = Held(recipe, agent, tokenizer).collect(0)
    assert iteration.updates and all(isinstance(batch, CriticBatch) for batch in iteration.updates)


def test_the_policy_moves_towards_the_advantage(tmp_path):
    """One response is rewarded: its log-probability rises."""
    recipe = tiny(
        "grpo",
        "evidence.0.pattern=(.)",
        "training.iterations=1",
        "training.learning_rate=1.0e-3",
        "training.responses_per_prompt=32",
        "training.minibatch_size=128",
    )
    agent, tokenizer, _ = build(recipe)
    iteration = Held(recipe, agent, tokenizer).collect(1)
    rollout, credit = iteration.rollout, iteration.credit
    folder = run(recipe, tmp_path)
    after = {k.removeprefix("agent."): v for k, v in final_state(folder)["state_dict"].items()}
    agent.load_state_dict(after)
    with torch.no_grad():
        moved = (
            agent(rollout.input_ids, rollout.attention_mask, rollout.mask.shape[1]).logprobs - rollout.logprobs
        ) * rollout.mask
    assert credit.advantages.abs().sum() > 0
    assert (moved * credit.advantages).sum() > 0


PLUGIN = '''
import torch
from cct.evidence import Evidence, evidences
from cct.rollout import Credit
from cct.transport import Transport, transports

@transports.register("{name}_nan")
class Nan(Transport):
    """NaN advantages from the second iteration on."""
    def __call__(self, rollout):
        self.__dict__.setdefault("calls", []).append(1)
        return Credit(torch.full_like(rollout.rewards, float("nan") if len(self.__dict__["calls"]) > 1 else 0.0))

@evidences.register("{name}_odd")
class Odd(Evidence):
    """Raises on responses of odd length."""
    def __call__(self, prompt, response):
        if len(response.tokens) % 2:
            raise KeyError("odd")
        return [0.5] * len(response.tokens)
'''


@pytest.fixture
def plugin(tmp_path):
    path = tmp_path / f"plugin_{abs(hash(str(tmp_path)))}.py"
    path.write_text(PLUGIN.format(name=path.stem))
    return f"plugins=[{path}]", path.stem


def test_nan_stops_the_run_naming_component_and_iteration_and_keeps_the_checkpoint(plugin, tmp_path):
    sets, name = plugin
    recipe = tiny("grpo", sets, f"transport={name}_nan", "training.checkpoint_every=1")
    with pytest.raises(TrainingStopped, match=rf"transport '{name}_nan' \(advantages\) in iteration 2"):
        run(recipe, tmp_path)
    assert [path.stem for path in RunFolder(tmp_path / "grpo" / "001").checkpoints] == ["000001"]


def test_a_nan_gradient_stops_the_run(tmp_path):
    recipe = tiny("grpo", "training.iterations=1")
    agent, tokenizer, _ = build(recipe)
    with torch.no_grad():
        next(agent.actor.parameters()).fill_(float("nan"))
    with pytest.raises((TrainingStopped, RuntimeError), match="policy|probability"):
        Held(recipe, agent, tokenizer).collect(1)


@pytest.mark.parametrize("choice", ["fail", "zero", "drop"])
def test_evidence_that_raises_follows_the_recipe(choice, plugin):
    sets, name = plugin
    recipe = tiny("grpo", sets, f"evidence=[{{use: {name}_odd, on_error: {choice}}}]")
    prompts, responses = [Prompt("p")] * 2, [Response("ab", (5, 6), True), Response("abc", (5, 6, 7), True)]
    if choice == "fail":
        with pytest.raises(TrainingStopped, match="KeyError.*on_error"):
            judge(recipe.evidence, prompts, responses)
    else:
        rewards, keep, errors = judge(recipe.evidence, prompts, responses)
        assert rewards == [[0.5, 0.5], [0.0, 0.0, 0.0]]  # dense rewards stand at their tokens
        assert keep == [True, choice == "zero"] and errors == {f"errors/{name}_odd": 1}


HANGS = """
import os, time
def score(prompt, response):
    if response.text == "hang":
        time.sleep(3600)
    if response.text == "exit":
        os._exit(1)
    return 0.5
"""


@pytest.fixture
def hangs(tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    yield PythonFunction(path=tmp_path / "hangs.py", time_limit=1.0, weight=2.0)
    close_workers()


@pytest.mark.parametrize("choice", ["fail", "zero", "drop"])
def test_evidence_that_hangs_or_dies_follows_the_recipe(choice, hangs):
    texts = ["a", "hang", "exit", "b"]
    prompts, responses = [Prompt("p")] * 4, [Response(text, (5, 6), True) for text in texts]
    part = hangs.model_copy(update={"on_error": choice})
    if choice == "fail":
        with pytest.raises(
            TrainingStopped, match=r"evidence 'python' took longer than time_limit, 1 s, judging 'hang'.*on_error"
        ):
            judge([part], prompts, responses)
    else:
        rewards, keep, failures = judge([part, ExactMatch(pattern="(.)")], prompts, responses)
        assert rewards == [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
        assert keep == [True, choice == "zero", choice == "zero", True]
        assert failures == {"timeouts/python": 1, "errors/python": 1}


def test_workers_judge_a_run_and_end_with_it(hangs, plugin, tmp_path):
    sets, name = plugin  # evidence that a plug-in registers is made again in a worker
    evidence = (
        f"evidence=[{{use: python, path: {hangs.path}}}, {{use: {name}_odd, on_error: zero, workers: 1, time_limit: 30}}]"
    )
    folder = run(tiny("grpo", sets, evidence, "generation.max_new_tokens=5"), tmp_path)
    assert not multiprocessing.active_children()
    events = [e for e in RunFolder(folder).metrics if "train/reward" in e]
    assert all(e["train/reward"] >= 0.5 for e in events) and "evidence/timeouts/python" not in events[0]
    assert any(e[f"evidence/errors/{name}_odd"] > 0 for e in events)
    evaluated = RunFolder(folder).metrics[0]
    assert evaluated["eval/accuracy"] == 0.5 and 0.5 <= evaluated["eval/reward"] <= 0.5 * (1 + 5)


def test_frozen_sets_are_read_by_eval_alone_and_averaged(tmp_path, capsys):
    one, four = (f"{{use: chain_arithmetic, steps: {steps}, held_out_size: 7}}" for steps in (1, 4))
    recipe = tiny(
        "grpo", f"evaluation.frozen={{one: {one}, four: {four}}}", "evidence=[{use: length, max_tokens: 12, buffer: 10}]"
    )
    folder = run(recipe, tmp_path)
    assert not [name for event in RunFolder(folder).metrics for name in event if name.startswith("frozen")]
    found = evaluate_run(folder)
    assert found["frozen/accuracy"] == (found["frozen/one/accuracy"] + found["frozen/four/accuracy"]) / 2
    for name in ("one", "four"):  # greedy, up to 8 tokens of which 2 are free
        assert found[f"frozen/{name}/accuracy"] == found[f"frozen/{name}/reward"] < 0
        assert found[f"frozen/{name}/accuracy"] == pytest.approx((2 - found[f"frozen/{name}/length"]) / 10)
    assert found["eval/accuracy"] == RunFolder(folder).metrics[-1]["eval/accuracy"]
    assert main(["eval", str(folder)]) == 0
    assert f"frozen/four/accuracy {found['frozen/four/accuracy']:.4f}" in " ".join(capsys.readouterr().out.split())


def test_samples_are_evaluated_by_pass_at_k(tmp_path, capsys):
    (tmp_path / "odd.py").write_text("def score(prompt, response):\n    return float(sum(response.tokens) % 2)\n")
    one = "evaluation.frozen={one: {use: chain_arithmetic, steps: 1, held_out_size: 7}}"
    odd = f"evidence=[{{use: python, path: {tmp_path / 'odd.py'}, workers: 0, time_limit: null}}]"
    folder = run(tiny("grpo", "training.iterations=1", one, odd), tmp_path)
    assert main(["eval", str(folder), "--samples", "6", "--ks", "1,2,6", "--json", str(tmp_path / "eval.json")]) == 0
    found = json.loads((tmp_path / "eval.json").read_text())
    assert found["eval/accuracy"] == RunFolder(folder).metrics[-1]["eval/accuracy"]  # the greedy one, as without samples
    for name in ("eval", "frozen/one"):  # an untrained policy is right half of the time, whatever the problem
        assert found[f"{name}/avg@6"] == pytest.approx(found[f"{name}/pass@1"])
        assert 0.2 < found[f"{name}/pass@1"] < found[f"{name}/pass@2"] < found[f"{name}/pass@6"] <= 1
        assert found[f"{name}/pass@2"] == pytest.approx(1 - (1 - found[f"{name}/pass@1"]) ** 2, abs=0.15)
    assert found["frozen/pass@2"] == found["frozen/one/pass@2"]
    assert evaluate_run(folder, 6, [1, 2, 6]) == found  # sampled from the recipe's seed
    assert main(["eval", str(folder), "--samples", "2", "--ks", "4"]) == 2
    assert "each k is from 1 to 2; found 4" in capsys.readouterr().err


def test_an_evaluation_whose_evidence_fails_ends_with_1(tmp_path, capsys):
    folder = run(tiny("grpo", "training.iterations=1"), tmp_path)
    keys = yaml.safe_load((folder / "recipe.yaml").read_text())
    (folder / "recipe.yaml").write_text(yaml.safe_dump(keys | {"evidence": ["reasoning_gym"]}))  # scores its own task only
    assert main(["eval", str(folder)]) == 1
    assert "stopped: evidence 'reasoning_gym' failed: ValueError" in capsys.readouterr().err


def test_dropped_responses_are_counted_and_do_not_train(plugin, tmp_path):
    sets, name = plugin
    folder = run(
        tiny("compo", sets, f"evidence=[{{use: {name}_odd, on_error: drop}}]", "generation.max_new_tokens=5"), tmp_path
    )
    events = [e for e in RunFolder(folder).metrics if "train/dropped" in e]
    assert any(0 < e["train/dropped"] < 1 for e in events)
    assert all(e[f"evidence/errors/{name}_odd"] == round(16 * e["train/dropped"]) for e in events if e["train/dropped"])


@pytest.mark.parametrize("verdict", [float("nan"), [1.0], [1.0, float("inf")]])
def test_evidence_must_give_a_finite_number_or_one_per_token(verdict):
    class Told(Evidence):
        """Returns what it is told."""

        def __call__(self, prompt, response):
            return verdict

    with pytest.raises(TrainingStopped, match="it returned .*; expected"):
        judge([Told()], [Prompt("p")], [Response("ab", (5, 6), True)])


def test_kl_to_the_reference_starts_at_zero_and_grows(tmp_path):
    folder = run(
        tiny(
            "grpo", "geometry.kl_coef=0.1", "training.learning_rate=1.0e-2", "evidence.0.pattern=(.)", "training.iterations=3"
        ),
        tmp_path,
    )
    kl = [e["policy/reference_kl"] for e in RunFolder(folder).metrics if "policy/reference_kl" in e]
    assert kl[-1] > kl[0] >= 0


def test_a_warm_start_is_trained_once_and_then_read_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CCT_CACHE", str(tmp_path))
    recipe, steps = tiny("grpo", "policy.warm_start={steps: 3, batch_size: 4}"), []
    report = lambda step, total, loss: steps.append(step)  # noqa: E731
    first, _ = warm_start(recipe.policy, recipe.task, 0, report)
    again, _ = warm_start(recipe.policy, recipe.task, 0, report)
    assert steps == [1, 2, 3]
    assert_same_tensors(dict(first.state_dict()), dict(again.state_dict()))
    warm_start(recipe.policy, recipe.task, 1, report)
    assert steps == [1, 2, 3, 1, 2, 3]  # another seed is another warm start


def test_a_damaged_warm_start_in_the_cache_is_computed_again(tmp_path, monkeypatch):
    monkeypatch.setenv("CCT_CACHE", str(tmp_path))
    recipe, lines = tiny("grpo", "policy.warm_start={steps: 1, batch_size: 4}"), []
    first, _ = warm_start(recipe.policy, recipe.task, 0, say=lines.append)
    (weights,) = tmp_path.rglob("model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.unlink()  # the first model maps it
    weights.write_bytes(content)
    again, _ = warm_start(recipe.policy, recipe.task, 0, say=lines.append)
    assert [line.startswith("warm start: computed again") for line in lines] == [True]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


def test_a_policy_that_cannot_be_loaded_for_an_evaluation_is_one_message(tmp_path):
    (tmp_path / "recipe.yaml").write_text(dump_recipe(tiny("grpo")))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/config.json").write_text("{}")
    with pytest.raises(RecipeError, match="policy"):
        evaluate_run(tmp_path)


def steps_of_a_warm_start(meeting: Path, number: int) -> int:
    """In a process: how many steps it computed, of a warm start that another process wants at the same time."""
    recipe, steps = tiny("grpo", "policy.warm_start={steps: 30, batch_size: 32}"), []
    (meeting / f"{number}").touch()
    while len(list(meeting.iterdir())) < 2:
        time.sleep(0.01)
    warm_start(recipe.policy, recipe.task, 0, lambda step, total, loss: steps.append(step))
    return len(steps)


def test_processes_that_want_one_warm_start_compute_it_once(tmp_path, monkeypatch):
    monkeypatch.setenv("CCT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "meeting").mkdir()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert sorted(pool.starmap(steps_of_a_warm_start, [(tmp_path / "meeting", 0), (tmp_path / "meeting", 1)])) == [0, 30]


def test_recomputed_activations_change_no_weight(tmp_path):
    kept, recomputed = (run(tiny("compo", f"training.gradient_checkpointing={on}"), tmp_path) for on in ("false", "true"))
    a, b = final_state(kept)["optimizer_states"][0]["state"], final_state(recomputed)["optimizer_states"][0]["state"]
    for index in a:
        torch.testing.assert_close(a[index]["exp_avg"], b[index]["exp_avg"], rtol=1e-4, atol=1e-7)


def test_in_bfloat16_the_ratio_starts_at_one_too_and_the_weights_stay_float32(tmp_path):
    recipe = tiny("compo", "training.precision=bf16", "training.micro_batch_size=2")
    agent, iteration = collected(recipe)
    rollout = iteration.rollout
    exact = build(tiny("compo"))[0](rollout.input_ids, rollout.attention_mask, rollout.mask.shape[1]).logprobs
    assert not torch.allclose(exact, rollout.logprobs, rtol=0, atol=1e-5)  # it is bfloat16
    torch.testing.assert_close(exact[rollout.mask], rollout.logprobs[rollout.mask], rtol=0, atol=0.1)
    for batch in iteration.updates:
        if isinstance(batch, PolicyBatch):
            logprobs = agent(batch.input_ids, batch.attention_mask, batch.mask.shape[1]).logprobs
            torch.testing.assert_close(logprobs, batch.logprobs, rtol=0, atol=1e-5)
    folder = run(recipe, tmp_path)
    assert RunFolder(folder).metrics[-1]["engine/logprob_gap"] < 0.05
    assert all(w.dtype == torch.float32 for w in final_state(folder)["state_dict"].values())


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_before_the_first_update_policy_and_reference_agree(precision):
    _, iteration = collected(tiny("grpo", "geometry.kl_coef=0.1", f"training.precision={precision}"))
    rollout = iteration.rollout
    torch.testing.assert_close(rollout.reference_logprobs, rollout.logprobs, rtol=0, atol=1e-5)


def test_adapters_train_alone_and_are_merged_on_export(tmp_path):
    pytest.importorskip("peft")
    recipe = tiny("compo", "policy.lora={rank: 2}", "training.learning_rate=1.0e-2", "evidence.0.pattern=(.)")
    start = dict(build(recipe)[0].actor.state_dict())
    folder = run(recipe, tmp_path)
    trained = {n.removeprefix("agent.actor."): w for n, w in final_state(folder)["state_dict"].items() if "actor" in n}
    moved = {name for name in trained if not torch.equal(trained[name], start[name])}
    assert moved and all(".lora_" in name for name in moved)
    export(folder, tmp_path / "exported")
    for path in (folder / "policy", tmp_path / "exported"):
        merged = AutoModelForCausalLM.from_pretrained(path).state_dict()
        assert not any("lora" in name for name in merged)
        name = "model.layers.0.self_attn.q_proj"
        product = trained[f"{name}.lora_B.default.weight"] @ trained[f"{name}.lora_A.default.weight"] * 32 / 2
        torch.testing.assert_close(merged[f"{name}.weight"], trained[f"{name}.base_layer.weight"] + product)
    assert evaluate_run(folder)["eval/length"] > 0


def test_export_of_an_earlier_checkpoint_and_what_it_refuses(tmp_path):
    folder = run(tiny("compo", "training.checkpoint_every=1"), tmp_path)
    export(folder, tmp_path / "first", 1)
    export(folder, tmp_path / "last")
    first, last, final = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (tmp_path / "first", tmp_path / "last", folder / "policy")
    )
    assert_same_tensors(dict(last), dict(final))
    assert any(not torch.equal(first[name], last[name]) for name in first)
    with pytest.raises(RecipeError, match="the folder is not empty"):
        export(folder, tmp_path / "first")
    with pytest.raises(RecipeError, match="no checkpoint of iteration 7; there are those of iterations 1, 2"):
        export(folder, tmp_path / "new", 7)
    with pytest.raises(RecipeError, match="not a run folder"):
        export(tmp_path, tmp_path / "new")


def test_dropout_is_off():
    from cct.policy.weights import without_dropout

    model = without_dropout(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20))).train()
    ids = torch.arange(10).unsqueeze(0)
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_a_truncated_distribution_needs_a_correction_which_is_logged(tmp_path):
    with pytest.raises(RecipeError, match=r"generation: top_p \(0.5\).*geometry.correction"):
        tiny("grpo", "generation.top_p=0.5")
    folder = run(tiny("grpo", "generation.top_p=0.5", "geometry.correction=truncate"), tmp_path)
    event = RunFolder(folder).metrics[-1]
    assert 0 < event["correction/raw"] < 1 and event["correction/used"] == event["correction/raw"]
    masked = RunFolder(run(tiny("grpo", "generation.top_k=2", "geometry.correction=mask"), tmp_path)).metrics[-1]
    assert masked["correction/used"] < masked["correction/raw"] and masked["correction/changed"] > 0


def test_the_engines_log_probabilities_travel_in_the_rollout():
    _, iteration = collected(tiny("compo", "generation.temperature=0.7"))
    rollout = iteration.rollout
    torch.testing.assert_close(
        rollout.rollout_logprobs.masked_fill(~rollout.mask, 0.0), rollout.logprobs.masked_fill(~rollout.mask, 0.0)
    )
    assert iteration.metrics["engine/logprob_gap_max"] < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("transport.gate.layers=[9]", r"layers \[9\] do not fit a model of 2 layers"),
        ("policy={use: pretrained, path: ./nowhere}", r"policy\.path: \./nowhere does not exist"),
    ],
)
def test_what_only_the_model_can_tell_is_said_before_anything_is_trained(change, message, tmp_path):
    with pytest.raises(RecipeError, match=message):
        start(tiny("compo", change), tmp_path, console=Console(file=io.StringIO()))
    assert not list((tmp_path / "compo").iterdir())  # no folder of a run that was none


def test_a_file_where_run_folders_should_be_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="file/grpo/001: cannot be written .Not a directory"):
        start(tiny("grpo"), tmp_path / "file", console=Console(file=io.StringIO()))


# --- continuations sampled from within responses ----------------------------------------------------
def branching(*sets):
    return tiny("grpo", "transport={use: vineppo, separator: ';', samples: 3}", "generation.max_new_tokens=12", *sets)


@pytest.mark.parametrize(
    "transport",
    [
        "{use: vineppo, separator: ';', samples: 2}",
        "{use: spo, samples: 2, threshold: 0.9, cuts: 4}",
        "{use: rhythm, layers: all, near: 1}",
        "{use: monte_carlo, baseline: false}",
    ],
)
def test_two_iterations_without_a_critic(transport, tmp_path):
    rewarded = "evidence=[{use: length, max_tokens: 8, buffer: 8}]"  # an untrained policy solves nothing
    folder = run(tiny("grpo", f"transport={transport}", rewarded), tmp_path)
    metrics = [m for m in RunFolder(folder).metrics if "train/reward" in m]
    assert len(metrics) == 2 and all(m["advantage/std"] > 0 for m in metrics)
    assert all(("branch/tokens" in m) == ("samples" in transport) == ("time/branch" in m) for m in metrics)


@pytest.mark.parametrize(
    "transport",
    [
        "{use: vtrace, lam: 0.9}",
        "{use: bi_level_gae}",
        "{use: abc}",
        "{use: spo, values: critic, cuts: 2}",
        "{use: comp_gae, gate: {use: product, parts: [attention, entropy, logprob, hidden_change, profile, turn]}}",
    ],
)
def test_two_iterations_with_a_critic(transport, tmp_path):
    folder = run(tiny("gae_tac", f"transport={transport}"), tmp_path)
    metrics = [m for m in RunFolder(folder).metrics if "train/reward" in m]
    assert metrics and all(m["advantage/std"] > 0 and "branch/tokens" not in m for m in metrics)


def test_values_of_branches_are_mean_returns_of_continuations():
    """Sampled anew by hand: the same seeds give the same continuations, and judged they give the same means."""
    recipe = branching("evidence=[{use: length, max_tokens: 8, buffer: 8}]")
    agent, tokenizer, _ = build(recipe)
    iteration = Held(recipe, agent, tokenizer).collect(1)
    rollout = iteration.rollout
    width, room = rollout.mask.shape[1], recipe.generation.max_new_tokens
    assert rollout.starts.any(1).all() and not (rollout.starts & ~rollout.mask).any()
    assert rollout.branch_values[~rollout.starts].eq(0).all()
    first = rollout.starts & (rollout.mask.cumsum(1) == 1)
    for group in rollout.groups.unique():  # a prompt's first state is sampled once for all its responses
        assert len(rollout.branch_values[rollout.groups == group][first[rollout.groups == group]].unique()) == 1
    prefixes, places = [], []
    for row in range(len(rollout.mask)):
        for t in rollout.starts[row].nonzero().flatten().tolist():
            ids = rollout.input_ids[row, : rollout.prompt_width + t]
            prefix = tuple(ids[rollout.attention_mask[row, : rollout.prompt_width + t].bool()].tolist())
            if prefix not in prefixes:
                prefixes.append(prefix)
            places.append((row, t, prefixes.index(prefix)))
    assert iteration.metrics["branch/prefixes"] == len(prefixes)
    assert iteration.metrics["branch/responses"] == 3 * len(prefixes)
    seed, engine = derive_seed(recipe.seed, "branch", 1), recipe.generation.open(agent.actor, tokenizer)
    for row, t, number in places:
        seeds = [derive_seed(seed, 3 * number + k) for k in range(3)]
        lengths = [t + len(c.tokens) for c in engine.generate([prefixes[number]] * 3, seeds, [room - t] * 3)]
        assert max(lengths) <= room and t < width
        scores = [-min(1.0, length / 8) for length in lengths]
        assert rollout.branch_values[row, t].item() == pytest.approx(sum(scores) / 3, abs=1e-5)


def test_continuations_do_not_depend_on_how_they_are_batched():
    values = []
    for batch in (256, 5):
        recipe = branching(f"generation.batch_size={batch}")
        agent, tokenizer, _ = build(recipe)
        values.append(Held(recipe, agent, tokenizer).collect(1).rollout.branch_values)
    assert torch.equal(*values)


def test_a_continuation_that_evidence_drops_does_not_count(plugin):
    sets, name = plugin
    recipe = branching(sets, f"evidence=[{{use: {name}_odd, on_error: drop}}]")
    agent, tokenizer, _ = build(recipe)
    iteration = Held(recipe, agent, tokenizer).collect(1)
    assert iteration.metrics[f"evidence/errors/{name}_odd"] > 0
    whole = iteration.rollout.branch_values[iteration.rollout.starts]
    assert whole.gt(0).all()  # every one that is kept has 0.5 a token from its place on
