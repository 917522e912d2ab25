"""Stored rollouts, and the credit that other transports make of them."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import fields

import pytest
import torch
from conftest import make_mask, make_rollout
from conversations import conversations
from rich.console import Console
from test_training import collected, run, tiny

from cct.cli import main
from cct.recipe import Logging, RecipeError
from cct.run_folder import RunFolder
from cct.tools.replay import Sums, compare, parts_of_episodes
from cct.tools.tokens import save_tokens
from cct.training.run import resume


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two iterations of CompPO and one of critic warm-up."""
    return run(tiny(), tmp_path_factory.mktemp("runs"))


# --- storing --------------------------------------------------------------------------------------
def test_a_run_stores_what_its_transport_saw(finished):
    recipe = tiny()
    assert list(RunFolder(finished).rollouts) == [0, 1, 2]
    _, iteration = collected(recipe.model_copy(update={"training": recipe.training.model_copy(update={"critic_warmup": 0})}))
    assert RunFolder(finished).rollout(1).input_ids.dtype == iteration.rollout.input_ids.dtype
    for number in RunFolder(finished).rollouts:
        rollout = RunFolder(finished).rollout(number)
        credit = recipe.transport(rollout)
        assert credit.advantages.shape == rollout.mask.shape and credit.advantages[rollout.mask].isfinite().all()
    assert RunFolder(finished).rollout(2).moments.keys() == recipe.transport.statistics.keys()


def test_a_rollout_comes_back_whole(tmp_path):
    rollout = make_rollout(
        statistics=["a/b", "entropy"],
        rollout_logprobs=torch.rand(6, 9),
        moments={"a/b": (0.5, 0.25)},
        seed=7,
        episodes=torch.tensor([0, 0, 1, 2, 2, 2]),
        order=torch.tensor([1, 0, 0, 0, 1, 2]),
        turns=torch.randint(-1, 3, (6, 9)),
        versions=torch.randint(-1, 9, (6, 9)),
        components={"exact_match": torch.rand(6, 9), "environment/hint": torch.rand(6, 9)},
    )
    RunFolder(tmp_path).store(rollout, -1, Logging())
    back = RunFolder(tmp_path).rollout(-1)
    for field in fields(rollout):
        before, after = getattr(rollout, field.name), getattr(back, field.name)
        if isinstance(before, torch.Tensor):
            assert torch.equal(before, after) and before.dtype == after.dtype, field.name
        elif field.name in ("stats", "components"):
            assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        else:
            assert before == after, field.name


def test_without_a_critic_nothing_is_made_up(tmp_path):
    RunFolder(tmp_path).store(make_rollout(values=None, bootstrap=None), 1, Logging())
    assert RunFolder(tmp_path).rollout(1).values is None and RunFolder(tmp_path).rollout(1).bootstrap is None


def test_never_always_and_the_limit(tmp_path):
    rollout = make_rollout()
    kilobyte = {"rollouts_mb": 0.005}
    for number in (1, 2, 3, 4):
        RunFolder(tmp_path / "never").store(rollout, number, Logging(rollouts="never"))
        RunFolder(tmp_path).store(rollout, number, Logging(**kilobyte))
    assert not (tmp_path / "never").exists()
    kept = list(RunFolder(tmp_path).rollouts)
    assert kept == list(range(1, len(kept) + 1)) and 1 <= len(kept) < 4
    assert sum(path.stat().st_size for path in RunFolder(tmp_path).rollouts.values()) <= 7000
    RunFolder(tmp_path).store(rollout, 5, Logging(**kilobyte).model_copy(update={"rollouts": "always"}))
    assert list(RunFolder(tmp_path).rollouts) == [*kept, 5]
    RunFolder(tmp_path).drop_after(kept[-1])  # what was left out is made again, and may be kept under another limit
    RunFolder(tmp_path).store(rollout, kept[-1] + 1, Logging())
    assert list(RunFolder(tmp_path).rollouts) == [*kept, kept[-1] + 1]


