"""The laboratory: tasks whose credit is known in closed form, the oracle, and the share of the headroom that an arm takes."""

import itertools
import json
import math
import random
from typing import Annotated

import pytest
import torch
from conftest import make_mask, make_rollout
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from cct.agent.agent import Agent
from cct.agent.building import build
from cct.agent.oracle import with_exact_values
from cct.errors import TrainingStopped
from cct.evidence.lab import Lab
from cct.laboratory import DIGITS, Layout, Step, layout_of
from cct.loading import load_recipe
from cct.recipe import RecipeError
from cct.rollout import Prompt, Response
from cct.task import Task, tasks
from cct.task.lab import Chain, Filler, LabTask, Parts, Recall
from cct.tools.lab.board import TASKS, board
from cct.tools.lab.command import command
from cct.tools.lab.results import lab_results
from cct.tools.study.statistics import estimate, share_of
from cct.tools.study.study import load_study
from cct.transport.exact import Exact, ExactCritic
from cct.transport.functional import agreement, ranks
from cct.transport.gae import GAE

TWO = (Step("3+5=", 5, 3), Step(";2+7=", 7, 2))  # answered 3+5=8;2+7=9
ONE_BIT = (Step("3+5=", 5, 3), Step(";+7=", 7, of=0))  # answered 3+5=8;+7=5
FIRST = 4  # place of the first digit of both


def chances(layout: Layout, *right: float, wrong: float = 1.0) -> tuple[list[float], list[float]]:
    """Of each place: decisions are right as given, and stay digits with a probability of `wrong` otherwise."""
    places, given_ = layout.places(""), iter(right)
    found = [next(given_) if place.decides else 1.0 for place in places]
    stay = [p if layout.reward == "all" else p + (1 - p) * wrong for p in found]
    return found, [s if place.decides else 1.0 for s, place in zip(stay, places, strict=True)]


# --- closed forms -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("3+5=8;2+7=9", 1.0),
        ("3+5=7;2+7=9", 0.5),
        ("3+5=8;2+7=0", 0.5),
        ("3+5=8", 0.5),
        ("3+5=8;3+7=9", 0.5),  # the second sum is not the one that was asked for
        ("3+4=8;2+7=9", 0.0),
        ("3+5=;2+7=99", 0.0),
        ("3+5=8;2+7=9;;", 1.0),  # what follows does not count
        ("", 0.0),
    ],
)
def test_a_share_by_hand(text, reward):
    assert sum(Layout(TWO).rewards(text)) == reward


@pytest.mark.parametrize(
    ("text", "reward"),
    [("3+5=8;+7=5", 1.0), ("3+5=7;+7=4", 0.0), ("3+5=8;+7=4", 0.0), ("3+5=8", 0.0), ("3+5=8;-7=5", 0.0)],
)
def test_one_bit_by_hand(text, reward):
    assert sum(Layout(ONE_BIT, "all").rewards(text)) == reward


def test_values_of_a_share_by_hand():
    layout, right = Layout(TWO), "3+5=8;2+7=9"
    found = layout.values(right, *chances(layout, 0.5, 0.8))
    assert found == pytest.approx([0.65] * 5 + [0.9] * 6 + [1.0])
    assert layout.values("3+5=7;2+7=0", *chances(layout, 0.5, 0.8)) == pytest.approx([0.65] * 5 + [0.4] * 6 + [0.0])
    left = layout.values("3+5=8;9", *chances(layout, 0.5, 0.8))  # out of the layout
    assert left == pytest.approx([0.65] * 5 + [0.9, 0.9, 0.5])
    paid = Layout(TWO, dense=True).values(right, *chances(layout, 0.5, 0.8))
    assert paid == pytest.approx([0.65] * 5 + [0.4] * 6 + [0.0])


