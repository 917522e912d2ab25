"""The export before the run: what would fail at its end fails before its first iteration."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from cct.policy import Policy, end_tokens, policies
from cct.policy.weights import save, shapes
from cct.preflight import message_of
from cct.recipe import Recipe, RecipeError

WHOLE = 2**30  # bytes of weights that a rehearsal writes and reads back whole, in a second or two


def rehearse(
    recipe: Recipe, actor: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, most: int = WHOLE
) -> None:
    """Export the policy as it will be after training, into a temporary folder inside `folder`, and load it back.

    Of more than `most` bytes of weights one column each is written: what can fail depends on their names, on which are tied
    and on what stands beside them, and a large model takes minutes to write. Raises RecipeError where a run would end without
    its policy.
    """
    whole = sum(weight.nbytes for weight in actor.state_dict().values()) <= most
    with tempfile.TemporaryDirectory(prefix=".export-", suffix=".tmp", dir=folder) as place:
        try:
            save(actor, tokenizer, Path(place), columns=None if whole else 1)
            policy = _of_folder(recipe.policy, Path(place).resolve())
            if whole:
                again, its = policy.load(alphabet="", seed=0)
            else:
                its = policy.tokenizer(alphabet="")
                with torch.device("meta"):
                    again = AutoModelForCausalLM.from_config(policy.config(alphabet=""))
            again.generation_config = GenerationConfig.from_pretrained(place)  # as others will read it
            _must_be_the_same(recipe, actor, tokenizer, again, its)
        except Exception as error:  # of whatever kind: parts of it are the user's own
            raise RecipeError(f"policy: the trained policy could not be exported: {message_of(error)}") from error


def _of_folder(policy: Policy, folder: Path) -> Policy:
    """An exported policy, its prompts written as in training."""
    of_it: dict[str, Any] = {"path": str(folder), "dtype": "auto"}
    if not isinstance(policy, policies["pretrained"]):
        return policies["pretrained"](**of_it)
    return policy.model_copy(update=of_it | {"revision": None, "gguf_file": None, "lora": None, "warm_start": None})


def _must_be_the_same(recipe: Recipe, actor: Any, tokenizer: Any, again: Any, its: Any) -> None:
    """Raises ValueError where an exported policy that was loaded is another one."""
    expected, found = shapes(actor), shapes(again)
    if different := sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)):
        raise ValueError(f"{type(actor).__name__} comes back as {type(again).__name__}, with another {different[0]}")
    if (ends := end_tokens(again, its)) != end_tokens(actor, tokenizer):
        raise ValueError(f"it would end a response at {ends}, and training does at {end_tokens(actor, tokenizer)}")
    text = recipe.prompts(1, 1)[0].text
    if recipe.policy.encode(its, text) != recipe.policy.encode(tokenizer, text):
        raise ValueError(f"its tokenizer reads the prompt {text[:60]!r} as other tokens")
