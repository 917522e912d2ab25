"""A run folder of two episodes by hand: one in a single row, one whose history was rewritten after its first turn."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from cct.loading import dump_recipe, load_recipe
from cct.recipe import Logging
from cct.rollout import Rollout
from cct.run_folder import RunFolder

RECIPE = Path(__file__).parents[1] / "recipes" / "guess_number_grpo.yaml"
SAID = {
    "iteration": 1, "prompt": "?", "response": "2", "reward": 1.25, "advantage": 0.5, "finished": True,
    "turns": [
        {"text": "8", "tokens": 2, "finished": True, "observation": "<b>", "rewards": {"hint": 0.25}, "state": "1-15/2"},
        {"text": "", "tokens": 1, "finished": False, "observation": "", "rewards": {"": 1.0}, "state": None},
    ],
}  # fmt: skip


def conversations(folder: Path, *sets: str) -> RunFolder:
    """One: `?` `8<end>`, then anew `?8>` `2<end>`, rewards 0.25 and 1. The other: `?` `3<end>` `<` `4<end>`, no reward."""
    recipe = load_recipe(RECIPE, ["transport=rloo", *sets])
    tokenizer = recipe.policy.tokenizer(alphabet=recipe.alphabet)

    def ids(text: str) -> list[int]:
        tokens = [["<end>", *part] if number else [*part] for number, part in enumerate(text.split("<end>"))]
        return tokenizer.convert_tokens_to_ids([token for part in tokens for token in part])

    rows = [("?", "3<end><4<end>", [0, 0, -1, 1, 1]), ("?", "8<end>", [0, 0]), ("?8>", "2<end>", [1, 1])]
    input_ids, attention, turns = torch.zeros(3, 8).long(), torch.zeros(3, 8).long(), torch.full((3, 5), -1)
    for row, (prompt, said, of_token) in enumerate(rows):
        tokens = ids(prompt) + ids(said)
        first = 3 - len(prompt)
        input_ids[row, first : first + len(tokens)] = torch.tensor(tokens)
        attention[row, first : first + len(tokens)] = 1
        turns[row, : len(of_token)] = torch.tensor(of_token)
    hint, rewards = torch.zeros(3, 5), torch.zeros(3, 5)
    hint[1, 1], rewards[1, 1], rewards[2, 1] = 0.25, 0.25, 1.0
    rollout = Rollout(
        input_ids,
        attention,
        turns >= 0,
        rewards,
        torch.zeros(3).long(),
        torch.tensor([True, False, False]),
        torch.zeros(3, 5),
        episodes=torch.tensor([1, 0, 0]),
        order=torch.tensor([0, 0, 1]),
        turns=turns,
        components={"hint": hint},
    )
    run = RunFolder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    run.recipe_file.write_text(dump_recipe(recipe))
    run.store(rollout, 1, Logging())
    run.samples_file.write_text(json.dumps(SAID) + "\n")
    events = [{"train/reward": 0.5, "episode/turns": 2.0, "episode/reward/hint": 0.25}, {"train/reward": 1.0}]
    events[1]["environment/errors"] = 3.0
    run.metrics_file.write_text("".join(json.dumps({"iteration": n, **event}) + "\n" for n, event in enumerate(events, 1)))
    return run
