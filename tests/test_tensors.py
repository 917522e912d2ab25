"""Every public tensor function, by introspection: one rule for masks, float32 inside, and nothing breaks at the edges."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from conftest import make_mask, make_rollout
from torch import Tensor
from torch.testing import assert_close

from benchmarks.examples import FUNCTIONS, arguments, parameters, tensors
from cct.policy.attention import attention_concentration
from cct.tensors import INDICES, MASKS, as_mask
from cct.transport import gates, transports

MASKED = [name for name, function in FUNCTIONS.items() if set(MASKS) & set(inspect.signature(function).parameters)]


def called(name: str, given: dict[str, Any]) -> list[Tensor]:
    return tensors(FUNCTIONS[name](**given))


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# --- masks ----------------------------------------------------------------------------------------
def masks_of(name: str) -> list[str]:
    return [parameter for parameter in parameters(name) if parameter in MASKS]


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_of_integers_0_and_1_counts_as_one_of_bools(name):
    given = arguments(name)
    for kind in (torch.long, torch.int32, torch.uint8):
        same(called(name, {key: x.to(kind) if key in MASKS else x for key, x in given.items()}), called(name, given))


@pytest.mark.parametrize("name", MASKED)
def test_what_is_no_mask_is_a_type_error_that_says_what_was_found(name):
    given = arguments(name)
    for parameter in masks_of(name):
        mask = given[parameter]
        for wrong, found in (
            (torch.where(mask, 0.5, 0.0), r"torch.float32 and shape \("),
            (mask.half(), "torch.float16"),
            (mask.long() * 2, "torch.int64 .* that holds 2"),
            (-mask.to(torch.int8), "torch.int8 .* that holds -1"),
            (mask.to(torch.complex64), "torch.complex64"),
            (mask.tolist(), "type list"),
            (True, "type bool"),
        ):
            with pytest.raises(TypeError, match=f"^{parameter} must be a bool tensor.* of 0 and 1; got .*{found}"):
                called(name, {**given, parameter: wrong})


@pytest.mark.parametrize("name", MASKED)
def test_no_mask_is_a_type_error_unless_the_signature_allows_it(name):
    given = arguments(name)
    for parameter in masks_of(name):
        if "None" in str(parameters(name)[parameter].annotation):
            called(name, {**given, parameter: None})
        else:
            with pytest.raises(TypeError, match=f"^{parameter} must be .*; got None"):
                called(name, {**given, parameter: None})


@pytest.mark.parametrize("name", MASKED)
def test_a_shape_that_disagrees_with_the_mask_is_a_value_error_that_names_both(name):
    given = arguments(name)
    first = next(parameter for parameter in ("mask", "valid", "starts", "attention_mask") if parameter in given)
    if sum(isinstance(value, Tensor) for value in given.values()) < 2:
        return  # there is nothing to disagree with
    for wrong in (given[first][:-1], given[first].unsqueeze(0), given[first][..., :0]):
        with pytest.raises(ValueError, match=r"must have shape \(.*\) to match " + first + r" \(.*\); got \("):
            called(name, {**given, first: wrong})


def test_a_mask_of_bools_is_taken_as_it_is():
    mask = make_mask("101")
    assert as_mask(mask) is mask and torch.equal(as_mask(mask.long()), mask)


def test_the_mask_of_the_attention_may_be_additive_and_integers_in_it_are_a_mask():
    query, key = torch.rand(2, 1, 2, 4, 8)
    visible = torch.ones(4, 4, dtype=torch.bool).tril()
    visible[3, 1] = False
    visible = visible[None, None]
    expected = attention_concentration(query, key, mask=visible)
    assert not torch.allclose(expected, attention_concentration(query, key))
    assert_close(attention_concentration(query, key, mask=visible.long()), expected)
    assert_close(attention_concentration(query, key, mask=torch.zeros(1, 1, 4, 4).masked_fill(~visible, -torch.inf)), expected)
    with pytest.raises(TypeError, match="mask must be .* that holds 3"):
        attention_concentration(query, key, mask=visible.long() * 3)


# --- precision ------------------------------------------------------------------------------------
HALF = (torch.float16, torch.bfloat16)


def cast(x: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor in it, in this precision."""
    if isinstance(x, dict):
        return {key: cast(value, dtype) for key, value in x.items()}
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


