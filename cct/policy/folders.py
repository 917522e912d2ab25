"""What a folder must hold to be trained, and what in it ends a response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHOWN = 3  # missing weights named in an error
GENERATION = "generation_config.json"


def must_be_a_model(path: str) -> None:
    """Raises ValueError where a folder holds an adapter, which transformers would load on top of its base."""
    if (Path(path) / "adapter_config.json").is_file():
        raise ValueError(
            f"policy.path: '{path}' holds an adapter (adapter_config.json), but a run needs a whole model; merge it into its "
            "base model (peft: merge_and_unload, then save_pretrained), and name that folder"
        )


def must_be_plain(path: str, config: Any) -> None:
    """Raises ValueError where the weights are quantized: they can be neither trained nor exported."""
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        raise ValueError(
            f"policy.path: the weights of '{path}' are quantized ({getattr(method, 'value', method)}), and cannot be trained; "
            "use the model before quantization"
        )


def must_be_whole(path: str, model: PreTrainedModel, loading: dict[str, Any]) -> None:
    """Raises ValueError where the model is not as it is stored: a weight is missing, which transformers makes up at random."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"policy.path: '{path}' is an adapter on another model; merge the two, and name the merged folder")
    missing = sorted(loading["missing_keys"])
    if missing:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        head = model.config.get_text_config().tie_word_embeddings is False and missing == ["lm_head.weight"]
        raise ValueError(
            f"policy.path: the weights in '{path}' are incomplete: {', '.join(missing[:SHOWN])}{more} missing"
            + ("; if the head shares the embedding, set tie_word_embeddings: true in config.json" if head else "")
        )


def json_object(file: Path, path: str) -> dict[str, Any]:
    """What a configuration file of the folder `path` holds. Raises ValueError where that is no JSON object."""
    try:
        found = json.loads(file.read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"it holds {type(found).__name__}, not an object")
        return found
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"policy.path: {file.name} of '{path}' cannot be read: {error}") from None


def stored_ends(path: str, revision: str | None = None) -> list[int]:
    """The end tokens that generation_config.json names; none where it names none or is not there. Nothing else of it is read.

    path: a folder, or a name on a hub. Raises ValueError where it cannot be read.
    """
    from transformers.utils import cached_file

    found = cached_file(
        path,
        GENERATION,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if found is None:
        return []
    return token_list(json_object(Path(found), path).get("eos_token_id"), f"{GENERATION} of '{path}'")


def token_list(named: Any, where: str) -> list[int]:
    """Token ids, of which configurations name one, several or none. Raises ValueError for anything else, found in `where`."""
    tokens = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(token) is int for token in tokens):
        raise ValueError(
            f"policy.path: {where} cannot be read: eos_token_id is {named!r}; expected a token id, or a list of them"
        )
    return tokens


def end_of_turn(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> int | None:
    """The special token that the chat template writes behind an assistant's message; None where it writes none.

    Some chat models name it nowhere else: Gemma's <end_of_turn>, a base model's ChatML.
    """
    answer = "answer"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    try:
        written = str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception:  # the template's own, of whatever kind: one that takes no such message
        return None
    behind = written.rpartition(answer)[2].lstrip()
    first = next(iter(tokenizer(behind, add_special_tokens=False)["input_ids"]), None) if answer in written else None
    known = tokenizer.added_tokens_decoder
    return first if first in known and known[first].special else None
