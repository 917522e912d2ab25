"""The conformance suite catches what it is for: wrong operators, each of which fails for its own reason."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import right_operators
import torch
import wrong_operators
from torch import Tensor, nn

import cct.recipe  # noqa: F401  (registers every axis)
from cct.cli import AXES, main
from cct.critic import Critic
from cct.critic.towers import Head, Tower
from cct.evidence import Evidence
from cct.geometry import Geometry
from cct.geometry.functional import ppo_clip_loss
from cct.registry import Component
from cct.rollout import Credit, Rollout
from cct.statistic import Statistic, TokenEntropy
from cct.tools.conformance import check, properties
from cct.transport import Gate, Transport, gates, transports, whiten

ROOT = Path(__file__).parents[1]


def reward_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    return rewards.masked_fill(~mask, 0.0).flip(1).cumsum(1).flip(1).masked_fill(~mask, 0.0)


def steps_before(mask: Tensor) -> Tensor:
    return mask.long().cumsum(1) - 1


class Plain(Transport):
    """Right: the reward from each token on."""

    @property
    def claims(self) -> frozenset[str]:
        return frozenset({"causal", "linear", "split"})

    def __call__(self, rollout: Rollout) -> Credit:
        return Credit(reward_to_go(rollout.rewards, rollout.mask))


# --- wrong transports -----------------------------------------------------------------------------
class OwnRewardLate(Plain):
    """Off by one: the reward at t counts for tokens before t only."""

    def __call__(self, rollout):
        rewards = rollout.rewards.masked_fill(~rollout.mask, 0.0)
        return Credit(reward_to_go(rewards, rollout.mask) - rewards)


class RewardOfThePast(Plain):
    """Off by one: the reward of the token before counts too."""

    def __call__(self, rollout):
        to_go = reward_to_go(rollout.rewards, rollout.mask)
        packed, rank = (~rollout.mask).long().sort(dim=1, stable=True).indices, steps_before(rollout.mask)
        before = to_go.gather(1, packed).gather(1, (rank - 1).clamp(min=0))
        return Credit(before.masked_fill(~rollout.mask, 0.0))


class MultipliedMask(Plain):
    """NaN times 0."""

    def __call__(self, rollout):
        return Credit((rollout.rewards * rollout.mask).flip(1).cumsum(1).flip(1).masked_fill(~rollout.mask, 0.0))


class LeakThroughTheGap(Plain):
    """Credit decays at masked positions too."""

    def __call__(self, rollout):
        weight = 0.9 ** torch.arange(rollout.mask.shape[1])
        return Credit((reward_to_go(rollout.rewards * weight, rollout.mask) / weight).nan_to_num(0.0, 0.0, 0.0))


class LeakThroughTheGapInSteps(Plain):
    """As GAE that steps through tool tokens."""

    def __call__(self, rollout):
        credit, last = torch.zeros_like(rollout.rewards), torch.zeros(len(rollout.rewards), dtype=rollout.rewards.dtype)
        for t in range(rollout.mask.shape[1] - 1, -1, -1):
            last = rollout.rewards[:, t].masked_fill(~rollout.mask[:, t], 0.0) + 0.9 * last
            credit[:, t] = last
        return Credit(credit.masked_fill(~rollout.mask, 0.0))


class MeanOverPadding(Transport):
    """A baseline whose denominator counts padding."""

    def __call__(self, rollout):
        to_go = reward_to_go(rollout.rewards, rollout.mask)
        baseline = rollout.rewards.masked_fill(~rollout.mask, 0.0).mean(1, keepdim=True)
        return Credit((to_go - baseline).masked_fill(~rollout.mask, 0.0))


class LeftAligned(Transport):
    """Counts positions from the left end, padding or not."""

    def __call__(self, rollout):
        return Credit(reward_to_go(rollout.rewards, rollout.mask) * (1 + torch.arange(rollout.mask.shape[1]) % 2))

    @property
    def waives(self):
        return {"gap": "to be caught by padding alone"}


class FirstRowIsTheBaseline(Transport):
    """Rows are shuffled; none is special."""

    def __call__(self, rollout):
        to_go = reward_to_go(rollout.rewards, rollout.mask)
        return Credit((to_go - rollout.scores[0]).masked_fill(~rollout.mask, 0.0))


class Cancels(Transport):
    """Adds a large number and takes it away again."""

    def __call__(self, rollout):
        return Credit((reward_to_go(rollout.rewards, rollout.mask) / 3 + 1e4 - 1e4).masked_fill(~rollout.mask, 0.0))


class EveryPair(Plain):
    """A [B, T, T] matrix."""

    def __call__(self, rollout):
        after = torch.ones(rollout.mask.shape[1], rollout.mask.shape[1], dtype=rollout.rewards.dtype).tril()
        rewards = rollout.rewards.masked_fill(~rollout.mask, 0.0)
        return Credit((rewards.unsqueeze(2) * after).sum(1).masked_fill(~rollout.mask, 0.0))


class DividesByAProduct(Plain):
    """A discount to the power of the position, which is 0 after a few thousand tokens."""

    @property
    def claims(self):
        return frozenset()

    def __call__(self, rollout):
        weight = 0.9 ** steps_before(rollout.mask).clamp(min=0).to(rollout.rewards.dtype)
        return Credit((reward_to_go(rollout.rewards * weight, rollout.mask) / weight).masked_fill(~rollout.mask, 0.0))


class GlobalGenerator(Plain):
    """Draws where the run's seed does not reach."""

    def __call__(self, rollout):
        return Credit(reward_to_go(rollout.rewards, rollout.mask) + 0 * torch.rand(1).to(rollout.rewards.dtype))


