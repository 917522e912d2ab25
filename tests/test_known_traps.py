"""What users of public frameworks suffered from, one behaviour a test, in the order of the numbers' way through a run.

Each is small on purpose; where a subject has a file of its own, the cases at its edges are there.
"""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from conftest import make_mask, make_rollout
from held import Held
from pydantic import ValidationError
from rich.console import Console
from test_recipe import NO_CRITIC, RECIPES, over, the_problem, write
from test_training import TINY, collected, final_state, run, scattered, tiny
from torch.testing import assert_close

from cct.agent.agent import Agent
from cct.agent.building import build
from cct.errors import TrainingStopped
from cct.evidence import Evidence, Verdict
from cct.geometry import aggregation_weights, geometries
from cct.loading import load_recipe
from cct.recipe import Recipe, RecipeError
from cct.rollout import Prompt, Response
from cct.training.callbacks import samples_of
from cct.training.judge import judge
from cct.training.minibatches import CriticBatch, PolicyBatch
from cct.training.run import resume
from cct.transport import explained_variance, gated_gae, group_advantage, transports, whiten

NAN, INF = float("nan"), float("inf")


@dataclass
class Sampled:
    """The first iteration of a small run whose responses differ in score and length, and were drawn at temperature 0.7."""

    recipe: Recipe
    agent: Agent
    iteration: SimpleNamespace

    def minibatches(self, of: str) -> list[PolicyBatch] | list[CriticBatch]:
        return [batch for batch in self.iteration.updates if isinstance(batch, PolicyBatch) == (of == "policy")]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory) -> Sampled:
    sets = ("generation.temperature=0.7", "training.micro_batch_size=2", "transport={use: gae, lam: 0.9}")
    recipe = scattered(tmp_path_factory.mktemp("sampled"), "gae", *sets)
    agent, tokenizer, _ = build(recipe)
    with torch.no_grad():
        for parameter in agent.critic.parameters():  # which else says the same of every state
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    iteration = Held(recipe, agent, tokenizer).collect(1)
    assert iteration.rollout.scores.unique().numel() > 4 and not iteration.rollout.mask.all()
    return Sampled(recipe, agent, iteration)


# --- masks ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("noise", [NAN, INF, -7.0])
@pytest.mark.parametrize(
    "name", ["gae", "comp_gae", "vtrace", "retrace", "grpo", "gtpo", "reinforce_pp", "remax", "bi_level_gae"]
)
def test_what_stands_at_masked_positions_reaches_no_valid_advantage(name, noise):
    transport = transports[name]()
    rollout = make_rollout(4, 12, statistics=[*transport.statistics, "entropy"])

    def spoilt(x):
        return x.masked_fill(~rollout.mask, noise)

    noisy = rollout.replace(
        stats={name: spoilt(x) for name, x in rollout.stats.items()},
        **{name: spoilt(getattr(rollout, name)) for name in ("rewards", "values", "logprobs", "rollout_logprobs")},
    )
    assert torch.equal(transport(noisy).advantages, transport(rollout).advantages)


def test_gae_does_not_step_through_tool_tokens():
    """A response with a tool's output in it has the advantages of the response without."""
    mask, rewards, values = make_mask("110011"), torch.zeros(1, 6), torch.tensor([[0.5, 0.4, 9.0, 9.0, 0.3, 0.2]])
    rewards[0, 5] = 1.0
    with_output = gated_gae(rewards, values, mask, gamma=0.9, lam=0.8)[0]
    assert_close(with_output[mask], torch.tensor([0.0028, 0.1983, 0.4560, 0.8000]), atol=5e-5, rtol=0)
    without = gated_gae(rewards[mask][None], values[mask][None], mask[:, [0, 1, 4, 5]], gamma=0.9, lam=0.8)[0]
    assert torch.equal(with_output[mask], without[0])


def test_a_score_stands_at_the_last_emitted_token_however_the_response_ended(sampled):
    rollout = sampled.iteration.rollout
    last = rollout.mask.sum(1, keepdim=True) - 1
    assert bool(rollout.truncated.any()) and bool((last[:, 0] < rollout.mask.shape[1] - 1).any())
    assert torch.equal(rollout.rewards.gather(1, last).squeeze(1), rollout.scores)
    assert torch.equal(rollout.rewards.sum(1), rollout.scores)  # so nothing is left in the padding


