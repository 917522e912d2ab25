"""A run's policy as a Hugging Face folder: `cct export`, and its rehearsal before the run, so that no run fails at its end."""

from __future__ import annotations

import logging
import os
import pickle
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from cct.policy import Policy, end_tokens, policies
from cct.policy.weights import add_lora, save, shapes
from cct.preflight import message_of
from cct.recipe import Recipe, RecipeError
from cct.system.files import damage, kept, whole

from .folder import checkpoints, load_run, must_be_run
from .stopped import of_recipe

ACTOR = "agent.actor."
ONLY_TENSORS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def export(run: Path, folder: Path, iteration: int | None = None, *, dtype: str | None = None, trust: bool = False) -> Path:
    """Write the policy that `run` had after an iteration (default: its newest checkpoint); returns the checkpoint.

    Adapters are merged, weights that DeepSpeed split are put together. dtype: of the written weights, float32, bfloat16 or
    float16; None keeps the one that they were trained in. trust: run plug-ins without a recorded SHA-256. Raises RecipeError
    where there is no such checkpoint, something stands in `folder`, or a weight is beyond float16's range.
    """
    quiet()
    checkpoint = checkpoint_of(run, iteration)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError(f"{folder}: something is there already; name a new folder")
    recipe = load_run(run, trust=trust)
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


def checkpoint_of(run: Path, iteration: int | None = None) -> Path:
    """The checkpoint after an iteration, the newest where None. Raises RecipeError where there is none that can be read."""
    must_be_run(run)
    saved = {int(path.stem): path for path in checkpoints(run)}
    if not saved or iteration not in {None, *saved}:
        there = f"there are those of iterations {', '.join(map(str, saved))}" if saved else "none was taken yet"
        raise RecipeError(f"{run}: no checkpoint of iteration {iteration}; {there}")
    chosen = saved[max(saved) if iteration is None else iteration]
    if (why := damage(run, chosen) or unreadable(chosen)) is not None:
        others = ", ".join(str(number) for number, path in saved.items() if path != chosen) or "none"
        raise RecipeError(f"{chosen}: cannot be read ({why}); other iterations with a checkpoint: {others}")
    return chosen


def newest_readable(run: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint of a run that can be read, and a line on each newer one. Raises RecipeError where there is none."""
    skipped: list[str] = []
    for checkpoint in reversed(checkpoints(run)):
        why = damage(run, checkpoint) or unreadable(checkpoint)
        if why is None:
            return checkpoint, skipped
        skipped.append(f"{checkpoint}: skipped, it cannot be read ({why})")
    raise RecipeError(*skipped, f"{run}: no checkpoint can be read; start the recipe again")


def unreadable(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be read; None where it can. Weights are mapped, not loaded."""
    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.rglob("*.pt"))
    try:
        with tensors_only() if checkpoint.is_dir() else nullcontext():
            for file in files:
                torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, ImportError, AttributeError, pickle.UnpicklingError) as error:
        return why_unreadable(error)
    return None if files else "an empty folder"


def why_unreadable(error: BaseException) -> str:
    """In a line; torch's advice to load what may hold code all the same is left out."""
    if found := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it holds {found[1]}, which could run code; only tensors and plain data are loaded"
    told = re.search(r"WeightsUnpickler error: (.+)", str(error))
    return " ".join((told[1] if told else str(error)).split("\n")[0].split()) or type(error).__name__


@contextmanager
def tensors_only() -> Iterator[None]:
    """Within, `torch.load` takes tensors, plain data and DeepSpeed's four classes alone, so that a checkpoint runs no code.

    DeepSpeed's own calls allow anything; the environment overrules them.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = os.environ.get(ONLY_TENSORS)
    os.environ[ONLY_TENSORS] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        os.environ.pop(ONLY_TENSORS)
        if before is not None:
            os.environ[ONLY_TENSORS] = before


def actor_weights(checkpoint: Path) -> dict[str, Any]:
    """The actor's part of a checkpoint: a file of Lightning's, or a folder of DeepSpeed's."""
    if checkpoint.is_dir():
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with tensors_only():
            weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    else:
        weights = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
    return {name[name.index(ACTOR) + len(ACTOR) :]: weight for name, weight in weights.items() if ACTOR in name}


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
