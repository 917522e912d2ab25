"""Which responses go through the model together."""

import torch
from conftest import make_rollout
from hypothesis import given
from hypothesis import strategies as st

from cct.training.plans import micro_batches, trimmed


def test_rows_of_like_length_go_together_and_to_ranks_in_turn():
    sizes = [(3, 5), (9, 5), (4, 5), (8, 5), (1, 5), (2, 5), (7, 5), (6, 5)]
    assert micro_batches(sizes, [8], 1, rows=4) == [[[1, 3, 6, 7], [2, 0, 5, 4]]]
    assert micro_batches(sizes, [8], 2, rows=2) == [[[1, 6], [2, 5]], [[3, 7], [0, 4]]]
    assert micro_batches(sizes, [4, 4], 1, rows=4) == [[[1, 3, 2, 0], [6, 7, 5, 4]]]


def test_a_budget_counts_padding_and_lets_a_longer_row_go_alone():
    sizes = [(30, 2), (8, 2), (8, 2), (3, 2), (3, 2), (3, 2)]
    assert micro_batches(sizes, [6], 1, rows=6, tokens=20) == [[[0], [1, 2], [3, 4, 5]]]  # 32; 2 x 10; 3 x 5


def test_every_minibatch_makes_as_many_forwards_as_the_fullest():
    sizes = [(18, 2), (18, 2), (8, 2), (8, 2)]
    assert micro_batches(sizes, [2, 2], 1, rows=2, tokens=20) == [[[0], [1], [2], [3]]]


def test_rows_of_one_prompt_go_together_where_prompts_are_shared():
    sizes = [(3, 5), (9, 5), (4, 5), (8, 5), (1, 5), (2, 5), (7, 5), (6, 5)]
    prompts = [0, 1, 0, 1, 2, 2, 0, 2]
    assert micro_batches(sizes, [8], 1, rows=4, prompts=prompts) == [[[1, 3, 6, 2], [0, 7, 5, 4]]]
    assert micro_batches(sizes, [8], 2, rows=4, prompts=prompts) == [[[1, 3, 6, 2]], [[0, 7, 5, 4]]]
    # Prompts of 5 count once: 9 + 8 + 5 = 22, and 7 + 4 + 3 + 5 = 19, and 6 + 2 + 1 + 5 = 14.
    assert micro_batches(sizes, [8], 1, rows=8, tokens=22, prompts=prompts) == [[[1, 3], [6, 2, 0], [7, 5, 4]]]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=12, max_size=12),
    st.sampled_from([(12, 1), (12, 2), (6, 3), (4, 2), (4, 1)]),
    st.none() | st.integers(16, 200),
)
def test_each_row_is_in_one_forward_of_its_minibatch_and_ranks_make_equally_many(sizes, minibatch_and_world, tokens):
    minibatch, world = minibatch_and_world
    plan = micro_batches(sizes, [minibatch] * (len(sizes) // minibatch), world, rows=1, tokens=tokens)
    forwards = len(plan[0]) // (12 // minibatch)
    assert all(len(of_rank) == forwards * (12 // minibatch) for of_rank in plan)
    for number in range(12 // minibatch):
        parts = [part for of_rank in plan for part in of_rank[number * forwards : (number + 1) * forwards]]
        assert sorted(row for part in parts for row in part) == list(range(number * minibatch, (number + 1) * minibatch))
        for part in parts if tokens else []:
            padded = len(part) * (max(sizes[row][0] for row in part) + max(sizes[row][1] for row in part))
            assert len(part) == 1 or padded <= tokens


def test_rows_take_only_the_columns_that_they_fill():
    rollout = make_rollout(mask=torch.ones(2, 4, dtype=torch.bool))
    attention_mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0]])
    rollout = rollout.replace(input_ids=torch.zeros(2, 7, dtype=torch.long), attention_mask=attention_mask)
    assert trimmed(rollout, [0]) == (slice(2, 5), 2)
    assert trimmed(rollout, [0, 1]) == (slice(1, 6), 3)
    nothing = rollout.replace(attention_mask=torch.tensor([[0, 1, 1, 0, 0, 0, 0]] * 2))
    assert trimmed(nothing, [1]) == (slice(1, 4), 1)
