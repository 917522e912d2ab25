"""`cct new`: a transport, a statistic or an environment of your own, with a recipe that trains and a test that passes."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path

from cct.recipe import RecipeError
from cct.registry import REGISTRIES, load_entry_points
from cct.system.files import WriteError, remove, write_text
from cct.system.plain_yaml import load

TRANSPORT = '''"""A transport of my own."""

from pydantic import Field

from cct.rollout import Credit, Rollout
from cct.transport import Transport, transports


@transports.register("{name}")
class {cls}(Transport):
    """Outcome credit halves every `half_life` tokens before the end."""

    half_life: float = Field(64.0, gt=0)
    """Tokens over which credit halves."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({{"groups"}})  # responses are compared within a prompt; `values` would ask for a critic

    @property
    def claims(self) -> frozenset[str]:
        return frozenset({{"split"}})  # no prompt's credit depends on another's; the conformance suite looks

    def __call__(self, rollout: Rollout) -> Credit:
        from cct.transport import group_advantage

        outcome = group_advantage(rollout.scores, rollout.groups, valid=rollout.valid)  # [B]
        to_end = rollout.mask.flip(1).cumsum(1).flip(1) - 1  # [B, T] tokens from t to the last one
        return Credit(outcome.unsqueeze(1) * 0.5 ** (to_end / self.half_life) * rollout.mask)
'''

TRANSPORT_RECIPE = """# `cct run {name}.yaml` trains {name} on chain arithmetic, with a constant learning rate.
name: {name}
plugins: [./{name}.py]
task: {{use: chain_arithmetic, steps: 6}}
policy: {{use: scratch, warm_start: {{steps: 700}}}}
generation: {{use: transformers, max_new_tokens: 48}}
evidence: [exact_match]
transport: {{use: {name}, half_life: 64}}
geometry: {{use: ppo_clip}}
training: {{iterations: 30, prompts_per_iteration: 16, responses_per_prompt: 16, minibatch_size: 64}}
"""

TRANSPORT_TEST = '''"""What {name} promises."""

from pathlib import Path

import pytest
import torch

from cct.tools.conformance import check
from cct.loading import load_recipe
from cct.rollout import Rollout

TRANSPORT = load_recipe(Path(__file__).parent / "{name}.yaml").transport


@pytest.mark.parametrize("verdict", check(TRANSPORT), ids=lambda verdict: verdict.property)
def test_it_conforms(verdict):
    assert verdict.outcome != "FAILED", f"{{verdict.says}}: {{verdict.why}}\\n{{verdict.example}}"


def test_the_better_response_gets_credit():
    rewards, mask = torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool)
    rewards[0, -1] = 1.0  # of two responses to one prompt, the first is right
    ids, groups = torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    rollout = Rollout(ids, torch.ones_like(ids), mask, rewards, groups, ~mask[:, 0], torch.zeros(2, 4))
    advantages = TRANSPORT(rollout).advantages
    assert (advantages[0] > 0).all() and (advantages[1] < 0).all()
'''


STATISTIC = '''"""A statistic of my own."""

from typing import TYPE_CHECKING

from pydantic import Field

from cct.statistic import Statistic, statistics

if TYPE_CHECKING:
    from torch import Tensor

    from cct.statistic import Forward


@statistics.register("{name}")
class {cls}(Statistic):
    """Probability of the `top` likeliest tokens where token t is drawn."""

    top: int = Field(1, ge=1)
    """Tokens that count."""

    reads = frozenset({{"distribution"}})  # of the forward; `attention` and `hidden_states` are the others
    knows = "before"  # only tokens before t, so that a gate may read it; the conformance suite looks

    def measure(self, forward: "Forward") -> "Tensor":
        likeliest = forward.distribution.topk(min(self.top, forward.distribution.shape[-1])).values  # [B, T, top]
        return likeliest.exp().sum(-1)