def test_values_of_one_bit_by_hand():
    layout = Layout(ONE_BIT, "all")
    found = layout.values("3+5=8;+7=5", *chances(layout, 0.5, 0.8))
    assert found == pytest.approx([0.4] * 5 + [0.8] * 5 + [1.0])
    assert layout.values("3+5=7;+7=4", *chances(layout, 0.5, 0.8)) == pytest.approx([0.4] * 5 + [0.0] * 6)


def test_a_digit_that_does_not_count_changes_no_value():
    layout = Layout((Step("3+5=", 5, 3), Step(";2+7=", 7, 2, counts=False), Step(";=", 0, of=0, copies=True)), "all")
    for digit in "09":
        found = layout.values(f"3+5=8;2+7={digit};=8", *chances(layout, 0.5, 1.0, 0.75))
        assert found == pytest.approx([0.375] * 5 + [0.75] * 9 + [1.0])


@given(st.data())
def test_exact_advantages_add_up_to_the_reward_less_the_first_value(data):
    layout = data.draw(st.sampled_from([Layout(TWO), Layout(TWO, dense=True), Layout(ONE_BIT, "all")]))
    text = data.draw(st.sampled_from(["3+5=8;2+7=9", "3+5=8;+7=5", ""]))[: data.draw(st.integers(0, 12))]
    text += data.draw(st.text("0189;+=", max_size=6))
    count = len(layout.places(text))
    probability = st.lists(st.floats(0, 1), min_size=count, max_size=count)
    values, earned = layout.values(text, data.draw(probability), data.draw(probability)), layout.rewards(text)
    paid = earned if layout.dense else [0.0] * len(earned)
    advantages = [r + after - before for r, before, after in zip(paid, values, values[1:], strict=False)]
    last = 0.0 if layout.dense else sum(earned) - values[-1]  # the end token: the reward is paid, and nothing follows
    if layout.dense:
        last -= values[-1]
    assert sum(advantages) + last == pytest.approx(sum(earned) - values[0], abs=1e-12)


@pytest.mark.parametrize("layout", [Layout(TWO), Layout(ONE_BIT, "all")], ids=["share", "all"])
def test_before_each_decision_the_value_is_the_mean_of_those_after(layout):
    right, intact = chances(layout, 0.3, 0.6, wrong=0.9)
    answer = "3+5=8;2+7=9" if layout.reward == "share" else "3+5=8;+7=5"
    for place, what in enumerate(layout.places(answer)):
        outcomes = {answer[place]: right[place], "x": 1 - right[place]}
        if what.decides and layout.reward == "share":
            wrong = next(digit for digit in DIGITS if digit != answer[place])
            outcomes = {answer[place]: right[place], wrong: intact[place] - right[place], "x": 1 - intact[place]}
        after = [p * layout.values(answer[:place] + char, right, intact)[-1] for char, p in outcomes.items()]
        assert sum(after) == pytest.approx(layout.values(answer[:place], right, intact)[-1])


@pytest.mark.parametrize("layout", [Layout(TWO), Layout(ONE_BIT, "all")], ids=["share", "all"])
def test_exact_credit_is_an_unbiased_gradient(layout):
    """E[sum of A_k d log pi_k / d p_k] over every response is the derivative of the expected reward."""
    p, step = [0.3, 0.6], 1e-6
    ends = ["3+5=", ";2+7=" if layout.reward == "share" else ";+7="]

    def start(*right: float) -> float:
        return layout.values("", *chances(layout, *right))[0]

    for k in range(2):
        moved = [x + step * (n == k) for n, x in enumerate(p)]
        expected, found = (start(*moved) - start(*p)) / step, 0.0
        for rights in itertools.product([True, False], repeat=2):
            text = ""
            for routine, right in zip(ends, rights, strict=True):
                text += routine
                digit = int(layout.places(text)[len(text)].right)
                text += str(digit if right else (digit + 1) % 10)
            values = layout.values(text, *chances(layout, *p))
            place = [n for n, what in enumerate(layout.places(text)) if what.decides][k]
            probability = math.prod(x if right else 1 - x for x, right in zip(p, rights, strict=True))
            score = 1 / p[k] if rights[k] else -1 / (1 - p[k])
            found += probability * (values[place + 1] - values[place]) * score
        assert found == pytest.approx(expected, abs=1e-6)