class WritesIntoTheRollout(Plain):
    """Zeroes the caller's tensor."""

    def __call__(self, rollout):
        rollout.rewards[~rollout.mask] = 0.0
        return Credit(reward_to_go(rollout.rewards, rollout.mask))


class NoiseOverItsOwnSize(Transport):
    """Equal scores differ from their mean by rounding, which is then divided by its own deviation."""

    needs: ClassVar = frozenset({"groups"})

    def __call__(self, rollout):
        scores, same = rollout.scores, (rollout.groups.unsqueeze(0) == rollout.groups.unsqueeze(1)) & rollout.valid
        share = same.to(scores.dtype) / same.sum(1, keepdim=True).clamp(min=1)
        mean = share @ scores
        deviation = (share @ scores.square() - mean.square()).clamp(min=0).sqrt()
        centred = (scores - mean) / (deviation + 1e-9)
        return Credit(centred.unsqueeze(1) * rollout.mask)


class GroupsAreIndices(Transport):
    """Group numbers need not begin at 0."""

    def __call__(self, rollout):
        total = torch.zeros(len(rollout.groups) + 2, dtype=rollout.scores.dtype).index_add_(0, rollout.groups, rollout.scores)
        return Credit(total[rollout.groups].unsqueeze(1) * rollout.mask)

    @property
    def waives(self):
        return {"outcome": "not what this one is about"}


class LosesTheLastReward(Transport):
    """The reward of the last token vanishes."""

    def __call__(self, rollout):
        to_end = rollout.mask.flip(1).cumsum(1).flip(1)
        return Credit(reward_to_go(rollout.rewards.masked_fill(to_end <= 1, 0.0), rollout.mask))


class ClaimsToBeLinear(Transport):
    """Clips the reward, and says that it does not."""

    claims: ClassVar = frozenset({"linear"})

    def __call__(self, rollout):
        return Credit(reward_to_go(rollout.rewards.clamp(max=1.0), rollout.mask))


class ClaimsToSplit(Transport):
    """Whitens the batch, and says that groups do not know each other."""

    claims: ClassVar = frozenset({"split"})

    def __call__(self, rollout):
        return Credit(whiten(reward_to_go(rollout.rewards, rollout.mask), rollout.mask))


class ForgetsTheCritic(Plain):
    """Uses values and gives the critic nothing to learn from."""

    needs: ClassVar = frozenset({"values"})


class WaivesTheMask(MultipliedMask):
    """Tries to get out of a core property."""

    waives: ClassVar = {"noise": "my masks are clean"}


# --- wrong gates ----------------------------------------------------------------------------------
class PeeksAtItsOwnToken(Gate):
    """log-probability at t is of token t itself."""

    def __call__(self, rollout):
        return rollout.logprobs.exp()


