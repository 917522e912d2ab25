"""One suite for every registered component, of every axis: what a part must be to be a part."""

from __future__ import annotations

import inspect
import json
import types
from typing import Annotated, Any, Union, get_args, get_origin

import annotated_types
import pytest
import torch
from conftest import make_rollout
from pydantic import BaseModel, TypeAdapter, ValidationError

import cct.recipe  # noqa: F401  (registers every axis)
from cct.critic import Critic
from cct.registry import REGISTRIES, Component, Knobs
from cct.statistic import Statistic, TokenEntropy
from cct.tools.conformance import AXES, check
from cct.transport import Gate, Transport, gates, transports

NAN, INF = float("nan"), float("inf")

SHIPPED = [
    (axis, name)
    for axis, registry in REGISTRIES.items()
    for name in registry.names()
    if registry[name].__module__.startswith("cct.")
]
# What a component that cannot stand alone needs; every other one is its name.
LEAST: dict[tuple[str, str], dict[str, Any]] = {
    ("gate", "constant"): {"gamma": 0.9},
    ("environment", "gym_text"): {"env": "./mine.py:Mine"},
    ("environment", "textarena"): {"game": "FrozenLake-v0"},
    ("environment", "tools"): {"tools": ["./mine.py:search"]},
    ("evidence", "format"): {"pattern": "a+"},
    ("evidence", "length"): {"max_tokens": 48, "buffer": 16},
    ("evidence", "python"): {"path": "reward.py"},
    ("evidence", "reward_model"): {"path": "somewhere"},
    ("generation", "vllm_server"): {"servers": 1},
    ("policy", "pretrained"): {"path": "somewhere"},
    ("task", "datasets"): {"path": "somewhere"},
    ("task", "jsonl"): {"path": "train.jsonl", "held_out_path": "held_out.jsonl"},
    ("task", "parquet"): {"path": "train.parquet", "held_out_path": "held_out.parquet"},
    ("task", "reasoning_gym"): {"name": "chain_sum"},
}
# Besides the defaults, knobs far from them.
OTHERWISE: dict[tuple[str, str], dict[str, Any]] = {
    ("critic", "tac"): {"depth": 4, "memory": 0, "output": "scalar"},
    ("critic", "group_mean"): {"of": {"use": "mini_critics", "count": 3}, "weight": 0.0},
    ("critic", "group_level"): {"of": {"use": "value_head", "output": "hl_gauss"}, "prior": 1.0},
    ("critic", "mini_critics"): {"of": {"use": "value_head", "output": "two_hot"}, "count": 4},
    ("critic", "value_head"): {"output": "hl_gauss", "bins": 21, "value_clip": 0.2},
    ("environment", "calculator"): {"call_cost": 0.1, "noisy_operands": [1], "max_turns": 5, "on_error": "drop"},
    ("environment", "gym_text"): {"env": "package.mine:Mine", "arguments": {"step": 2, "more": [1]}, "low": -1, "workers": 2},
    ("environment", "guess_number"): {"numbers": 7, "max_turns": 3, "noise": 0.2, "max_tokens": 40, "history": "sampled"},
    ("environment", "textarena"): {"game": "Mastermind-v0", "workers": 0, "high": 2},
    ("environment", "tools"): {"tools": ["json:loads", "json:dumps"], "format": "hermes", "workers": 1, "time_limit": 9},
    ("evidence", "exact_match"): {"weight": -0.5, "on_error": "drop", "ignore_case": True},
    ("evidence", "format"): {"pattern": "b", "match": "contains"},
    ("evidence", "math_verify"): {"workers": 0, "time_limit": None, "on_error": "fail"},
    ("evidence", "python"): {"path": "reward.py", "function": "other", "low": -1, "time_limit": 0.5},
    ("evidence", "reasoning_gym"): {"pattern": "#(.*)", "partial": False},
    ("evidence", "reward_model"): {"path": "there", "squash": "sigmoid", "join": "chat", "label": 1},
    ("gate", "attention"): {"half_life": [16, 256], "layers": [0, -1], "sign": -1, "match_gamma": 0.99, "sinks": 2},
    ("gate", "constant"): {"of": {"use": "attention", "statistic": "renyi2"}},
    ("gate", "entropy"): {"half_life": [16, 256], "sign": -1},
    ("transport", "turn_gae"): {"gamma": 0.9, "lam": 0.7, "lam_value": 0.5, "whiten": False},
    ("transport", "turn_return"): {"gamma": 0.9, "baseline": "turn"},
    ("gate", "statistic"): {"of": {"use": "preplan", "window": 3}, "sign": -1, "slope": 2.0},
    ("gate", "hidden_change"): {"distance": "relative", "layers": "all", "match_gamma": 0.99},
    ("gate", "logprob"): {"low": 0.5, "slope": 3.0},
    ("gate", "mixture"): {"parts": ["entropy", {"use": "turn", "boundary": 0.5}], "weights": [1, 3]},
    ("gate", "product"): {"parts": ["profile", {"use": "attention", "statistic": "max", "heads": [0, 2]}, "turn"]},
    ("gate", "profile"): {"shape": "linear", "start": 1.0, "end": 0.5, "tokens": 4},
    ("gate", "turn"): {"within": 0.99, "boundary": 0.5},
    ("gate", "shuffle"): {"of": {"use": "position", "of": {"use": "attention", "low": 0.5}}},
    ("generation", "vllm_server"): {"servers": 2, "patience": 0, "folder": "weights"},
    ("geometry", "clip_cov"): {"share": 0.1, "covariance_low": 0.1},
    ("geometry", "dis"): {"ratio_to": "trainer", "clip_low": 0.8, "correction": "mask", "correction_lower": 0.3},
    ("geometry", "dppo"): {"divergence": "kl", "bound": 0.01},
    ("geometry", "luspo"): {"constant": 64.0},
    ("geometry", "vespo"): {"power_negative": 1.0, "ratio_to": "engine"},
    ("geometry", "gspo"): {"kl_in_reward": 0.1, "ratio_to": "engine"},
    ("geometry", "topr"): {"level": "token"},
    ("geometry", "ppo_clip"): {"dual_clip": 3.0, "kl_coef": 0.1, "aggregation": "sequence_mean"},
    ("policy", "scratch"): {"warm_start": {"steps": 7}, "heads": 4, "kv_heads": 2},
    ("task", "chain_arithmetic"): {"noisy_operands": [1, 2], "operators": "*"},
    ("task", "datasets"): {"preset": "gsm8k", "split": "train[100:]", "limit": 5},
    ("task", "parquet"): {"path": "a", "held_out_path": "b", "template": "{q}?", "answer_pattern": "#(.*)"},
    ("task", "seeds"): {"held_out_size": 3},
    ("task", "parts"): {"decisions": 3, "dense": True, "noise": 0.5},
    ("task", "filler"): {"longest": 3, "dense": True, "noisy_operands": [2]},
    ("task", "chain"): {"decisions": 2, "held_out_size": 3},
    ("task", "recall"): {"decisions": 2, "noise": 0.1},
    ("task", "reasoning_gym"): {"datasets": [{"name": "gcd", "weight": 2}, {"name": "lcm", "config": {"max_value": 9}}]},
    ("statistic", "anchor"): {"near": 1, "far": 2, "layers": [0]},
    ("statistic", "concentration"): {"statistic": "max", "heads": [0, 3], "layers": [-1]},
    ("statistic", "hidden_change"): {"distance": "relative", "layers": "all"},
    ("statistic", "outcome_attention"): {"layers": "all"},
    ("statistic", "preplan"): {"window": 2, "layers": "last_quarter"},
    ("transport", "abc"): {"beta": 1.0, "layers": "all", "lam": 0.9, "gap": "cut"},
    ("transport", "bi_level_gae"): {"gamma": 0.9, "lam": 0.8, "gamma_turn": 0.7, "lam_turn": 0.6, "lam_value": 0.5},
    ("transport", "comp_gae"): {"gate": {"use": "swap"}, "gap": "cut", "lam": 0.5, "whiten": False},
    ("transport", "exact"): {"scale": False},
    ("transport", "exact_critic"): {"of": {"use": "comp_gae", "lam": 0.5, "whiten": False}},
    ("transport", "gae"): {"gamma": 0.9, "lam_value": 0.0, "target": "ungated"},
    ("transport", "gpg"): {"std": True, "rescale": "none", "single": "raw"},
    ("transport", "gigpo"): {"weight": 0.5, "gamma": 0.5, "std": False},
    ("transport", "grpo"): {"std": False},
    ("transport", "grpo_lambda"): {"lam": 0.5, "like": "trl"},
    ("transport", "grpo_pass_at_k"): {"like": "verl"},
    ("transport", "gtpo"): {"share": 1.0, "ddof": 1},
    ("transport", "high_entropy"): {"of": {"use": "comp_gae", "gate": "shuffle"}, "fraction": 0.5},
    ("transport", "lite_ppo"): {"single": "raw", "ddof": 0},
    ("transport", "reinforce_pp"): {"like": "verl", "gamma": 0.9},
    ("transport", "reinforce_pp_baseline"): {"unit": "responses", "single": "raw"},
    ("transport", "remax"): {"like": "verl"},
    ("transport", "rloo"): {"like": "nemo_rl"},
    ("transport", "length_adaptive_gae"): {"alpha": 0.3, "lam_value": 0.5, "gap": "decay"},
    ("transport", "monte_carlo"): {"gamma": 0.9, "baseline": False},
    ("transport", "retrace"): {"gamma": 0.9, "lam": 0.5, "c_bar": 2.0, "gap": "cut"},
    ("transport", "rhythm"): {"of": {"use": "comp_gae", "whiten": False}, "measure": "preplan", "share": 0.1, "factor": 0.0},
    ("transport", "spo"): {"values": "critic", "cuts": 2, "only_cuts": False, "whiten": False},
    ("transport", "td_lambda"): {"lam": 0.3},
    ("transport", "distill"): {"bound": 2.0},
    ("transport", "gdpo"): {"like": "trl"},
    ("transport", "maxrl"): {"single": "raw", "eps": 0.1},
    ("transport", "otb"): {"like": "verl"},
    ("transport", "single_stream"): {"decay": 1.0, "prior": -0.5, "prior_weight": 8.0, "unit": "tokens"},
    ("transport", "vineppo"): {"separator": ";", "samples": 2, "whiten": False},
    ("transport", "vtrace"): {"gamma": 0.9, "lam": 0.5, "rho_bar": 3.0, "c_bar": 0.7, "gap": "decay"},
}
each_component = pytest.mark.parametrize("axis, name", SHIPPED, ids=[f"{axis}-{name}" for axis, name in SHIPPED])


