"""`cct new`: a transport of one's own, with a recipe that trains it and a test that passes."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path

import yaml

from cct.recipe import RecipeError
from cct.registry import load_entry_points

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

    def __call__(self, rollout: Rollout) -> Credit:
        from cct.transport import group_advantage

        outcome = group_advantage(rollout.scores, rollout.groups, valid=rollout.valid)  # [B]
        to_end = rollout.mask.flip(1).cumsum(1).flip(1) - 1  # [B, T] tokens from t to the last one
        return Credit(outcome.unsqueeze(1) * 0.5 ** (to_end / self.half_life) * rollout.mask)
'''

RECIPE = """# `cct run {name}.yaml` trains {name} on chain arithmetic; every other part is as in the shipped recipes.
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

TEST = '''"""What {name} promises."""

from pathlib import Path

import torch

from cct.recipe import load_recipe
from cct.rollout import Rollout

HERE = Path(__file__).parent


def rollout(rewards: list[float], length: int = 4) -> Rollout:
    """Responses of `length` tokens to one prompt, rewarded at the end."""
    rows = len(rewards)
    reward, mask = torch.zeros(rows, length), torch.ones(rows, length, dtype=torch.bool)
    reward[:, -1] = torch.tensor(rewards)
    ids = torch.zeros(rows, length + 1, dtype=torch.long)
    groups = torch.zeros(rows, dtype=torch.long)
    return Rollout(ids, torch.ones_like(ids), mask, reward, groups, ~mask[:, 0], torch.zeros(rows, length))


def transport():
    return load_recipe(HERE / "{name}.yaml").transport


def test_the_better_response_gets_credit():
    advantages = transport()(rollout([1.0, 0.0])).advantages
    assert (advantages[0] > 0).all() and (advantages[1] < 0).all()


def test_equal_responses_get_none():
    assert transport()(rollout([1.0, 1.0])).advantages.eq(0).all()


def test_masked_tokens_change_nothing():
    clean = rollout([1.0, 0.0])
    noisy = clean.replace(mask=clean.mask.clone(), rewards=clean.rewards.clone())
    noisy.mask[:, 0] = False
    noisy.rewards[:, 0] = float("nan")
    credit = transport()(noisy).advantages
    assert credit[:, 0].eq(0).all() and torch.equal(credit[:, 1:], transport()(clean).advantages[:, 1:])
'''


def new_transport(name: str, folder: Path) -> list[Path]:
    """Write NAME.py, NAME.yaml and test_NAME.py. Raises RecipeError on a bad name; never overwrites."""
    from cct.transport import transports

    as_text = isinstance(yaml.safe_load(name), str) if re.fullmatch(r"[A-Za-z]\w{0,63}", name, re.ASCII) else False
    if not as_text or keyword.iskeyword(name):
        raise RecipeError(
            f"'{name}' cannot name a module and a recipe; use letters, digits, underscores, for example half_life"
        )
    load_entry_points()
    if name in transports.names():
        raise RecipeError(f"transport '{name}' exists already; choose another name")
    cls = "".join(word.capitalize() for word in name.split("_")) + "Transport"
    texts = {f"{name}.py": TRANSPORT, f"{name}.yaml": RECIPE, f"test_{name}.py": TEST}
    for file in texts:
        if (folder / file).exists():
            raise RecipeError(f"{folder / file} exists already; nothing was written")
    if name.startswith("test_") or name == "conftest" or importlib.util.find_spec(name) is not None:
        raise RecipeError(f"'{name}' is a module that pytest or Python would import in its place; choose another name")
    for file, text in texts.items():
        (folder / file).write_text(text.format(name=name, cls=cls), encoding="utf-8")
    return [folder / file for file in texts]