def test_resuming_drops_rollouts_after_the_checkpoint_and_makes_the_same_again(finished, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    resume(folder, None, ["training.iterations=3"], console=Console(file=io.StringIO()))
    before = RunFolder(folder).rollout(3)
    (folder / "checkpoints" / "000003.ckpt").unlink()  # as if it had ended before
    resume(folder, None, [], console=Console(file=io.StringIO()))
    assert list(RunFolder(folder).rollouts) == [0, 1, 2, 3]
    again = RunFolder(folder).rollout(3)
    assert torch.equal(again.input_ids, before.input_ids) and torch.equal(again.values, before.values)


def test_a_file_that_is_none_is_said(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "1.safetensors").write_text("no")
    with pytest.raises(RecipeError, match="cannot be read"):
        RunFolder(tmp_path).rollout(1)


# --- comparing ------------------------------------------------------------------------------------
def test_sums_by_hand():
    mask = make_mask("11111", "10000")
    own, other = torch.zeros(2, 5), torch.zeros(2, 5)
    own[0], own[1, 0] = torch.tensor([1.0, 2, -1, 0, 1]), 3.0
    other[0], other[1, 0] = torch.tensor([2.0, 4, -2, 0, -2]), 6.0
    other[1, 1:] = float("nan")  # never read
    sums = Sums()
    sums.add(own[:1], other[:1], mask[:1])  # in two iterations
    sums.add(own[1:], other[1:], mask[1:])
    assert sums.tokens == 6 and sums.same_sign == 5 and sums.size == 16
    assert sums.parts.tolist() == [8, 4, 2, 0, 2]
    expected = torch.corrcoef(torch.stack([own[mask], other[mask]]))[0, 1]
    assert sums.correlation == pytest.approx(float(expected))


def test_the_run_s_own_transport_is_first_and_equals_itself(finished):
    iterations, sums = compare(finished, ["grpo", "{use: gae, lam: 0.5}"])
    assert iterations == [0, 1, 2] and list(sums) == ["comp_gae (the run's own)", "grpo", "{use: gae, lam: 0.5}"]
    own, grpo, gae = sums.values()
    assert own.correlation == pytest.approx(1) and own.same_sign == own.tokens == grpo.tokens
    assert gae.correlation is not None and -1 <= gae.correlation < 0.9999
    assert own.size == pytest.approx(float(own.parts.sum()))


def test_what_does_not_vary_has_no_correlation():
    sums = Sums()
    sums.add(torch.rand(2, 3), torch.full((2, 3), 0.1), make_mask("111", "111"))
    assert sums.correlation is None


@pytest.mark.parametrize(
    ("transport", "says"),
    [
        ("gea", "did you mean 'gae'"),
        ("{use: gae, lam: 2}", "less than or equal to 1"),
        ("{use: gae", "not YAML"),
        (
            "{use: comp_gae, gate: {use: attention, layers: all}}",
            "statistic concentration/shannon/all/0 .*did not measure; stored are: concentration/shannon/last_half/0, entropy",
        ),
    ],
)
def test_what_cannot_be_replayed_is_said(finished, transport, says):
    with pytest.raises(RecipeError, match=says):
        compare(finished, [transport])


def test_a_run_without_critic_has_no_values_to_replay(tmp_path):
    folder = run(tiny("grpo"), tmp_path)
    assert next(iter(compare(folder, [])[1].values())).tokens > 0
    with pytest.raises(RecipeError, match="the run had no critic"):
        compare(folder, ["gae"])
    shutil.rmtree(folder / "rollouts")
    with pytest.raises(RecipeError, match=r"no rollouts were stored.*logging\.rollouts=always"):
        compare(folder, [])


def test_the_command_prints_a_table_and_takes_a_plugin(finished, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from cct.rollout import Credit\nfrom cct.transport import Transport, transports\n\n"
        '@transports.register("replay_mine")\nclass Mine(Transport):\n    """Minus the outcome."""\n'
        "    def __call__(self, rollout):\n        return Credit(-rollout.scores.unsqueeze(1) * rollout.mask)\n"
    )
    assert main(["replay", str(finished), "--transport", "replay_mine", "--plugin", str(tmp_path / "mine.py")]) == 0
    printed = capsys.readouterr().out
    assert "3 stored iterations (0 to 2)" in printed and "replay_mine" in printed and "80-100%" in printed
    assert main(["replay", str(tmp_path)]) == 2 and "not a run folder" in capsys.readouterr().err


# --- episodes -------------------------------------------------------------------------------------
def test_an_episode_counts_once_and_its_turns_are_the_parts(tmp_path, capsys):
    folder = conversations(tmp_path / "run").path
    iterations, sums = compare(folder, ["turn_return"])
    own, other = sums.values()
    # RLOO of 1.25 and 0: 1.25 at the four tokens of one episode, -1.25 at those of the other.
    assert iterations == [1] and (own.responses, own.tokens, own.size) == (2, 8, 10)
    assert own.parts.tolist() == [5, 5, 0, 0, 0]
    # The return from turn 2 on less that of the other episode: 1 - 0, and 0 - 1.25.
    assert other.parts.tolist() == [5, 4.5, 0, 0, 0] and own.correlation == pytest.approx(1)
    assert main(["replay", str(folder), "--transport", "turn_return", "--save"]) == 0
    printed = capsys.readouterr().out
    assert "8 trainable tokens in 2 episodes" in " ".join(printed.split())
    assert "turn 4" in printed and "0-20%" not in printed and "share of |A| in each turn" in " ".join(printed.split())
    assert f"wrote {folder / 'tokens.json'}" in printed


def test_long_episodes_are_looked_at_by_fifths_of_their_turns():
    turns = torch.tensor([[0, 0, -1, 1, 2, 3], [0, 1, -1, -1, -1, -1], [-1] * 6])
    assert parts_of_episodes(turns, 4)[0].tolist() == [0, 0, -1, 1, 2, 3]
    by_fifths = parts_of_episodes(turns, 30)
    assert by_fifths[0][turns[0] >= 0].tolist() == [0, 0, 1, 2, 3] and by_fifths[1, :2].tolist() == [0, 2]


def test_tokens_of_an_episode_have_their_turns_and_forks(tmp_path):
    path = save_tokens(conversations(tmp_path / "run").path, [])
    high, low = json.loads(path.read_text())["responses"]
    assert (high["prompt"], high["reward"], high["finished"]) == ("?", 1.25, True)
    assert high["tokens"] == ["8", "<end>", "2", "<end>"] and high["turn"] == [0, 0, 1, 1] and all(high["trained"])
    assert high["turns"] == [{"reward": 0.25, "rewards": {"hint": 0.25}}, {"reward": 1.0, "rewards": {"hint": 0.0}}]
    assert high["forks"] == [{"token": 2, "read_again": 3, "text": ">"}]  # `?8` is as it was, the end of the turn is not
    assert high["credit"]["rloo (the run's own)"]["advantage"] == [1.25] * 4
    assert low["tokens"] == ["3", "<end>", "<", "4", "<end>"] and low["turn"] == [0, 0, -1, 1, 1] and low["forks"] == []
    assert low["trained"] == [True, True, False, True, True] and low["finished"] is False
    assert low["credit"]["rloo (the run's own)"]["advantage"] == [-1.25, -1.25, 0, -1.25, -1.25]


def test_a_run_with_an_environment_is_replayed(tmp_path):
    folder = run(tiny("guess_number_turn_gae"), tmp_path)
    _, sums = compare(folder, ["gae", "grpo"])
    assert all(one.responses == 48 and one.tokens > 48 for one in sums.values())  # one iteration of warm-up, and two
    responses = json.loads(save_tokens(folder, ["gae"]).read_text())["responses"]
    for one in responses:
        assert len(one["turn"]) == len(one["tokens"]) == len(one["value"]) and max(one["turn"]) + 1 == len(one["turns"])
        assert [turn >= 0 for turn in one["turn"]] == one["trained"]
        assert sum(turn["reward"] for turn in one["turns"]) == pytest.approx(one["reward"])
        assert one["credit"]["gae"]["delta"] is not None