def read(axis: str, value: Any) -> Component:
    """As a recipe reads it."""
    registry = REGISTRIES[axis]
    return TypeAdapter(Annotated[registry.base, registry]).validate_python(value)


def make(axis: str, name: str) -> Component:
    return read(axis, {"use": name, **LEAST.get((axis, name), {})})


def knob_sets(cls: type[Knobs]) -> list[type[Knobs]]:
    """A component's class, and the classes of knobs nested in it."""
    nested = [
        part
        for field in cls.model_fields.values()
        for part in (field.annotation, *get_args(field.annotation))
        if inspect.isclass(part) and issubclass(part, Knobs) and not issubclass(part, Component)
    ]
    return [cls, *nested]


def numeric_knobs(cls: type[Knobs]) -> dict[str, Any]:
    """Knobs that take one int or float, null or not."""

    def options(annotation: Any) -> list[Any]:
        if get_origin(annotation) in (Union, types.UnionType):
            return [option for part in get_args(annotation) for option in options(part)]
        return options(get_args(annotation)[0]) if get_origin(annotation) is Annotated else [annotation]

    return {name: field for name, field in cls.model_fields.items() if {int, float} & {*options(field.annotation)}}


# --- knobs ----------------------------------------------------------------------------------------
def test_every_axis_has_a_component():
    assert set(REGISTRIES) >= {
        "task",
        "policy",
        "generation",
        "evidence",
        "critic",
        "transport",
        "gate",
        "statistic",
        "geometry",
    }
    assert {axis for axis, _ in SHIPPED} == set(REGISTRIES)