# --- whitening ------------------------------------------------------------------------------------
def test_whitening_does_not_count_padding():
    x, mask = torch.tensor([[1.0, 3.0, 0.0, 0.0], [5.0, 7.0, 9.0, 0.0]]), make_mask("1100", "1110")
    assert_close(whiten(x, mask)[mask], whiten(x[mask][None], torch.ones(1, 5, dtype=torch.bool))[0])


def test_whitening_is_over_the_whole_iteration_and_not_over_the_part_that_a_forward_or_a_process_sees(sampled):
    rollout, parts = sampled.iteration.rollout, sampled.minibatches("policy")
    seen = torch.cat([part.advantages[part.mask] for part in parts])
    assert len(parts) == 8 and len(seen) == int(rollout.mask.sum())
    assert abs(seen.mean()) < 1e-5 and seen.std(correction=0) == pytest.approx(1, abs=1e-4)
    assert all(abs(part.advantages[part.mask].mean()) > 1e-3 for part in parts)


def test_whitening_one_token_gives_nothing_and_no_nan():
    assert whiten(torch.tensor([[3.0, 8.0]]), make_mask("10")).tolist() == [[0.0, 0.0]]


def test_rounding_is_no_deviation():
    """Scores that are equal but for the order they were summed in are equal: noise over itself would be an advantage of 1."""
    scores = torch.tensor([0.1 + 0.2, 0.3, 0.6 - 0.3, 0.3], dtype=torch.float64)
    assert scores.std() > 0
    assert group_advantage(scores, torch.zeros(4), eps=1e-12).eq(0).all()
    assert whiten(scores[None], torch.ones(1, 4, dtype=torch.bool), eps=1e-30).eq(0).all()


def test_a_response_alone_in_its_group_gets_nothing_unless_its_raw_score_is_asked_for_by_name(tmp_path):
    scores, groups = torch.tensor([1.0, 0.0, 0.7]), torch.tensor([0, 0, 1])
    assert group_advantage(scores, groups, scale="none").tolist() == [0.5, -0.5, 0.0]
    assert_close(group_advantage(scores, groups, scale="none", single="raw"), torch.tensor([0.5, -0.5, 0.7]))
    assert transports["grpo"]().single == "zero" and transports["grpo"](like="verl").single == "raw"
    alone = "training: {responses_per_prompt: 1, minibatch_size: 16}"
    assert "set training.responses_per_prompt to 2 or more" in the_problem(over(tmp_path, alone, NO_CRITIC))


# --- the loss -------------------------------------------------------------------------------------
@pytest.mark.parametrize("noise", [NAN, INF, -INF])
@pytest.mark.parametrize("name", geometries.names())
def test_a_masked_log_probability_makes_no_nan_of_loss_or_gradient(name, noise):
    rollout = make_rollout(4, 6)
    logprobs, others = rollout.logprobs.masked_fill(~rollout.mask, noise), [rollout.rollout_logprobs, rollout.values]
    others = [x.masked_fill(~rollout.mask, noise) for x in others]
    logprobs.requires_grad_()
    loss, _ = geometries[name](kl_coef=0.1)(logprobs, *others, rollout.mask, rollout.reference_logprobs)
    (loss * aggregation_weights(rollout.mask)).sum().backward()
    assert loss[~rollout.mask].eq(0).all() and logprobs.grad[~rollout.mask].eq(0).all()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all()


def test_token_level_advantages_are_not_averaged_away_by_a_sequence_level_loss(tmp_path):
    for name in ("gspo", "gmpo"):
        assert "would erase the credit" in the_problem(over(tmp_path, f"geometry: {name}"))
    assert load_recipe(over(tmp_path, "geometry: gspo_token"))


def test_the_kl_stands_in_the_reward_or_in_the_loss_and_not_in_both(tmp_path):
    found = the_problem(over(tmp_path, "geometry: {kl_coef: 0.1, kl_in_reward: 0.1}", NO_CRITIC))
    assert "would count twice" in found


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum_over_constant"])
def test_the_loss_does_not_depend_on_the_split_into_micro_batches(aggregation):
    sets = ("training.micro_batch_size=%s", f"geometry.aggregation={aggregation}", "training.minibatch_size=16")
    gradients = []
    for size in (1, 16):
        agent, iteration = collected(tiny("grpo", *(part % size if "%" in part else part for part in sets)))
        for batch in iteration.updates:
            logprobs = agent(batch.input_ids, batch.attention_mask, batch.mask.shape[1]).logprobs
            (batch.loss_weights * logprobs * batch.mask).sum().backward()  # the same loss whatever the scores
        gradients.append(torch.cat([p.grad.flatten() for p in agent.actor.parameters()]))
    assert gradients[0].norm() > 0
    assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