@pytest.mark.parametrize("name", FUNCTIONS)
def test_half_precision_is_computed_in_float32(name):
    for dtype in HALF:
        low = cast(arguments(name), dtype)
        found = called(name, low)
        same(found, called(name, cast(low, torch.float32)))
        assert not {x.dtype for x in found} & {*HALF}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_integers_where_numbers_belong_count_as_numbers(name):
    given = arguments(name)
    whole = {
        k: (9 * x).long() if isinstance(x, Tensor) and k not in (*MASKS, *INDICES, "atoms") else x for k, x in given.items()
    }
    same(
        called(name, whole),
        called(name, {k: x.float() if isinstance(x, Tensor) and k not in (*MASKS, *INDICES) else x for k, x in whole.items()}),
    )


@pytest.mark.parametrize("part", [*transports.names(), *(f"gate {name}" for name in gates.names())])
def test_a_rollout_in_half_precision_gets_the_credit_of_the_same_one_in_float32(part):
    name = part.removeprefix("gate ")
    gate = {"constant": {"of": "turn"}}.get(name, {})
    operator = transports["comp_gae"](gate=gates[name](**gate)) if name != part else transports[name]()
    rollout = make_rollout(statistics=[*operator.statistics, "entropy", "value_disagreement"])
    for dtype in HALF:
        low = rollout.replace(**cast(vars(rollout), dtype))
        found, expected = (operator(x) for x in (low, low.replace(**cast(vars(low), torch.float32))))
        given = {name: x for name, x in vars(found).items() if x is not None}
        same(tensors(given), tensors({name: getattr(expected, name) for name in given}))


def test_scores_are_summed_in_float32():
    for dtype in HALF:
        rewards = torch.full((1, 4095), 0.1, dtype=dtype)
        rollout = make_rollout(mask=torch.ones(1, 4095, dtype=torch.bool), rewards=rewards)
        assert_close(rollout.scores, rewards.double().sum(1).float(), rtol=1e-6, atol=0)


# --- edges ----------------------------------------------------------------------------------------
EDGES = [
    torch.zeros(0, 4, dtype=torch.bool),
    torch.zeros(3, 0, dtype=torch.bool),
    torch.zeros(3, 4, dtype=torch.bool),
    torch.ones(3, 1, dtype=torch.bool),
    torch.ones(1, 1, dtype=torch.bool),
    make_mask("0100", "0000"),
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_batches_without_responses_positions_or_steps_and_of_one_token_give_finite_numbers(name):
    for mask in EDGES:
        assert all(bool(x.isfinite().all()) for x in called(name, arguments(name, mask)))


# What these give at masked positions means nothing.
MOVES = {"ordered", "from_start", "shuffle_within", "position_profile", "swap_between", "draw_marginal", "match_mean_log"}


@pytest.mark.parametrize("name", [name for name in MASKED if {"mask", "valid"} & set(parameters(name)) and name != "packed"])
def test_whatever_stands_at_masked_places_changes_nothing(name):
    given = arguments(name)
    tokens = given.get("mask", given["valid"] if "valid" in given and given["valid"].dim() == 2 else None)
    responses = given["valid"] if tokens is None else tokens.any(1)
    for noise in (float("nan"), float("inf"), -float("inf"), 1e38):
        noisy = {
            key: x.masked_fill(~(tokens if x.dim() == 2 else responses), noise)
            if isinstance(x, Tensor) and x.is_floating_point() and x.dim()
            else x
            for key, x in given.items()
        }
        for found, expected in zip(called(name, noisy), called(name, given), strict=True):
            kept = tokens if name in MOVES else torch.ones_like(found, dtype=torch.bool)
            assert_close(found[kept], expected[kept], rtol=0, atol=0)