@each_component
def test_it_says_what_it_is_and_what_each_knob_does(axis, name):
    cls = REGISTRIES[axis][name]
    assert cls.summary().endswith(".") and cls.use == name
    for part in knob_sets(cls):
        for knob, field in part.model_fields.items():
            assert field.description and field.description.strip(), f"{part.__name__}.{knob} has no docstring"


@each_component
def test_every_numeric_knob_has_a_bound_and_takes_no_nan(axis, name):
    for part in knob_sets(REGISTRIES[axis][name]):
        for knob, field in numeric_knobs(part).items():
            found = [type(m) for m in field.metadata] + [
                type(m) for arg in get_args(field.annotation) for m in getattr(arg, "__metadata__", ())
            ]
            bounds = {annotated_types.Ge, annotated_types.Gt, annotated_types.Le, annotated_types.Lt, annotated_types.Interval}
            assert bounds & set(found), f"{part.__name__}.{knob} has no bound"
            with pytest.raises(ValidationError):
                part.model_validate({knob: NAN})


@each_component
def test_no_numeric_knob_is_infinite(axis, name):
    for part in knob_sets(REGISTRIES[axis][name]):
        for knob in numeric_knobs(part):
            with pytest.raises(ValidationError) as error:
                part.model_validate({knob: INF})
            assert any(problem["loc"] == (knob,) for problem in error.value.errors()), f"{part.__name__}.{knob} takes infinity"