# --- tasks ------------------------------------------------------------------------------------
EACH = [Parts(decisions=3), Filler(decisions=3, longest=4), Chain(decisions=3), Recall(decisions=3)]
each_task = pytest.mark.parametrize("task", EACH, ids=[task.use for task in EACH])


@each_task
def test_the_answer_earns_everything(task):
    lengths = []
    for prompt in [*task.held_out(), *task.prompts(0, 0, 50)]:
        assert sum(layout_of(prompt).rewards(prompt.answer)) == pytest.approx(1.0)
        assert set(prompt.text + prompt.answer) <= set(task.alphabet)
        lengths.append(len(prompt.answer))
    assert max(lengths) <= task.longest_answer
    if task.use != "filler":
        assert set(lengths) == {task.longest_answer}


@each_task
def test_the_stream_is_reproducible_and_leaves_held_out_problems_alone(task):
    held_out = {prompt.text for prompt in task.held_out()}
    assert len(held_out) == task.held_out_size
    stream = [prompt.text for prompt in task.prompts(1, 0, 200)]
    assert stream[50:60] == [prompt.text for prompt in task.prompts(1, 50, 10)] and not held_out & set(stream)
    assert task.demonstrations(1, 3, 2) == task.demonstrations(1, 0, 5)[3:]


@each_task
def test_the_expert_errs_at_noisy_operands_alone(task):
    prompts, seen = task.prompts(0, 0, 300), {True: [0, 0], False: [0, 0]}
    for prompt, (text, response) in zip(prompts, task.demonstrations(0, 0, 300), strict=True):
        layout = layout_of(prompt)
        assert text == prompt.text and layout.aligned(response) == len(response)
        digits = [n for n, place in enumerate(layout.places(response)) if place.decides]
        for step, place in zip(layout.steps, digits, strict=True):
            left = response[digits[step.of]] if step.left is None else step.left
            wrong = response[place] != str((int(left) + step.right) % 10)
            count = seen[step.right in task.noisy_operands and not step.copies]
            count[0] += wrong
            count[1] += 1
    assert seen[False][0] == 0 and seen[True][0] / seen[True][1] == pytest.approx(task.noise, abs=0.05)


def test_what_the_four_look_like():
    assert Parts(decisions=2)._answer(Layout(TWO)) == "3+5=8;2+7=9"
    assert Chain(decisions=2)._answer(Layout(ONE_BIT)) == "3+5=8;+7=5"
    filler = next(p for p in Filler(decisions=1).held_out() if "c" in p.text)
    assert filler.text[3:] == "c=" and filler.answer[3:8] == "cba=" + filler.answer[-1]
    recall = Recall(decisions=2).held_out()[0]
    assert recall.answer[-3:] == ";=" + recall.answer[4]


def test_evidence_pays_where_the_task_says():
    prompt, response = Prompt("", meta={"layout": Layout(TWO)}), Response("3+5=8;2+7=0", tuple(range(12)), True)
    assert Lab()(prompt, response) == 0.5
    dense = Prompt("", meta={"layout": Layout(TWO, dense=True)})
    assert Lab()(dense, response) == [0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="5 tokens for 11 characters.*policy whose tokens are characters"):
        Lab()(dense, Response("3+5=8;2+7=0", tuple(range(5)), True))
    assert "no layout" in (Lab().unreadable(Prompt("3+4=", "7")) or "")


# --- the oracle -------------------------------------------------------------------------------
RECIPE = """
name: tiny
task: {use: parts, decisions: 2, held_out_size: 8}
policy:
  {use: scratch, hidden_size: 32, intermediate_size: 32, layers: 2, heads: 2, kv_heads: 1, warm_start: {steps: 2}}
generation: {use: transformers, max_new_tokens: 12}
evidence: [lab]
transport: exact
geometry: ppo_clip
training: {iterations: 1, prompts_per_iteration: 2, responses_per_prompt: 2, minibatch_size: 4, threads: 1}
"""