class PeeksAtTheNextRead(Gate):
    """Off by one: the statistic read after token t."""

    def __call__(self, rollout):
        packed, rank = (~rollout.mask).long().sort(dim=1, stable=True).indices, steps_before(rollout.mask)
        last = rollout.mask.sum(1, keepdim=True) - 1
        following = torch.minimum(rank + 1, last).clamp(min=0)
        entropy = rollout.stats["entropy"].masked_fill(~rollout.mask, 0.0)
        return entropy.gather(1, packed).gather(1, following)


class KnowsTheLength(Gate):
    """Where a token stands between the first and the last."""

    def __call__(self, rollout):
        return (steps_before(rollout.mask) / rollout.mask.sum(1, keepdim=True).clamp(min=1)).clamp(0, 1)


class AmplifiesCredit(Gate):
    """Above 1."""

    def __call__(self, rollout):
        return 1.0 + rollout.stats["entropy"]


# --- wrong geometries -----------------------------------------------------------------------------
class OwnMean(Geometry):
    """Divides by the tokens of the micro-batch."""

    def __call__(self, logprobs, old_logprobs, advantages, mask, reference_logprobs):
        loss, metrics = ppo_clip_loss(logprobs, old_logprobs, advantages, mask)
        return loss / mask.sum().clamp(min=1), metrics


class MultipliedLoss(Geometry):
    """NaN times 0, in the backward too."""

    def __call__(self, logprobs, old_logprobs, advantages, mask, reference_logprobs):
        return -(logprobs - old_logprobs).clamp(-20, 20).exp() * advantages * mask, {}


class Overflows(Geometry):
    """exp of any log-ratio."""

    def __call__(self, logprobs, old_logprobs, advantages, mask, reference_logprobs):
        return -(logprobs - old_logprobs).masked_fill(~mask, 0.0).exp() * advantages.masked_fill(~mask, 0.0), {}


class WrongSign(Geometry):
    """Unlearns."""

    def __call__(self, logprobs, old_logprobs, advantages, mask, reference_logprobs):
        loss, metrics = ppo_clip_loss(logprobs, old_logprobs, advantages, mask)
        return -loss, metrics


class LiveMetrics(Geometry):
    """A metric that holds the graph."""

    def __call__(self, logprobs, old_logprobs, advantages, mask, reference_logprobs):
        loss, metrics = ppo_clip_loss(logprobs, old_logprobs, advantages, mask)
        return loss, metrics | {"loss": loss}


# --- wrong critics --------------------------------------------------------------------------------
class _Reads(Tower):
    reads_hidden = (2,)

    def __init__(self, actor, bounds):
        super().__init__(Head())
        self.out = nn.Linear(actor.config.hidden_size, 1)

    def forward(self, trace):
        hidden = trace.hidden_states[2].masked_fill((trace.attention_mask == 0).unsqueeze(2), -9.0)
        return self.out(hidden.flip(1).cummax(1).values.flip(1)).squeeze(2).float()


class ReadsAhead(Critic):
    """Keeps the maximum over what is still to come."""

    output: str = "scalar"

    def build(self, actor, bounds):
        return _Reads(actor, bounds)


class _Shared(Tower):
    def __init__(self, actor, bounds):
        super().__init__(Head())
        self.body, self.out = actor.base_model, nn.Linear(actor.config.hidden_size, 1)

    def forward(self, trace):
        places = (trace.attention_mask.cumsum(1) - 1).clamp(min=0)
        body = self.body(input_ids=trace.input_ids, attention_mask=trace.attention_mask, position_ids=places, use_cache=False)
        return self.out(body.last_hidden_state).squeeze(2).float()


class TeachesTheActor(Critic):
    """Shares the actor's body instead of a copy."""

    output: str = "scalar"

    def build(self, actor, bounds):
        return _Shared(actor, bounds)


# --- wrong evidence -------------------------------------------------------------------------------
COUNT = itertools.count()


class Moody(Evidence):
    """Judges the same response differently the next time."""

    def __call__(self, prompt, response):
        return float(next(COUNT) % 2)


class Draws(Evidence):
    """From a generator that no seed reaches."""

    def __call__(self, prompt, response):
        return 0.0 * random.random()


class BeyondItsBounds(Evidence):
    """A bounded critic would never learn it."""

    def __call__(self, prompt, response):
        return float(len(response.text))