@each_component
def test_it_is_read_from_its_name_where_it_needs_nothing(axis, name):
    if (axis, name) in LEAST:
        with pytest.raises(ValidationError):
            read(axis, name)
    else:
        assert read(axis, name) == make(axis, name) == REGISTRIES[axis][name]()


@each_component
def test_it_is_frozen(axis, name):
    part = make(axis, name)
    for knob in type(part).model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, knob, getattr(part, knob))


@each_component
def test_it_comes_back_from_its_dump(axis, name):
    variants = [make(axis, name)]
    if (axis, name) in OTHERWISE:
        variants.append(read(axis, {"use": name, **OTHERWISE[axis, name]}))
        assert variants[0] != variants[1]
    for part in variants:
        dump = part.model_dump(mode="json")
        assert dump["use"] == name and set(dump) == {"use", *type(part).model_fields}
        assert read(axis, json.loads(json.dumps(dump))) == part
        assert read(axis, part) is part


@each_component
def test_it_takes_no_unknown_key(axis, name):
    dump = make(axis, name).model_dump(mode="json")
    if not type(make(axis, name)).model_fields:
        with pytest.raises(ValidationError, match="no key is called 'other'"):
            read(axis, {**dump, "other": 1})
        return
    knob = next(iter(type(make(axis, name)).model_fields))
    with pytest.raises(ValidationError, match=f"did you mean '{knob}'"):
        read(axis, {**dump, knob + "s": 1})


@pytest.mark.parametrize("axis", REGISTRIES)
@pytest.mark.parametrize("value", [None, 3, [], {}, {"use": 3}, {"lam": 1}])
def test_what_names_no_component_is_refused_with_the_names_there_are(axis, value):
    with pytest.raises(ValidationError, match=REGISTRIES[axis].names()[0]):
        read(axis, value)


@each_component
def test_needs_and_provisions_are_names(axis, name):
    part = make(axis, name)
    for names in (part.needs, part.provides):
        assert isinstance(names, frozenset) and all(isinstance(x, str) for x in names)
    path, line = type(part).where()
    assert path.is_file() and f"class {type(part).__name__}" in "".join(
        path.read_text(encoding="utf-8").splitlines()[line - 1 : line + 1]
    )


