"""A run's policy as a Hugging Face folder: `cct export`, and its rehearsal before the run, so that no run fails at its end."""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from cct.errors import of_recipe
from cct.policy import Policy, end_tokens, policies
from cct.policy.checkpoints import actor_weights
from cct.policy.weights import add_lora, save, shapes
from cct.preflight import message_of
from cct.recipe import Recipe, RecipeError
from cct.run_folder import RunFolder
from cct.system.files import kept, whole

WHOLE = 2**30  # bytes of weights that a rehearsal writes and reads back whole, in a second or two


def export(
    run: Path,
    folder: Path,
    iteration: int | None = None,
    *,
    dtype: str | None = None,
    trust: bool = False,
    replace: bool = False,
) -> Path:
    """Write the policy that `run` had after an iteration (default: its newest checkpoint); returns the checkpoint.

    Adapters are merged, weights that DeepSpeed split are put together. dtype: of the written weights, float32, bfloat16 or
    float16; None keeps the one that they were trained in. trust: run plug-ins without a recorded SHA-256. replace: write over
    what stands in `folder`. Raises RecipeError where there is no such checkpoint, something stands in `folder`, or a weight is
    beyond float16's range.
    """
    quiet()
    of_run = RunFolder(run)
    checkpoint = of_run.checkpoint(iteration)
    if not replace and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError(f"{folder}: the folder is not empty; name a new one")
    recipe = of_run.load_recipe(trust=trust)
    with of_recipe():
        actor, tokenizer = recipe.policy.load(alphabet=recipe.alphabet, seed=recipe.seed)
    if recipe.policy.lora:
        add_lora(actor, **recipe.policy.lora.model_dump())
    actor.load_state_dict(actor_weights(checkpoint))
    try:
        with kept(run, folder) if folder.parent == run else whole(folder) as unfinished:  # a run's own has checksums
            save(actor, tokenizer, unfinished, dtype=getattr(torch, dtype) if dtype else None)
    except ValueError as error:
        raise RecipeError(f"{folder}: {error}") from error
    return checkpoint


def quiet() -> None:
    """Lightning's, transformers' and DeepSpeed's chatter that has no meaning for a run made of rollouts."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="lightning")
    # transformers imports DeepSpeed, where it is installed, to save any model.
    logging.getLogger("DeepSpeed").addFilter(_no_accelerator)


def _no_accelerator(record: logging.LogRecord) -> bool:
    return "Setting accelerator to CPU" not in record.getMessage()


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
        raise ValueError(f"it would end a response at {ends}, but training ends it at {end_tokens(actor, tokenizer)}")
    text = recipe.prompts(1, 1)[0].text
    if recipe.policy.encode(its, text) != recipe.policy.encode(tokenizer, text):
        raise ValueError(f"its tokenizer splits the prompt {text[:60]!r} into different tokens")
