"""Environments: what they answer, many played at once, and what becomes of one that misbehaves."""

from __future__ import annotations

import random
import statistics

import pytest

from cct.environment import Action, Start
from cct.environment.guess_number import GuessNumber, best_value, hidden_number, value_of
from cct.rollout import Prompt
from cct.task.seeds import Seeds


def say(text: str, finished: bool = True) -> Action:
    return Action(text, text, finished)


def play(episode, *texts):
    """The start, and a step for each text."""
    return [episode.reset(), *(episode.step(say(text)) for text in texts)]


# --- seeds ----------------------------------------------------------------------------------------
def test_seeds_are_prompts_without_text_and_held_out_ones_are_never_trained_on():
    task = Seeds(held_out_size=30)
    held_out = {prompt.meta["seed"] for prompt in task.held_out()}
    stream = [prompt.meta["seed"] for prompt in task.prompts(0, 0, 2000)]
    assert len(held_out) == 30 and not held_out & set(stream) and len(set(stream)) == 2000
    assert all(prompt.text == "" and not prompt.messages for prompt in task.held_out() + task.prompts(0, 0, 5))


def test_seeds_are_a_stream_by_seed_and_position():
    task = Seeds()
    assert task.prompts(3, 5, 4) == task.prompts(3, 0, 9)[5:] and task.prompts(3, 0, 9) != task.prompts(4, 0, 9)


# --- guess_number ---------------------------------------------------------------------------------
def seeded(hidden: int, numbers: int = 15) -> Prompt:
    """A prompt whose number is this one."""
    prompts = (Prompt("", meta={"seed": seed}) for seed in range(10_000))
    return next(prompt for prompt in prompts if hidden_number(prompt, numbers) == hidden)


def test_guess_number_hints_and_rewards_the_find():
    start, first, second, third = play(GuessNumber().open(seeded(6), 0), "8", "4", " 6\n")
    assert start == Start("?", "1-15/4")
    assert (first.observation, first.state, first.reward, first.done) == ("<", "1-7/3", 0.0, False)
    assert (second.observation, second.state) == (">", "5-7/2")
    assert third.done and third.reward == 1.0 and third.observation is None


@pytest.mark.parametrize("text", ["", "0", "16", "-3", "3.0", "8 9", "eight", "9" * 40, "٣"])
def test_what_is_no_number_in_range_costs_a_turn(text):
    _, step, last = play(GuessNumber(max_turns=2).open(seeded(6), 0), text, text)
    assert (step.observation, step.state, step.reward, step.done) == ("x", "1-15/1", 0.0, False)
    assert last.done and last.reward == 0.0 and not last.truncated


def test_a_hint_that_was_known_leaves_the_interval_as_it_is():
    steps = play(GuessNumber().open(seeded(6), 0), "8", "12")
    assert steps[2].observation == "<" and steps[2].state == "1-7/2"


def test_every_episode_of_a_prompt_hides_the_same_number_and_numbers_are_uniform():
    game = GuessNumber()
    assert play(game.open(seeded(3), 1), "8", "2") == play(game.open(seeded(3), 2), "8", "2")
    drawn = [hidden_number(Prompt("", meta={"seed": seed}), 15) for seed in range(3000)]
    assert {*drawn} == {*range(1, 16)} and min(map(drawn.count, range(1, 16))) > 140


def test_guess_number_needs_a_seed():
    with pytest.raises(ValueError, match="task: seeds"):
        GuessNumber().open(Prompt("3+4="), 0)


def test_the_best_value_by_hand():
    assert best_value(1, 15, 4) == best_value(4, 4, 1) == 1.0
    assert best_value(1, 2, 1) == 0.5 and best_value(1, 7, 2) == pytest.approx(3 / 7) and best_value(1, 3, 0) == 0.0


def middle(low, high, turns):
    return {(low + high) // 2: 1.0}


@pytest.mark.parametrize("high, turns", [(1, 1), (6, 2), (7, 3), (15, 4), (20, 4), (15, 3)])
def test_halving_reaches_the_best_value_and_no_other_policy_more(high, turns):
    assert value_of(middle, 1, high, turns) == pytest.approx(best_value(1, high, turns))
    rng = random.Random(high)

    def noisy(low, high, turns):
        weights = [rng.random() for _ in range(low, high + 1)]
        return {guess: weight / sum(weights) for guess, weight in zip(range(low, high + 1), weights, strict=True)}

    assert value_of(noisy, 1, high, turns) <= best_value(1, high, turns) + 1e-12


def test_the_value_of_a_policy_by_hand():
    upwards = value_of(lambda low, high, turns: {low: 1.0}, 1, 3, 2)  # 1, then 2: two of three numbers
    assert upwards == pytest.approx(2 / 3)
    # Half of the time it says nothing: 1/2 * V(1 turn) + 1/2 * (1/3 + 2/3 * 0.5 * 1/2), and V(1 turn) = 1/2 * 1/3.
    stammering = value_of(lambda low, high, turns: {None: 0.5, low: 0.5}, 1, 3, 2)
    assert stammering == pytest.approx(0.5 / 6 + 0.5 * (1 / 3 + 2 / 3 * 0.5 / 2))
    assert value_of(lambda low, high, turns: {99: 1.0}, 1, 3, 5) == 0.0


def test_best_play_always_succeeds_at_the_defaults():
    game = GuessNumber(noise=0.0)
    for hidden in range(1, 16):
        assert played_by_expert(game, seeded(hidden), 0) == 1.0


def played_by_expert(environment, prompt, seed):
    """The total reward of a demonstration, its actions played again."""
    shown = environment.demonstration(prompt, seed)
    episode = environment.open(prompt, seed)
    start, *steps = play(episode, *(text for text, _ in shown.turns))
    assert start.observation == shown.start and [step.observation for step in steps] == [seen for _, seen in shown.turns]
    assert steps[-1].done
    return sum(step.reward for step in steps)


def test_the_expert_succeeds_as_often_as_counting_says():
    game = GuessNumber()
    exact = value_of(game.expert_policy, 1, game.numbers, game.max_turns)
    assert 0.3 < exact < 0.45
    played = [played_by_expert(game, Prompt("", meta={"seed": seed}), seed) for seed in range(2000)]
    assert abs(statistics.mean(played) - exact) < 0.035  # three standard errors
    assert all({*text} <= {*game.alphabet} for text, _ in game.demonstration(seeded(1), 0).turns)