# --- trainer and engine ---------------------------------------------------------------------------
def test_the_trainer_s_log_probabilities_are_at_the_temperature_of_sampling(sampled):
    rollout = sampled.iteration.rollout
    assert_close(rollout.logprobs[rollout.mask], rollout.rollout_logprobs[rollout.mask], rtol=0, atol=1e-5)


def test_top_p_and_top_k_which_the_trainer_does_not_know_need_a_correction(tmp_path):
    for knob in ("top_p: 0.9", "top_k: 5"):
        assert "leaves tokens out" in the_problem(over(tmp_path, f"generation: {{{knob}}}"))
        assert load_recipe(over(tmp_path, f"generation: {{{knob}}}\ngeometry: {{correction: truncate}}"))


def test_before_any_update_every_ratio_is_1_and_nothing_is_clipped(sampled):
    for batch in sampled.minibatches("policy"):
        logprobs = sampled.agent(batch.input_ids, batch.attention_mask, batch.mask.shape[1]).logprobs
        _, metrics = sampled.recipe.geometry(logprobs, batch.logprobs, batch.advantages, batch.mask, None)
        assert_close(metrics["ratio"], torch.ones_like(logprobs), rtol=0, atol=1e-5)
        assert metrics["clip_fraction"].sum() == 0


@pytest.mark.parametrize("on_a_copy", [False, True])
def test_after_a_sync_the_engine_samples_from_the_new_weights(on_a_copy):
    """On the weights being trained, and on a copy, as of split ones. test_vllm holds vLLM to it, and to stop where stale."""
    recipe = tiny("grpo")
    agent, tokenizer, _ = build(recipe)
    collector = Held(recipe, agent, tokenizer)
    if on_a_copy:
        collector.sampler.engine.model = copy.deepcopy(agent.actor)
    before = collector.collect(1).rollout
    with torch.no_grad():
        for parameter in agent.actor.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    collector.sampler.sync()
    after = collector.collect(1).rollout  # the same prompts and seeds
    assert not torch.equal(after.input_ids, before.input_ids)
    assert_close(after.logprobs[after.mask], after.rollout_logprobs[after.mask], rtol=0, atol=1e-5)


def test_the_seed_reaches_the_sampler(tmp_path):
    """One prompt, so that seeds differ in nothing but what is sampled for it."""
    train, held_out = (
        ('{"prompt": "3+4=", "answer": "7"}', "train.jsonl"),
        ('{"prompt": "1+1=", "answer": "2"}', "held_out.jsonl"),
    )
    files = "path: {}, held_out_path: {}".format(*(write(tmp_path, *file) for file in (train, held_out)))
    path = write(tmp_path, f"base: {RECIPES}/grpo.yaml\ntask: {{use: jsonl, {files}}}\n")
    recipe = load_recipe(path, [part for part in TINY if not part.startswith("task.")])
    agent, tokenizer, _ = build(recipe)

    def sample(seed: int) -> list[list[int]]:
        """Prompts with their responses, in an order that does not depend on how rows are shuffled."""
        collector = Held(recipe.model_copy(update={"seed": seed}), agent, tokenizer)
        return sorted(collector.collect(1).rollout.input_ids.tolist())

    one, again, other = sample(5), sample(5), sample(6)
    assert one == again != other and len({tuple(row[:4]) for row in one + other}) == 1  # of one prompt all


# --- recipes --------------------------------------------------------------------------------------
def test_no_key_is_accepted_and_never_read(tmp_path):
    assert "did you mean 'gamma'" in the_problem(over(tmp_path, "transport: {use: gae, gama: 0.9}"))
    assert "nothing would read it" in the_problem(over(tmp_path, "critic: {use: tac, bins: 11}"))
    with pytest.raises(ValidationError, match="nothing would read it"):
        transports["spo"](values="critic", samples=8)


def test_plug_ins_are_loaded_before_the_recipe_is_judged(tmp_path):
    write(tmp_path, NO_CRITIC, "small.yaml")
    write(
        tmp_path,
        "import cct.transport as ct\n\n"
        "@ct.transports.register('loaded_first')\n"
        "class LoadedFirst(ct.Transport):\n    '''One.'''\n    knob: float = 1.0\n",
        "mine.py",
    )
    text = "base: small.yaml\ntransport: {use: loaded_first, knob: 2}\nplugins: [./mine.py]\n"
    assert load_recipe(write(tmp_path, text)).transport.knob == 2