# --- knobs that another knob switches off ---------------------------------------------------------
# The choices, and the knobs that nothing reads then, each at another value than its default.
UNREAD: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("critic", {"use": "tac"}, {"bins": 7}),
    ("critic", {"use": "standard", "output": "scalar"}, {"bins": 7}),
    ("critic", {"use": "group_mean", "weight": 1.0}, {"leave_one_out": False}),
    ("gate", {"use": "attention", "half_life": [4, 8]}, {"low": 0.5, "high": 0.99}),
    (
        "generation",
        {"use": "vllm_server", "urls": ["http://localhost:8000"]},
        {"servers": 1, "dtype": "float32", "kv_cache_gb": 1.0, "eager": True, "tensor_parallel": 2, "memory_fraction": 0.5},
    ),
    ("geometry", {"use": "ppo_clip"}, {"constant": 9.0, "correction_level": "sequence", "correction_bound": 3.0}),
    ("geometry", {"use": "ppo_clip", "correction": "truncate"}, {"correction_lower": 0.3}),
    ("geometry", {"use": "gspo"}, {"kl_estimator": "k2", "kl_gradient": "k2"}),
    ("geometry", {"use": "ppo_clip", "kl_in_reward": 0.1}, {"kl_gradient": "k2"}),
    ("task", {"use": "jsonl", "path": "a", "held_out_path": "b", "template": "{q}"}, {"prompt_field": "q"}),
    ("transport", {"use": "gigpo", "std": False, "weight": 0.0}, {"eps": 0.1, "gamma": 0.5}),
    ("transport", {"use": "gpg"}, {"eps": 0.1, "ddof": 0}),
    ("transport", {"use": "grpo", "std": False}, {"eps": 0.1, "ddof": 0}),
    ("transport", {"use": "grpo", "std": False, "like": "trl"}, {"eps": 1e-6}),
    ("transport", {"use": "grpo_pass_at_k"}, {"std": False, "eps": 0.1, "ddof": 0}),
    ("transport", {"use": "grpo_pass_at_k", "credit": "lead"}, {"k": 2}),
    ("transport", {"use": "grpo_pass_at_k", "credit": "lead", "std": False}, {"ddof": 0}),
    ("transport", {"use": "rhythm", "measure": "preplan"}, {"near": 2}),
    ("transport", {"use": "spo", "values": "critic"}, {"samples": 8}),
]


@pytest.mark.parametrize("axis, choices, unread", UNREAD, ids=lambda x: str(x))
def test_a_knob_that_nothing_would_read_is_refused_and_at_its_default_is_not(axis, choices, unread):
    part = read(axis, choices)
    assert set(unread) <= set(part.unread)
    for knob, value in unread.items():
        assert read(axis, {**choices, knob: part.default_of(knob)}) == part
        with pytest.raises(ValidationError, match="nothing would read it") as error:
            read(axis, {**choices, knob: value})
        assert [problem["loc"][0] for problem in error.value.errors()] == [knob]
    assert read(axis, part.model_dump(mode="json")) == part


# --- parts around another part of their axis ------------------------------------------------------
def asking(base: type[Component], **declared: Any) -> Component:
    """A part that differs from the defaults in whatever a part of its axis declares."""
    common = {"provides": frozenset({"something"}), "claims": frozenset({"linear"}), "waives": {"gap": "it says so"}}
    declared = {**common, "needs": frozenset({"anchors"}), **declared}
    return type(f"Asking{base.__name__}", (base,), {k: property(lambda self, v=v: v) for k, v in declared.items()})()


INSIDE = {
    "transport": asking(
        Transport,
        grain="sequence",
        whitens="sequence",
        engine_ratio=frozenset({"later"}),
        statistics={"asked": TokenEntropy()},
        least_responses=7,
        branches=3,
    ),
    "gate": asking(Gate, statistics={"asked": TokenEntropy()}),
    "critic": asking(Critic, bounded=True),
}
# A wrapper's own: what it claims and provides, which of its knobs are read, and that it sets tokens apart.
ITS_OWN = {"claims", "provides", "unread", "grain"}
AROUND = [
    (axis, name, "of" if "of" in REGISTRIES[axis][name].model_fields else "parts")
    for axis, name in SHIPPED
    if {"of", "parts"} & set(REGISTRIES[axis][name].model_fields) and (axis, name) != ("gate", "statistic")
]