class OneRewardTooFew(Evidence):
    """Per token, off by one."""

    def __call__(self, prompt, response):
        return [0.0] * (len(response.tokens) - 1)


class OtherInABatch(Evidence):
    """Ranks the batch."""

    def __call__(self, prompt, response):
        return 1.0

    def judge_batch(self, prompts, responses):
        return [1.0 / (1 + place) for place in range(len(responses))]


FAULTS: list[tuple[type[Component], str, str]] = [
    (OwnRewardLate, "causal", "own reward does not count"),
    (RewardOfThePast, "causal", "with 1 more reward at token"),
    (MultipliedMask, "noise", "with nan at masked positions"),
    (LeakThroughTheGap, "gap", "with the gaps removed"),
    (LeakThroughTheGapInSteps, "gap", "with the gaps removed"),
    (MeanOverPadding, "padding", "more positions of padding"),
    (LeftAligned, "padding", "with the padding on the left"),
    (FirstRowIsTheBaseline, "order", "in the order"),
    (Cancels, "precision", "float32 against float64"),
    (EveryPair, "length", "memory grows faster"),
    (DividesByAProduct, "length", "not finite"),
    (GlobalGenerator, "determinism", "global generator"),
    (WritesIntoTheRollout, "determinism", "it wrote into rollout.rewards"),
    (NoiseOverItsOwnSize, "equal", "the same reward for every response"),
    (GroupsAreIndices, "groups", "it raised IndexError"),
    (LosesTheLastReward, "outcome", "the reward of the last token"),
    (ClaimsToBeLinear, "linear", "with two rewards added up"),
    (ClaimsToSplit, "split", "alone"),
    (ForgetsTheCritic, "form", "no value_targets"),
    (PeeksAtItsOwnToken, "future", "later tokens"),
    (PeeksAtTheNextRead, "future", "later tokens"),
    (KnowsTheLength, "future", "the number of later tokens"),
    (AmplifiesCredit, "form", "leaves [0, 1]"),
    (OwnMean, "split", "alone in a micro-batch"),
    (MultipliedLoss, "noise", "with nan at masked positions"),
    (Overflows, "extreme", "log-ratio of 200"),
    (WrongSign, "moves", "the gradient by the log-probabilities is"),
    (LiveMetrics, "form", "metrics are detached"),
    (ReadsAhead, "future", "with other tokens from there on"),
    (TeachesTheActor, "gradient", "reaches the actor"),
    (Moody, "determinism", "judged again"),
    (Draws, "determinism", "global generator"),
    (BeyondItsBounds, "form", "outside its bounds"),
    (OneRewardTooFew, "form", "rewards for"),
    (OtherInABatch, "batch", "in a batch"),
]
FAULTS += wrong_operators.FAULTS
# What is wrong at one place is wrong at others: a form at every size, a sign wherever anything is pushed.
ALSO = {
    "form": {"noise", "short", "length", "extreme", "batch", "known", "padding", "split"},
    "known": {"padding"},
    "better": {"bootstrap"},
    "bootstrap": {"targets"},
    "clip": {"weight"},
    "moves": {"clip", "weight"},
    "future": {"measured", "padding"},
    "split": {"future", "moves", "known", "padding"},
    "gap": {"garbage", "observation", "cut"},
    "observation": {"cut"},
    "padding": {"split", "observation", "cut"},
    "order": {"cut"},
    "noise": {"gap", "garbage", "observation", "padding", "cut"},
    "precision": {"extreme", "targets"},
    "learns": {"noise"},
}


def failures(operator: Component, examples: int = 30) -> dict[str, str]:
    return {v.property: v.why for v in check(operator, examples=examples, shrink=False) if v.outcome == "FAILED"}


@pytest.mark.parametrize(("fault", "name", "why"), FAULTS, ids=[fault.__name__ for fault, _, _ in FAULTS])
def test_a_wrong_operator_fails_for_its_own_reason(fault, name, why):
    found = failures(fault())
    assert name in found and why in found[name], found
    assert found.keys() <= {name} | ALSO.get(name, set()), found


@pytest.mark.parametrize("operator", right_operators.RIGHT, ids=lambda operator: operator.__name__)
def test_a_right_operator_of_an_unusual_kind_is_accepted(operator):
    assert failures(operator()) == {}


