"""Where the language model comes from: made from a configuration, or pretrained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from .base import Policy, policies

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"


@policies.register("scratch")
class Scratch(Policy):
    """A small Qwen3 with fresh weights and a tokenizer of single characters."""

    hidden_size: int = Field(96, ge=8, le=8192)
    """Width."""
    intermediate_size: int = Field(256, ge=8)
    """Width of the MLP."""
    layers: int = Field(4, ge=1, le=256)
    """Number of layers."""
    heads: int = Field(3, ge=1)
    """Query heads."""
    kv_heads: int = Field(3, ge=1)
    """Key and value heads."""
    max_length: int = Field(512, ge=8)
    """Positions."""
    alphabet: str = ""
    """Characters of the tokenizer; empty takes the task's."""

    @model_validator(mode="after")
    def _divides(self) -> Scratch:
        if self.heads % self.kv_heads or self.hidden_size % self.heads or (self.hidden_size // self.heads) % 2:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads}), and hidden_size "
                f"({self.hidden_size}) an even multiple of heads"
            )
        return self

    def config(self, *, alphabet: str) -> Any:
        from transformers import Qwen3Config

        return Qwen3Config(
            vocab_size=len(self._characters(alphabet)) + 3,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.hidden_size // self.heads,
            max_position_embeddings=self.max_length,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )

    def _characters(self, alphabet: str) -> list[str]:
        characters = sorted(set(self.alphabet or alphabet))
        if not characters:
            raise ValueError("policy.alphabet is empty and the task names no characters; set policy.alphabet")
        return characters

    def load(self, *, alphabet: str, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        import torch
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

        from .attention import tappable

        names = [PAD, END, UNKNOWN, *self._characters(alphabet)]
        core = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=UNKNOWN))
        core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        core.decoder = decoders.Fuse()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core,
            pad_token=PAD,
            eos_token=END,
            unk_token=UNKNOWN,
            padding_side="left",
            clean_up_tokenization_spaces=False,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen3ForCausalLM(self.config(alphabet=alphabet))
        return tappable(model), tokenizer


@policies.register("pretrained")
class Pretrained(Policy):
    """Any causal language model of transformers, from a local folder or a hub."""

    path: str = Field(min_length=1)
    """Folder, or name on the hub."""
    revision: str | None = None
    """Commit, tag or branch on the hub."""

    def config(self, *, alphabet: str) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.path, revision=self.revision)

    def load(self, *, alphabet: str, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from .attention import tappable

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path, revision=self.revision, padding_side="left")
            model = AutoModelForCausalLM.from_pretrained(self.path, revision=self.revision, dtype="auto")
        except OSError as error:
            raise ValueError(f"policy.path: cannot load '{self.path}': {str(error).splitlines()[0]}") from error
        if tokenizer.eos_token_id is None:
            raise ValueError(f"policy.path: the tokenizer of '{self.path}' has no end token (eos_token)")
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token  # masks, not ids, say what padding is
        return tappable(model), tokenizer