def written(folder, text=RECIPE, name="recipe.yaml"):
    (folder / name).write_text(text)
    return folder / name


@pytest.fixture(scope="module")
def policy(tmp_path_factory, cache):
    agent, tokenizer, _ = build(load_recipe(written(tmp_path_factory.mktemp("oracle"))))
    return agent, tokenizer


def rollout_of(agent: Agent, tokenizer, prompt: Prompt, texts: list[str]):
    end = tokenizer.eos_token_id
    responses = [Response(text, (*tokenizer.encode(text, add_special_tokens=False), end), True) for text in texts]
    width, before = max(len(r.tokens) for r in responses), tokenizer.encode(prompt.text, add_special_tokens=False)
    pad = [[0] * (width - len(r.tokens)) for r in responses]
    ids = torch.tensor([[*before, *r.tokens, *p] for r, p in zip(responses, pad, strict=True)])
    mask = torch.tensor([[True] * len(r.tokens) + [False] * len(p) for r, p in zip(responses, pad, strict=True)])
    seen = torch.cat([torch.ones(len(texts), len(before), dtype=torch.bool), mask], 1).long()
    plain = make_rollout(mask=mask, input_ids=ids, attention_mask=seen, rewards=torch.zeros(mask.shape))
    return with_exact_values(plain, agent, tokenizer, [prompt] * len(texts), responses), seen, ids


def test_the_oracle_reads_the_policys_own_probability(policy):
    agent, tokenizer = policy
    prompt = Prompt("3+5;2+7=", meta={"layout": Layout(TWO, dense=True)})
    rollout, seen, ids = rollout_of(agent, tokenizer, prompt, ["3+5=8;2+7=0", "3+5=8;2+7=9"])
    with torch.no_grad():
        places = (seen.cumsum(1) - 1).clamp(min=0)
        logits = agent.actor(input_ids=ids, attention_mask=seen, position_ids=places).logits
    before, second = len(prompt.text), 10
    nine = tokenizer.encode("9", add_special_tokens=False)[0]
    digits = [tokenizer.encode(digit, add_special_tokens=False)[0] for digit in DIGITS]
    p = logits[:, before + second - 1].softmax(-1)
    assert rollout.exact_values[:, second].tolist() == pytest.approx((p[:, nine] / 2).tolist(), rel=1e-4)
    assert rollout.exact_values[:, second + 1].tolist() == [0, 0]  # all is paid
    assert rollout.decisions.nonzero().tolist() == [[row, place] for row in (0, 1) for place in (FIRST, second)]
    first = logits[0, before + FIRST - 1].softmax(-1)
    eight = tokenizer.encode("8", add_special_tokens=False)[0]
    routine = 1.0
    for place in range(5, 10):
        routine *= float(logits[0, before + place - 1].softmax(-1)[ids[0, before + place]])
    expected = float(first[eight]) / 2 + float(first[digits].sum()) * routine * float(p[0, nine]) / 2
    assert float(rollout.exact_values[0, FIRST]) == pytest.approx(expected, rel=1e-4)


def test_behind_what_left_the_layout_the_batch_tells(policy):
    agent, tokenizer = policy
    prompt = Prompt("3+5;2+7=", meta={"layout": Layout(TWO)})
    rollout, *_ = rollout_of(agent, tokenizer, prompt, ["3+5=8;;;", "3+5=8;2+7=9"])
    assert rollout.exact_values[0, 7:9].tolist() == [0.5, 0.5] and rollout.decisions[0].sum() == 1
    assert 0.5 < float(rollout.exact_values[0, 6]) <= 1


def test_tokens_that_are_no_characters_are_refused(policy):
    agent, tokenizer = policy

    class Words:
        def __len__(self) -> int:
            return len(tokenizer)

        def decode(self, tokens, **_) -> str:
            return "word"

    prompt = Prompt("", meta={"layout": Layout(TWO)})
    with pytest.raises(TrainingStopped, match="tokens are characters.*policy `scratch`"):
        with_exact_values(make_rollout(rows=1), agent, Words(), [prompt], [Response("", (3,), True)])