def test_every_property_that_can_fail_has_a_planted_fault():
    """Of each axis; but those that are there to say why they do not apply."""
    planted = {
        axis: {name for fault, name, _ in FAULTS if issubclass(fault, axis)}
        for axis in (Transport, Gate, Statistic, Geometry, Critic, Evidence)
    }
    for operator in (Plain(), AmplifiesCredit(), TokenEntropy(), wrong_operators.RatioTwice(), TeachesTheActor(), Moody()):
        axis = next(axis for axis in planted if isinstance(operator, axis))
        shared = set().union(*(names for other, names in planted.items() if {axis, other} <= {Transport, Gate}))
        names = {each.name for each in properties(operator) if not each.excused(operator).startswith("the actor's padding")}
        assert names - planted[axis] - shared <= SEEN_ELSEWHERE.get(axis, set())


# Properties without a fault of their own: what breaks them breaks another one at every size.
SEEN_ELSEWHERE = {
    Transport: {"short"},
    Gate: {"short"},
    Geometry: {"gap", "order", "packed", "gradient", "short", "length"},
    Critic: {"order", "built"},
}


def test_state_and_chance_are_not_blamed_on_another_property():
    for operator in (wrong_operators.RunningMean(), wrong_operators.Jitter(), wrong_operators.OwnGenerator()):
        verdicts = {v.property: v for v in check(operator, examples=3, shrink=False)}
        assert verdicts["determinism"].outcome == "FAILED"
        assert verdicts["noise"].outcome == "does not apply" and "since `determinism` fails" in verdicts["noise"].why
        (alone,) = check(operator, examples=3, only="noise", shrink=False)
        assert alone == verdicts["noise"]


def test_evidence_that_remembers_is_caught_however_often_it_was_asked_before():
    check(wrong_operators.Novelty(), examples=12, only="form", shrink=False)
    for _ in range(2):
        assert failures(wrong_operators.Novelty()).keys() == {"determinism"}


def test_what_can_be_waived_says_how():
    (verdict,) = check(wrong_operators.NegatesFailures(), examples=12, only="better", shrink=False)
    assert verdict.why.endswith("waives = {'better': 'why'}")
    (verdict,) = check(MultipliedMask(), examples=12, only="noise", shrink=False)
    assert "waives" not in verdict.why


def test_claims_and_waivers_of_another_type_are_a_broken_contract():
    class Listed(Plain):
        claims: ClassVar = "linear"
        waives: ClassVar = ["gap"]

    (verdict,) = check(Listed(), examples=1)
    assert verdict.property == "contract" and "claims is 'linear', waives ['gap']" in verdict.why


def test_what_no_one_can_get_out_of_and_what_is_no_property():
    class Unknown(Plain):
        claims: ClassVar = frozenset({"causality"})

    assert "claims 'causality'" in failures(Unknown(), 1)["contract"]
    found = failures(WaivesTheMask())
    assert found.keys() == {"contract", "noise"} and "waives 'noise'" in found["contract"]


def test_a_right_operator_fails_nothing_and_its_claims_are_looked_at():
    verdicts = {v.property: v for v in check(Plain(), examples=30)}
    assert {v.outcome for v in verdicts.values()} == {"ok", "does not apply"}
    assert [name for name, v in verdicts.items() if v.outcome != "ok"] == ["bootstrap", "targets", "equal"]

    class Modest(Plain):
        claims: ClassVar = frozenset()

    assert "would hold" in next(v.why for v in check(Modest(), only="causal"))
    assert "does not hold" in next(v.why for v in check(transports["grpo"](), only="causal"))


def test_what_is_waived_is_said_with_its_reason():
    (verdict,) = check(gates["shuffle"](), only="future")
    assert verdict.outcome == "does not apply" and "it moves gates between tokens" in verdict.why