# --- resuming -------------------------------------------------------------------------------------
def test_a_resumed_run_keeps_adam_s_moments_and_the_critic_and_does_not_end_well_without_a_step(tmp_path):
    whole = run(tiny("gae", "training.iterations=1"), tmp_path)
    with pytest.raises(RecipeError, match="complete, all 1 iterations are done"):
        resume(whole, None, [], console=Console(file=io.StringIO()))
    before = final_state(whole)
    still = ["training.iterations=2", "training.learning_rate=1.0e-30", "training.critic_learning_rate=1.0e-30"]
    resume(whole, None, still, console=Console(file=io.StringIO()))
    after = final_state(whole)
    assert sum(name.startswith("agent.critic.") for name in before["state_dict"]) > 10
    # At such rates, which a resume takes from its recipe and not from the checkpoint, nothing moves.
    assert all(torch.equal(before["state_dict"][name], after["state_dict"][name]) for name in before["state_dict"])
    for one, other in zip(*(x["optimizer_states"][0]["state"].values() for x in (before, after)), strict=True):
        assert other["step"] > one["step"] > 0  # a fresh AdamW would count from 0 on


# --- evidence and logs ----------------------------------------------------------------------------
class Raises(Evidence):
    """A reward function with a bug that some responses meet."""

    def __call__(self, prompt: Prompt, response: Response) -> Verdict:
        return {"good": 1.0}[response.text]


def test_a_reward_function_s_exception_ends_the_run_only_where_the_recipe_says_so():
    where = ([Prompt("p")] * 2, [Response("good", (5, 6), True), Response("odd", (7,), True)])
    assert judge([Raises(on_error="zero")], *where)[:2] == ([[0.0, 1.0], [0.0]], [True, True])
    _, keep, counts = judge([Raises(on_error="drop")], *where)
    assert keep == [True, False] and list(counts.values()) == [1]
    with pytest.raises(TrainingStopped, match="KeyError.*judging 'odd'.*would continue"):
        judge([Raises()], *where)


def test_logged_advantages_are_those_trained_on(sampled):
    seen = torch.cat([batch.advantages[batch.mask] for batch in sampled.minibatches("policy")])
    metrics, samples = sampled.iteration.metrics, samples_of(sampled.iteration, 8)
    assert metrics["advantage/mean"] == pytest.approx(float(seen.mean()), abs=1e-6)
    assert metrics["advantage/std"] == pytest.approx(float(seen.std(correction=0)), rel=1e-5)
    trained = {}
    tokenizer = sampled.recipe.policy.tokenizer(alphabet=sampled.recipe.task.alphabet)
    for batch in sampled.minibatches("policy"):
        for ids, mask, advantages in zip(batch.input_ids, batch.mask, batch.advantages, strict=True):
            texts = (ids[: -len(mask)], ids[-len(mask) :][mask])  # a micro-batch is as wide as its longest response
            trained[tuple(tokenizer.decode(x, skip_special_tokens=True) for x in texts)] = float(advantages[mask].mean())
    assert len(samples) == 8
    for sample in samples:
        assert sample["advantage"] == pytest.approx(trained[sample["prompt"], sample["response"]], abs=1e-5)


def test_explained_variance_is_against_the_monte_carlo_return_and_not_what_the_critic_bootstraps_itself(sampled):
    rollout = sampled.iteration.rollout
    returns = rollout.rewards.flip(1).cumsum(1).flip(1)
    logged = sampled.iteration.metrics["critic/explained_variance"]
    assert logged == pytest.approx(explained_variance(rollout.values, returns, rollout.mask), abs=1e-5) and abs(logged) > 1e-3
    # A critic that says anything at all explains its own one-step target, and none of the return.
    random = make_rollout(64, 40, mask=torch.ones(64, 40, dtype=torch.bool))
    rewards = torch.zeros(64, 40)
    rewards[:, -1] = torch.randint(0, 2, (64,), generator=torch.Generator().manual_seed(0)).float()
    values = random.values.cumsum(1) / 10
    own = gated_gae(rewards, values, random.mask, gamma=1.0, lam=0.0, lam_value=0.0)[1]
    whole = gated_gae(rewards, values, random.mask, gamma=1.0, lam=1.0)[1]
    assert explained_variance(values, own, random.mask) > 0.5 > 0 > explained_variance(values, whole, random.mask)