# --- transports -------------------------------------------------------------------------------
def test_exact_credit_by_hand():
    values = torch.tensor([[0.65, 0.9, 0.9, 1.0], [0.65, 0.4, 0.4, 0.0]])
    rewards = torch.tensor([[0.0, 0, 0, 1.0], [0, 0, 0, 0]])
    rollout = make_rollout(mask=make_mask("1111", "111."), rewards=rewards, exact_values=values)
    expected = [[0.25, 0, 0.1, 0], [-0.25, 0, -0.4, 0]]
    plain = Exact(scale=False)(rollout).advantages
    assert torch.allclose(plain, torch.tensor(expected), atol=1e-6)
    size = math.sqrt((0.25**2 + 0.1**2 + 0.25**2 + 0.4**2) / 7)
    assert torch.allclose(Exact()(rollout).advantages, plain / size, atol=1e-6)
    same = make_rollout(mask=make_mask("11"), rewards=torch.zeros(1, 2), exact_values=torch.zeros(1, 2))
    assert Exact()(same).advantages.tolist() == [[0, 0]]


def test_a_perfect_critic_is_the_oracles_values():
    rollout = make_rollout(exact_values=torch.rand(6, 9, generator=torch.Generator().manual_seed(1)))
    of = GAE(lam=0.8, whiten=False)
    expected = of(rollout.replace(values=rollout.exact_values, bootstrap=None)).advantages
    credit = ExactCritic(of=of)(rollout)
    assert torch.equal(credit.advantages, expected) and credit.value_targets is None
    assert ExactCritic(of=of).needs == {"exact_values"}


def test_the_oracle_is_for_the_laboratory_alone(tmp_path):
    other = RECIPE.replace("use: parts, decisions: 2", "use: chain_arithmetic, steps: 2").replace("[lab]", "[exact_match]")
    with pytest.raises(RecipeError, match="'exact' needs exact_values.*these parts do: task: chain, task: filler, task: parts"):
        load_recipe(written(tmp_path, other))
    assert load_recipe(written(tmp_path, RECIPE.replace("transport: exact", "transport: exact_critic"))).critic is None


# --- numbers ----------------------------------------------------------------------------------
def test_agreement_by_hand():
    truth = torch.tensor([0.5, -0.5, 0.0, 0.25])
    same = agreement(2 * truth, truth)
    assert same == pytest.approx({"right_signs": 1, "rank_correlation": 1, "scale": 2, "bias": 0, "variance": 0})
    assert ranks(torch.tensor([3.0, 1.0, 3.0])).tolist() == [2.5, 1, 2.5]
    shifted = agreement(truth + 1, truth)  # scale 1: the shift is all bias
    assert (shifted["scale"], shifted["bias"], shifted["right_signs"]) == pytest.approx((1, 1, 2 / 3))
    assert agreement(torch.ones(4), truth) == pytest.approx({"right_signs": 2 / 3, "scale": 0})
    assert agreement(torch.ones(0), torch.ones(0)) == {}


def test_a_share_of_a_constant_whole_has_the_parts_own_interval():
    part, whole = {0: 1.0, 1: 2.0, 2: 3.0}, {0: 4.0, 1: 4.0, 2: 4.0}
    found, alone = share_of(part, whole), estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.low, found.high, found.n, found.p) == pytest.approx(
        (0.5, alone.low / 4, alone.high / 4, 3, alone.p)
    )


def test_a_share_by_fieller():
    """Ends r of the interval: the mean of part - r whole lies t standard errors from 0."""
    part, whole = {0: 1.0, 1: 2.0, 2: 1.5, 3: 1.8}, {0: 2.2, 1: 3.1, 2: 3.3, 3: 2.9}
    found = share_of(part, whole)
    for end in (found.low, found.high):
        assert estimate([part[seed] - end * whole[seed] for seed in part]).p == pytest.approx(0.05)
    assert found.mean == pytest.approx(6.3 / 11.5) and found.low < found.mean < found.high
    assert share_of(part, part).low == pytest.approx(1) == share_of(part, part).high