def test_the_smallest_failing_case_can_be_pasted():
    (verdict,) = check(LeakThroughTheGap(), only="gap")
    pasted: dict = {"torch": torch}
    exec(verdict.example, pasted)
    assert [True, False, True] in pasted["mask"].tolist() and pasted["rewards"].abs().sum() > 0
    assert pasted["mask"].dtype == torch.bool and pasted["rewards"].dtype == torch.float32
    assert "values" not in pasted  # it reads none
    (verdict,) = check(ForgetsTheCritic(), only="form")
    exec(verdict.example, pasted)
    assert pasted["rewards"].shape == pasted["mask"].shape == (1, 1)
    (verdict,) = check(PeeksAtTheNextRead(), only="future")
    exec(verdict.example, pasted)
    assert pasted["stats"]["entropy"].shape == (1, 2)


def test_the_verdicts_are_the_same_every_time():
    assert check(MeanOverPadding(), examples=20) == check(MeanOverPadding(), examples=20)


def test_every_property_has_a_name_of_its_own():
    for operator in (Plain(), AmplifiesCredit(), TokenEntropy(), OwnMean(), TeachesTheActor(), Moody()):
        names = [each.name for each in properties(operator)]
        assert len(names) == len(set(names)) and all(each.says for each in properties(operator))


# --- the command ----------------------------------------------------------------------------------
WRONG = '''
from cct.rollout import Credit
from cct.transport import Transport, transports

@transports.register("conformance_wrong")
class Wrong(Transport):
    """Multiplies by the mask."""
    scale: float = 1.0
    """Factor."""
    def __call__(self, rollout):
        return Credit(rollout.rewards * rollout.mask * self.scale)
'''


def test_the_command_judges_a_file_and_ends_with_1_where_it_fails(tmp_path, capsys):
    (tmp_path / "wrong.py").write_text(WRONG)
    for name in ("conformance_wrong", "Wrong"):
        assert main(["check-operator", f"{tmp_path / 'wrong.py'}:{name}", "--examples", "20", "--set", "scale=2"]) == 1
        printed = capsys.readouterr().out
        assert "  FAILED          noise        the content of masked positions" in printed
        assert "smallest failing case:" in printed and "mask = torch.tensor([[0]]).bool()" in printed
        assert printed.endswith("transport conformance_wrong: failed: noise\n")


def test_a_name_that_a_file_lacks_is_answered_by_those_that_it_has(tmp_path, capsys):
    (tmp_path / "other.py").write_text(WRONG.replace("conformance_wrong", "conformance_other"))
    assert main(["check-operator", f"{tmp_path / 'other.py'}:gae"]) == 2
    assert capsys.readouterr().err.endswith("is called 'gae'; there are: conformance_other\n")
    del transports._classes["conformance_other"]


def test_the_command_ends_with_0_where_nothing_fails(capsys):
    assert main(["check-operator", "gae", "--set", "whiten=false", "--set", "lam=0.9", "--examples", "5"]) == 0
    printed = capsys.readouterr().out
    assert (
        "ok              causal" in printed and "does not apply  equal" in printed and printed.endswith("transport gae: ok\n")
    )


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["gea"], "did you mean 'gae'"),
        (["nope.py:gae"], "nope.py not found"),
        (["nope.py"], "nope.py: name a part of the file, nope.py:NAME"),
        (["gae", "--set", "lam=3"], "transport.lam: Input should be less than or equal to 1"),
        (["gae", "--set", "lamb=0"], "did you mean 'lam'"),
        (["gae", "--examples", "0"], "at least 1"),
        (["constant"], "either from gamma or from the gate"),
        (["reward_model", "--set", "path=./nowhere"], "holds no model"),
    ],
)
def test_the_command_ends_with_2_where_nothing_can_be_said(capsys, argv, says):
    assert main(["check-operator", *argv]) == 2
    assert says in capsys.readouterr().err


def test_without_hypothesis_the_extra_is_named():
    code = "import sys; sys.modules['hypothesis'] = None\nfrom cct.cli import main\nsys.exit(main(['check-operator', 'gae']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 2 and "pip install -e '.[check]'" in done.stderr


def test_the_catalogue_is_up_to_date(capsys):
    assert main(["ls", "--markdown"]) == 0
    page = capsys.readouterr().out
    written = (ROOT / "docs" / "catalogue.md").read_text(encoding="utf-8")
    assert page == written, "python -m cct.cli ls --markdown > docs/catalogue.md"
    assert all(f"\n## {axis}\n" in page for axis in AXES) and "\n| `gae` | Generalised advantage" in page
