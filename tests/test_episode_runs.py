"""Episodes through the sampler: what goes wrong has one outcome and a count, and an episode follows from its seed alone."""

from __future__ import annotations

import io
import shutil
import threading
from pathlib import Path

import odd_environments
import pytest
from chat_families import write_family
from held import Held
from rich.console import Console
from test_chat_templates import Asked, Quiz, Scripted, recipe_of
from test_training import RECIPES, assert_same_tensors, final_state, run, tiny

from cct.agent.building import build
from cct.errors import TrainingStopped
from cct.loading import load_recipe
from cct.policy.generation import Completion, Engine
from cct.policy.vllm import VLLM
from cct.rollout import Prompt, derive_seed
from cct.run_folder import RunFolder
from cct.training.episodes import Episodes, Past
from cct.training.processes import Ranks
from cct.training.run import resume
from cct.training.sampler import Sampler

GAME = RECIPES / "guess_number_grpo.yaml"
REFUSES = (
    "{% for m in messages %}{% if m.content == 'x' %}{{ raise_exception('x is not said here') }}{% endif %}"
    "<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("plain"), "smollm2")


@pytest.fixture(scope="module")
def refuses(tmp_path_factory):
    """A model whose template refuses the text x."""
    return write_family(tmp_path_factory.mktemp("refuses"), "smollm2", REFUSES)


def obedient(folder, turns, *sets, prompt="a", **knobs):
    """One episode of the environment that does what the policy says; what was sampled, and the counts."""
    environment = ", ".join(f"{name}: {value}" for name, value in {"use": "obedient", **knobs}.items())
    evidence = "evidence=[{use: environment, low: -1, high: 1}]"
    recipe = recipe_of(folder, f"environment={{{environment}}}", evidence, *sets)
    actor, tokenizer = recipe.policy.load(alphabet="", seed=0)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    said: list[str] = []
    sampler = Sampler(recipe, actor, tokenizer, Scripted(recipe, actor, tokenizer, turns, end), say=said.append)
    try:
        (one,) = sampler.respond([Prompt(prompt)], [3])
        return one, sampler.counts(), said
    finally:
        sampler.close()


# --- what goes wrong ------------------------------------------------------------------------------
WRONG = {
    "fail": "RuntimeError: the game crashed",
    "no observation": "but the episode is not over",
    "not a step": "expected a cct.environment.Step",
    "surrogate": "no UTF-8 text can",
    "nan": "the reward as nan",
}


@pytest.mark.parametrize("action", WRONG)
@pytest.mark.parametrize("on_error", ["fail", "end", "drop"])
def test_a_step_that_goes_wrong_stops_the_run_ends_the_episode_or_leaves_it_out(action, on_error, folder):
    turns = ["plus", action]
    if on_error == "fail":
        says = rf"environment 'obedient' failed: .*{WRONG[action]}.* in turn 2 \(prompt 'aseed"
        with pytest.raises(TrainingStopped, match=says):
            obedient(folder, turns, on_error=on_error)
        return
    one, counts, said = obedient(folder, turns, on_error=on_error)
    assert counts["environment/errors"] == 1 and WRONG[action] in said[0]
    assert one.keep is (on_error == "end") and one.response.finished
    assert [turn.rewards for turn in one.response.turns] == [{"": 0.75}, {}]


@pytest.mark.parametrize("on_error", ["fail", "end", "drop"])
def test_an_observation_that_the_template_refuses_is_a_step_that_went_wrong(on_error, refuses):
    if on_error == "fail":
        with pytest.raises(TrainingStopped, match="x is not said here.* in turn 1"):
            obedient(refuses, ["plus"], on_error=on_error)
        return
    one, counts, _ = obedient(refuses, ["plus"], on_error=on_error)
    assert counts["environment/errors"] == 1 and one.keep is (on_error == "end") and one.response.finished


@pytest.mark.parametrize("on_error", ["fail", "end", "drop"])
def test_a_step_that_hangs_is_a_timeout(on_error, folder):
    if on_error == "fail":
        with pytest.raises(TrainingStopped, match="'obedient' took longer than time_limit, 1 s, in turn 1"):
            obedient(folder, ["hang"], on_error=on_error, workers=1, time_limit=1)
        return
    one, counts, _ = obedient(folder, ["hang"], on_error=on_error, workers=1, time_limit=1)
    assert counts["environment/timeouts"] == 1 and one.keep is (on_error == "end")


@pytest.mark.parametrize("prompt", ["cannot open", "nothing", "over"])
@pytest.mark.parametrize("on_error", ["fail", "end", "drop"])
def test_an_episode_that_cannot_begin_has_no_turn_and_is_left_out(prompt, on_error, folder):
    """`over` ends before its first turn."""
    if on_error == "fail":
        with pytest.raises(TrainingStopped, match="environment 'obedient' failed: .* at its start"):
            obedient(folder, [], on_error=on_error, prompt=prompt)
        return
    one, counts, _ = obedient(folder, [], on_error=on_error, prompt=prompt)
    assert counts["environment/errors"] == 1 and not one.keep and one.response.tokens == () and not one.response.turns


def test_an_empty_observation_is_counted_and_the_episode_goes_on(folder):
    one, counts, said = obedient(folder, ["empty", "done"])
    assert counts["environment/empty"] == 1 and not said and len(one.response.turns) == 2
    assert one.response.turns[0].observation == "" and one.response.finished and one.keep


@pytest.mark.parametrize("room", ["environment", "model"])
def test_an_observation_that_leaves_no_room_is_not_read_and_cuts_the_episode(room, folder, tmp_path):
    knobs = {"max_tokens": 150} if room == "environment" else {}
    if room == "model":
        folder = write_family(tmp_path, "smollm2", max_position_embeddings=300)
    one, counts, _ = obedient(folder, ["plus", "long"], **knobs)
    (span,) = one.spans
    assert counts["environment/out_of_room"] == 1 and not one.response.finished and one.keep
    assert span.turns[-1] == 1 and len(one.response.turns) == 2 and one.response.turns[1].observation == ""
    assert len(span.prompt_tokens) + len(span.tokens) < 300


@pytest.mark.parametrize("overlong", ["fail", "drop"])
def test_an_opening_that_leaves_no_room_follows_overlong(overlong, folder, tmp_path):
    folder = write_family(tmp_path, "smollm2", max_position_embeddings=64)
    if overlong == "fail":
        with pytest.raises(TrainingStopped, match="leaves no room for an episode; set generation.overlong to drop"):
            obedient(folder, [])
        return
    one, counts, _ = obedient(folder, [], "generation.overlong=drop")
    assert counts["environment/overlong"] == 1 and not one.keep


def test_a_history_that_the_template_refuses_goes_on_as_it_was_sampled(tmp_path):
    """Here a turn of the policy that says x; the observation itself can be written."""
    folder = write_family(tmp_path, "smollm2", REFUSES.replace("== 'x'", "== 'empty'"))
    one, counts, _ = obedient(folder, ["empty", "empty", "done"])
    assert counts["environment/unwritten"] == 2 and "environment/errors" not in counts
    assert len(one.response.turns) == 3 and len(one.spans) == 1


def test_an_episode_cut_by_max_turns_is_closed_at_once(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(odd_environments.LOG, str(tmp_path / "log"))
    one, _, _ = obedient(folder, ["plus"], max_turns=1)
    assert not one.response.finished and (tmp_path / "log").read_text() == "a 1\n"


def test_episodes_that_failed_pass_through_the_loop(folder):
    """Some have no tokens at all; group baselines and updates know the others only."""
    sets = ["environment={use: flaky, on_error: drop}", "generation.max_new_tokens=3", "training.prompts_per_iteration=4"]
    recipe = recipe_of(folder, *sets, "training.responses_per_prompt=2", "training.minibatch_size=8")
    agent, tokenizer, _ = build(recipe)
    found = Held(recipe, agent, tokenizer).collect(1)
    failed = found.metrics["environment/errors"]
    assert 0 < failed < 8 and found.rollout.valid.sum() == 8 - failed and found.credit.advantages.isfinite().all()


@odd_environments.environments.register("flaky")
class Flaky(odd_environments.Environment):
    """Opens two episodes in three."""

    def open(self, prompt, seed):
        if seed % 3 == 0:
            raise OSError("no game left")
        return Asked(Quiz())


# --- what an episode follows from -----------------------------------------------------------------
class Alone(Ranks):
    """What one of three processes has to offer."""

    def gather(self, value):
        return [value]


def game(*sets):
    return tiny("guess_number_grpo", "generation.max_new_tokens=3", "generation.temperature=0.7", *sets)


def told(rows):
    return [(row.prompt_tokens, row.tokens, row.turns, row.rewards, row.response.turns, row.episode) for row in rows]


def test_an_episode_follows_from_its_seed_whatever_is_played_beside_it():
    recipe = game()
    agent, tokenizer, _ = build(recipe)
    sampler = Sampler(recipe, agent.actor, tokenizer)
    whole = sampler.sample(1).rows
    assert len({row.tokens for row in whole}) > 4 and max(len(row.response.turns) for row in whole) > 1
    small = Sampler(game("generation.batch_size=3"), agent.actor, tokenizer).sample(1).rows
    assert told(small) == told(whole)
    parts = [Sampler(recipe, agent.actor, tokenizer, ranks=Alone(rank, 3)).sample(1).rows for rank in range(3)]
    assert told([row for part in parts for row in part]) == told(whole)
    seed = derive_seed(recipe.seed, "sample", 1)
    for row in whole[3:8:2]:
        (one,) = sampler.respond([row.asked], [derive_seed(seed, row.episode)])
        assert one.response.tokens == row.response.tokens and one.response.turns == row.response.turns


def test_a_resumed_run_of_episodes_is_the_same_to_the_bit(tmp_path):
    whole = run(game("training.iterations=4", "training.checkpoint_every=2"), tmp_path)
    cut = Path(shutil.copytree(whole, tmp_path / "cut"))
    RunFolder(cut).checkpoints[-1].unlink()
    resume(cut, None, [], console=Console(file=io.StringIO()))
    assert_same_tensors(final_state(whole)["state_dict"], final_state(cut)["state_dict"])
    for key in ("train/reward", "policy/loss", "episode/turns"):
        one, other = ([e[key] for e in RunFolder(path).metrics if key in e] for path in (whole, cut))
        assert one == other and one


@pytest.mark.parametrize("what", ["game", "chat"])
def test_a_greedy_episode_goes_on_from_any_of_its_tokens_to_the_same_end(what, folder):
    recipe = game() if what == "game" else recipe_of(folder, "generation.max_new_tokens=4")
    agent, tokenizer, _ = build(recipe)
    sampler = Sampler(recipe, agent.actor, tokenizer)
    assert sampler.episodes is not None
    prompt = recipe.prompts(1, 1)[0]
    (one,) = sampler.episodes.play([prompt], None, [5])
    tokens = one.response.tokens
    assert len(one.response.turns) > 1
    past = [Past.of(one.response, count) for count in range(len(tokens) + 1)]
    again = sampler.episodes.play([prompt] * len(past), None, [5] * len(past), past)
    for other in again:
        assert other.spans == one.spans and other.response.tokens == tokens and other.response.turns == one.response.turns


def test_an_episode_sampled_anew_keeps_its_beginning():
    recipe = game()
    agent, tokenizer, _ = build(recipe)
    sampler = Sampler(recipe, agent.actor, tokenizer)
    row = max(sampler.sample(1).rows, key=lambda row: len(row.response.turns))
    tokens, turns = row.response.tokens, row.response.turns
    counts, anew = range(len(tokens)), list(range(100, 100 + len(tokens)))
    past = [Past.of(row.response, count) for count in counts]
    again = sampler.episodes.play([row.asked] * len(past), anew, [row.chance] * len(past), past)
    assert any(one.response.tokens != tokens for one in again)
    for count, one in zip(counts, again, strict=True):
        assert one.response.tokens[:count] == tokens[:count]
        whole = len(past[count].turns)
        assert [turn.rewards for turn in one.response.turns[:whole]] == [turn.rewards for turn in turns[:whole]]


def test_branches_of_episodes_have_values_of_their_continuations():
    recipe = game("transport={use: vineppo, separator: '1', samples: 2}")
    agent, tokenizer, _ = build(recipe)
    found = Held(recipe, agent, tokenizer).collect(1)
    assert found.rollout.starts.any() and found.rollout.branch_values[~found.rollout.starts].eq(0).all()
    assert found.metrics["branch/responses"] == 2 * found.metrics["branch/prefixes"] > 0
    assert found.rollout.branch_values.ge(0).all() and found.rollout.branch_values.le(1).all()


def test_fidelity_branches_from_within_turns(tmp_path):
    """Of a run with an environment; a token at which an episode ends is worth what is left of its reward."""
    from cct.tools.fidelity.measure import measure

    folder = run(game("training.iterations=1"), tmp_path)
    found = measure(folder, batches=1, positions=6, below=1.0, continuations=8)
    assert found.tokens > 0


def test_processes_that_share_an_engine_take_as_many_turns():
    """One whose episodes end early asks for nothing until the others' are over, or they would wait for it for ever."""

    class Pair(Ranks):
        def gather(self, value):
            slots[self.rank] = value
            barrier.wait(10)
            found = list(slots)
            barrier.wait(10)
            return found

    class Counting(Engine):
        calls = 0

        def generate(self, prompts, seeds, limits=None):
            self.calls += 1
            return [Completion((tokenizer.convert_tokens_to_ids("1"), self.ends[0]), True, (0.0, 0.0)) for _ in prompts]

    slots, barrier = [None, None], threading.Barrier(2)
    base = game("environment.max_turns=3")
    agent, tokenizer, _ = build(base)
    shared = VLLM(max_new_tokens=3, tensor_parallel=2)
    recipe = base.model_copy(update={"generation": shared})
    engines = [Counting(shared, agent.actor, tokenizer) for _ in range(2)]
    prompts = [[], [Prompt("", meta={"seed": seed}) for seed in range(6)]]
    played = [None, None]

    def play(rank):
        episodes = Episodes(recipe, recipe.environment, agent.actor, tokenizer, lambda: engines[rank], lambda: Pair(rank, 2))
        played[rank] = episodes.play(prompts[rank], range(len(prompts[rank])), range(len(prompts[rank])))

    threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert played[0] == [] and len(played[1]) == 6 and engines[0].calls == engines[1].calls == 3


# --- before a run ---------------------------------------------------------------------------------
def test_plan_check_and_explain_of_episodes_whose_prompts_are_empty(capsys):
    from cct.cli import main
    from cct.tools.plan import plan

    found = plan(load_recipe(GAME, []))
    assert found.prompt == 1 and found.width == 4 * 3 and any("4 turns of 3 tokens" in note for note in found.notes)
    bounded = load_recipe(GAME, ["environment.max_tokens=40"])
    assert plan(bounded).width == 40
    assert main(["check", "--deep", str(GAME)]) == 0
    assert "64 episodes begun, 1 to 1 tokens" in capsys.readouterr().out
    assert main(["explain", str(GAME)]) == 0


def test_an_environment_that_cannot_begin_is_said_before_the_run(capsys):
    from cct.cli import main

    assert main(["check", str(GAME), "--set", "task={use: chain_arithmetic}"]) == 2
    assert "cannot begin an episode" in capsys.readouterr().err