@pytest.mark.parametrize("axis, name, knob", AROUND)
def test_a_part_around_another_asks_for_whatever_that_one_asks_for(axis, name, knob):
    inner, base = INSIDE[axis], REGISTRIES[axis].base
    declared = {name for name in dir(base) if isinstance(getattr(base, name), property)} - {*dir(BaseModel)} - ITS_OWN
    outer = REGISTRIES[axis][name](**{knob: [inner] if knob == "parts" else inner})
    for what in sorted(declared):
        if name == "mini_critics" and what == "waives":
            continue  # of a critic's head, which an ensemble replaces
        found, expected = getattr(outer, what), getattr(inner, what)
        assert expected != getattr(base(), what), f"{what}: the part inside must differ from the default to show anything"
        if isinstance(expected, frozenset | dict):
            assert set(expected) <= set(found), what
        else:
            assert found == expected, what


@pytest.mark.parametrize("name", [name for axis, name, _ in AROUND if axis == "transport"])
def test_a_transport_around_vineppo_branches_where_vineppo_does(name):
    outer = read("transport", {"use": name, "of": {"use": "vineppo", "samples": 2, "separator": "7", "whiten": False}})
    rollout = make_rollout(4, 12, statistics=outer.statistics).replace(branch_values=None)
    starts = outer.starts(rollout, str)
    assert outer.branches == 2 and torch.equal(starts, outer.of.starts(rollout, str)) and bool(starts.any())
    stats = rollout.stats | dict.fromkeys(("entropy", "value_disagreement"), -rollout.logprobs)
    valued = rollout.replace(starts=starts, branch_values=rollout.values, stats=stats)
    assert outer(valued).advantages.shape == rollout.mask.shape


# --- the conformance suite ------------------------------------------------------------------------
EXAMPLES = 12  # inputs per property; `cct check-operator` tries 60
ELSEWHERE = {("evidence", "reward_model"), ("evidence", "python")}  # need a model, a file: test_evidence has them
ELSEWHERE |= {("environment", "tools"), ("environment", "gym_text")}  # need a file: test_environments has them
OPERATORS = {
    **{f"{axis}-{name}": make(axis, name) for axis, name in SHIPPED if axis in AXES and (axis, name) not in ELSEWHERE},
    **{
        f"{axis}-{name}-otherwise": read(axis, {"use": name, **knobs})
        for (axis, name), knobs in OTHERWISE.items()
        if axis in AXES and (axis, name) not in ELSEWHERE
    },
    **{
        f"comp_gae-{name}-{gap}": transports["comp_gae"](gate=make("gate", name), gap=gap, whiten=gap == "carry")
        for name in gates.names()
        for gap in ("carry", "decay", "cut")
    },
}
each_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())


@each_operator
def test_it_conforms(operator):
    try:
        operator.ready()
    except ValueError as error:
        pytest.skip(str(error))  # an extra that is not installed
    failed = [verdict for verdict in check(operator, examples=EXAMPLES) if verdict.outcome == "FAILED"]
    assert not failed, "\n".join(f"{verdict.property}: {verdict.why}\n{verdict.example}" for verdict in failed)


@pytest.mark.parametrize("name", [name for name in OPERATORS if name.startswith(("transport", "gate", "comp_gae"))])
def test_it_says_what_it_reads_of_the_forward(name):
    operator = OPERATORS[name]
    assert all(isinstance(what, Statistic) for what in operator.statistics.values())
    read = frozenset().union(*(what.reads for what in operator.statistics.values()))
    assert read == operator.needs & {"attention", "hidden_states", "distribution"}
    if operator.statistics:
        with pytest.raises(KeyError):
            operator(make_rollout().replace(stats={}))