def test_a_share_of_nothing_has_no_ends():
    found = share_of({0: 1.0, 1: 2.0, 2: 1.0}, {0: 1.0, 1: -1.5, 2: 0.7})
    assert math.isnan(found.low) and math.isnan(found.high) and math.isfinite(found.mean)
    assert math.isnan(share_of({0: 1.0}, {0: 2.0}).low) and math.isnan(share_of({}, {}).mean)


# --- the board --------------------------------------------------------------------------------
def made(*operators, critics=("tac",), names=("parts",), seeds=2, changes=()):
    return board("lab", operators, critics, names, seeds, changes)


def test_grpo_and_exact_always_run_and_what_reads_values_runs_under_each_critic():
    study, arms, _ = made("gae", "rloo", "{use: gae, lam: 0.9}", critics=["tac", "exact", "{use: tac, depth: 1}"])
    named = [(arm.name, arm.transport, arm.critic) for arm in arms]
    assert named == [
        ("grpo", "grpo", "none"),
        ("exact", "exact", "none"),
        ("gae.tac", "gae", "tac"),
        ("gae.exact", "gae", "exact"),
        ("gae.tac-depth1", "gae", "tac"),
        ("rloo", "rloo", "none"),
        ("gae-lam0.9.tac", "gae", "tac"),
        ("gae-lam0.9.exact", "gae", "exact"),
        ("gae-lam0.9.tac-depth1", "gae", "tac"),
    ]
    assert study["compare"] == [[name, "grpo"] for name, *_ in named[1:]] and study["seeds"] == [0, 1]


def test_changes_reach_every_arm_and_those_of_critics_only_theirs():
    changes = ["training.iterations=4", "training.critic_warmup=2", "task.decisions=3"]
    study, _, _ = made("gae", names=["parts", "chain"], changes=changes)
    assert study["common"] == {"training": {"iterations": 4}, "task": {"decisions": 3}}
    assert study["arms"]["gae.tac"]["training"]["critic_warmup"] == 2 and "training" not in study["arms"]["grpo"]
    rooms = {name: level["generation"]["max_new_tokens"] for name, level in study["factors"]["task"].items()}
    assert rooms == {"parts": 18, "chain": 16}


def test_all_are_those_that_fit():
    _, arms, left_out = made("all")
    assert {"gae.tac", "comp_gae.tac", "rloo", "monte_carlo.tac"} <= {arm.name for arm in arms}
    assert [line.split(":")[0] for line in left_out if line.startswith(("gigpo", "disagreement"))]


@pytest.mark.parametrize(
    ("operators", "names", "says"),
    [
        ((), ["part"], "no task of the laboratory is called 'part'.*did you mean 'parts'"),
        (("gaee",), ["parts"], "did you mean 'gae'"),
        (("ppo_clip",), ["parts"], "ppo_clip is a geometry; the laboratory takes transports, gates and critics"),
        (("none.py:mine",), ["parts"], "none.py"),
    ],
)
def test_what_cannot_be_on_the_board_is_said(operators, names, says):
    with pytest.raises(RecipeError, match=says):
        made(*operators, names=names)


def test_a_critic_that_is_not_there_is_said_though_no_operator_reads_one():
    with pytest.raises(RecipeError, match="no critic is called 'tacc'.*did you mean 'tac'"):
        made(critics=["tacc"])


def test_gates_and_critics_are_operators_too():
    _, arms, _ = made("entropy", "value_head")
    assert [(arm.name, arm.transport, arm.critic) for arm in arms[2:]] == [
        ("comp_gae.entropy.tac", "comp_gae", "tac"),
        ("gae.value_head", "gae", "value_head"),
    ]
    assert sorted(TASKS) == ["chain", "filler", "parts", "recall"]
    assert all(issubclass(tasks[name], LabTask) for name in TASKS)
    read = TypeAdapter(Annotated[Task, tasks]).validate_python({"use": "recall", "decisions": 2})
    assert random.Random(0) and "exact_values" in read.provides