'''

STATISTIC_RECIPE = """# `cct run {name}.yaml` trains on chain arithmetic; {name} is the gate's statistic, and logged.
name: {name}
plugins: [./{name}.py]
task: {{use: chain_arithmetic, steps: 6}}
policy: {{use: scratch, warm_start: {{steps: 700}}}}
generation: {{use: transformers, max_new_tokens: 48}}
evidence: [exact_match]
critic: tac
transport: {{use: comp_gae, gate: {{use: statistic, of: {{use: {name}, top: 2}}}}}}
geometry: {{use: ppo_clip}}
training: {{iterations: 30, prompts_per_iteration: 16, responses_per_prompt: 16, minibatch_size: 64}}
logging: {{statistics: [{{use: {name}, top: 2}}]}}
"""

STATISTIC_TEST = '''"""What {name} promises."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cct.loading import load_recipe
from cct.tools.conformance import check

(STATISTIC,) = load_recipe(Path(__file__).parent / "{name}.yaml").logging.statistics


@pytest.mark.parametrize("verdict", check(STATISTIC), ids=lambda verdict: verdict.property)
def test_it_conforms(verdict):
    assert verdict.outcome != "FAILED", f"{{verdict.says}}: {{verdict.why}}\\n{{verdict.example}}"


def test_the_two_likeliest_tokens_count():
    forward = SimpleNamespace(distribution=torch.tensor([[[0.5, 0.2, 0.3]]]).log())  # one token, three to choose from
    assert STATISTIC.measure(forward).tolist() == [[pytest.approx(0.8)]]
'''

ENVIRONMENT = '''"""An environment of my own."""

import random
from collections.abc import Sequence

from pydantic import Field

from cct.environment import Action, Environment, Episode, Observation, Start, Step, environments
from cct.rollout import Prompt


@environments.register("{name}")
class {cls}(Environment):
    """Two digits each turn; the policy earns for naming the greater one."""

    max_turns: int = Field(3, ge=1, le=100)
    """Turns of an episode."""
    noise: float = Field(0.6, ge=0, le=1)
    """How often the expert that demonstrates names the other digit."""

    def open(self, prompt: Prompt, seed: int) -> Episode:
        return {cls}Episode(self.max_turns, prompt.meta["seed"])

    def expert(self, prompt: Prompt, seen: Sequence[Observation], said: Sequence[str], rng: random.Random) -> str:
        return (min if rng.random() < self.noise else max)(str(seen[-1]))

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({{"environment", "demonstrations"}})  # it has an expert, from whom a policy can start

    @property
    def alphabet(self) -> str:
        return "0123456789"  # of observations and actions; a policy without a chat template is made of it


class {cls}Episode(Episode):
    def __init__(self, turns: int, level: int):
        self.turns, self.left, self.rng = turns, turns, random.Random(level)

    def deal(self) -> str:
        self.digits = "".join(self.rng.sample("0123456789", 2))
        return self.digits

    def reset(self) -> Start:
        return Start(self.deal(), state=f"{{self.left}} left")

    def step(self, action: Action) -> Step:
        reward = (action.text.strip() == max(self.digits)) / self.turns
        self.left -= 1
        return Step(self.deal(), reward, state=f"{{self.left}} left") if self.left else Step(reward=reward, done=True)
'''

ENVIRONMENT_RECIPE = """# `cct run {name}.yaml` trains a small policy in {name}, from what its expert shows.
name: {name}
plugins: [./{name}.py]
task: {{use: seeds}}
policy: {{use: scratch, warm_start: {{steps: 300}}}}
generation: {{use: transformers, max_new_tokens: 4}}
environment: {{use: {name}}}
evidence: [environment]
transport: {{use: grpo}}
geometry: {{use: ppo_clip}}
training: {{iterations: 30, prompts_per_iteration: 16, responses_per_prompt: 16, minibatch_size: 64}}
"""

ENVIRONMENT_TEST = '''"""What {name} promises."""

from pathlib import Path

import pytest

from cct.environment import Action, EpisodePool, environments
from cct.registry import load_plugin
from cct.rollout import Prompt
from cct.tools.conformance import check

load_plugin("{name}.py", Path(__file__).parent)
ENVIRONMENT = environments["{name}"](max_turns=3)


@pytest.mark.parametrize("verdict", check(ENVIRONMENT), ids=lambda verdict: verdict.property)
def test_it_conforms(verdict):
    assert verdict.outcome != "FAILED", f"{{verdict.says}}: {{verdict.why}}\\n{{verdict.example}}"


def test_the_greater_digit_is_rewarded():
    with EpisodePool(ENVIRONMENT) as pool:
        seen, rewards = pool.start([(Prompt("", meta={{"seed": 0}}), 0)])[0].observation, []
        for choose in (max, min, max):
            step = pool.step([0], [Action(choose(seen))])[0]
            rewards.append(step.reward)
            seen = step.observation
    assert rewards == [1 / 3, 0.0, 1 / 3] and step.done
'''

TEMPLATES = {  # axis -> its module, recipe and test
    "transport": (TRANSPORT, TRANSPORT_RECIPE, TRANSPORT_TEST),
    "statistic": (STATISTIC, STATISTIC_RECIPE, STATISTIC_TEST),
    "environment": (ENVIRONMENT, ENVIRONMENT_RECIPE, ENVIRONMENT_TEST),
}


def new_part(axis: str, name: str, folder: Path) -> list[Path]:
    """Write NAME.py, NAME.yaml and test_NAME.py. Raises RecipeError on a bad name; never overwrites."""
    as_text = isinstance(load(name)[0], str) if re.fullmatch(r"[A-Za-z]\w{0,63}", name, re.ASCII) else False
    if not as_text or keyword.iskeyword(name):
        raise RecipeError(
            f"'{name}' cannot name a module and a recipe; use letters, digits and underscores, for example half_life"
        )
    load_entry_points()
    if name in REGISTRIES[axis].names():
        raise RecipeError(f"{axis} '{name}' exists already; choose another name")
    cls = "".join(word.capitalize() for word in name.split("_")) + axis.capitalize()
    texts = dict(zip((f"{name}.py", f"{name}.yaml", f"test_{name}.py"), TEMPLATES[axis], strict=True))
    for file in texts:
        if (folder / file).exists():
            raise RecipeError(f"{folder / file} exists already; nothing was written")
    if name.startswith("test_") or name == "conftest" or importlib.util.find_spec(name) is not None:
        raise RecipeError(f"'{name}' is a module that pytest or Python would import instead; choose another name")
    try:
        for file, text in texts.items():
            write_text(folder / file, text.format(name=name, cls=cls))
    except WriteError:
        for file in texts:
            remove(folder / file)
        raise
    return [folder / file for file in texts]