TINY = [
    *(f"policy.{key}={n}" for key, n in [("hidden_size", 32), ("intermediate_size", 32), ("layers", 2), ("heads", 2)]),
    "policy.kv_heads=1",
    "policy.warm_start={steps: 3, batch_size: 4}",
    "task={decisions: 1, held_out_size: 8}",
    "training={iterations: 3, prompts_per_iteration: 2, responses_per_prompt: 2, minibatch_size: 4, critic_warmup: 1}",
    "evaluation.every=1",
]
MINE = '''
from cct.rollout import Credit
from cct.transport import Transport, transports


@transports.register("mine")
class Mine(Transport):
    """The score, on every token."""

    def __call__(self, rollout):
        return Credit(rollout.scores[:, None] * rollout.mask)
'''


@pytest.mark.slow
def test_the_whole_laboratory_on_two_seeds(tmp_path, cache, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, MINE, "mine.py")
    asked = {"tasks": ["parts"], "critics": ["exact"], "seeds": 2, "jobs": 2, "into": tmp_path / "board", "changes": TINY}
    assert command([], **asked) == 0
    shown = capsys.readouterr().out
    assert "headroom (exact - grpo, area under curve)" in shown and "wrote" in shown
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "board").rglob("metrics.jsonl")}
    assert len(before) == 4

    assert command(["mine.py:mine"], **asked) == 0  # what ran before is not run again
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "board").rglob("metrics.jsonl")}
    assert len(after) == 6 and before.items() <= after.items()
    found = json.loads((tmp_path / "board" / "lab.json").read_text())
    (task,) = found["tasks"]
    assert (task["task"], task["headroom"]["n"], [row["arm"] for row in task["arms"]]) == (
        "parts",
        2,
        ["grpo", "exact", "mine"],
    )
    assert task["arms"][2]["share"]["p_holm"] is not None and task["arms"][0]["tokens"] > 0
    page = (tmp_path / "board" / "report.html").read_text()
    assert "Laboratory" in page and (tmp_path / "board" / "lab.svg").read_text().startswith("<svg")
    results = json.loads((tmp_path / "board" / "results.json").read_text())
    assert [(row["setting"], row["floor"], row["ceiling"]) for row in results["headroom"]] == [("parts", "grpo", "exact")]


def test_the_phases_of_a_run_are_thirds_of_its_learning(tmp_path):
    """Means over iterations 1-2, 3-4 and 5-6; the critic's warm-up, 0 and below, counts in none of them but costs tokens."""
    plain, arms, _ = made()
    from cct.system import plain_yaml
    from cct.tools.lab.board import BASE

    written(tmp_path, plain_yaml.dump(BASE), "base.yaml")
    study, _ = load_study(written(tmp_path, plain_yaml.dump(plain), "lab.yaml"))

    class Ran:
        def __init__(self, cell):
            self.cell, self.trained = cell, True
            gain = {"grpo": 0.0, "exact": 0.2 + 0.1 * cell.seed}[cell.arm]
            self.events = [{"iteration": 0, "eval/accuracy": 0.5, "train/tokens": 100}] + [
                {"iteration": n, "exact/bias": float(n), "train/tokens": 10, "eval/accuracy": 0.5 + gain} for n in range(1, 7)
            ]

    (task,) = lab_results(study, arms, [Ran(cell) for cell in study.cells])["tasks"]
    assert task["arms"][0]["fidelity"]["bias"] == {"start": 1.5, "middle": 3.5, "end": 5.5}
    assert task["arms"][0]["tokens"] == 160
    assert task["headroom"]["mean"] == pytest.approx(0.25 * 11 / 12) and not task["clear"]
