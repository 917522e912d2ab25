"""Where the language model comes from: made from a configuration, or pretrained."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from cct.registry import install
from cct.rollout import as_messages

from .base import Policy, Shape, Tools, policies
from .folders import end_of_turn, json_object, must_be_a_model, must_be_plain, must_be_whole, stored_ends, token_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from cct.rollout import Message

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
PACKAGE = "package:"
SPOKEN = "a-turn-of-the-policy"  # stands for one where it is asked what a chat template writes after it


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
    """Characters of the tokenizer; empty uses the task's."""

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

    @property
    def shape(self) -> Shape:
        return Shape(self.layers, self.heads, self.max_length)

    @property
    def reads_alphabet(self) -> bool:
        return not self.alphabet

    def _characters(self, alphabet: str) -> list[str]:
        characters = sorted(set(self.alphabet or alphabet))
        if not characters:
            raise ValueError("policy.alphabet is empty and the task names no characters; set policy.alphabet")
        return characters

    def tokenizer(self, *, alphabet: str) -> PreTrainedTokenizerBase:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        names = [PAD, END, UNKNOWN, *self._characters(alphabet)]
        core = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=UNKNOWN))
        core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        core.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(
            tokenizer_object=core,
            pad_token=PAD,
            eos_token=END,
            unk_token=UNKNOWN,
            padding_side="left",
            clean_up_tokenization_spaces=False,
        )

    def load(self, *, alphabet: str, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        import torch
        from transformers import Qwen3ForCausalLM

        from .attention import tappable

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen3ForCausalLM(self.config(alphabet=alphabet))
        return tappable(model), self.tokenizer(alphabet=alphabet)


@policies.register("pretrained")
class Pretrained(Policy):
    """Any causal language model of transformers: a folder, a GGUF file, a name on the hub, or a file of a Python package."""

    path: str = Field(min_length=1)
    """Folder, GGUF file, name on the hub, or `package:NAME/FILE`, a file or folder inside an installed Python package."""
    revision: str | None = None
    """Commit, tag or branch on the hub."""
    gguf_file: str | None = Field(None, pattern=r"\.gguf$")
    """GGUF file inside `path`; needs the extra `.[gguf]`. Its weights are unpacked to `dtype`."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Type of the trained weights; auto is the checkpoint's type. In bfloat16, an AdamW update below 1/256 of a weight is lost;
    `training.precision: bf16` computes in bfloat16 and keeps float32 weights."""
    chat: Literal["auto", "always", "never"] = "auto"
    """Whether prompts go through the tokenizer's chat template. auto: if it has one. always: a tokenizer without one is an
    error."""
    system: str | None = None
    """System message, through the chat template, for prompts that do not have one."""
    chat_options: dict[str, bool | int | float | str] = {}
    """Further variables of the chat template, for example {enable_thinking: false}."""
    response_prefix: str = ""
    """Text at the end of every prompt that belongs to the response, for example "<think>\\n" if the chat template opens it.
    Evidence sees it in front of what was sampled. A prompt that does not end in it is an error."""

    @model_validator(mode="after")
    def _fits(self) -> Pretrained:
        if self.chat == "never" and (self.system is not None or self.chat_options):
            raise ValueError("system and chat_options go through the chat template, which `chat: never` switches off")
        if self.gguf_file and self.path.endswith(".gguf"):
            raise ValueError(f"path is a GGUF file already ({self.path}); leave gguf_file out")
        return self

    def ready(self) -> None:
        super().ready()
        self.source()

    def source(self) -> dict[str, Any]:
        """What transformers' `from_pretrained` takes. Raises ValueError where a package or file is not there."""
        path = _in_package(self.path) if self.path.startswith(PACKAGE) else self.path
        if path.startswith(("/", ".", "~")):
            path = str(Path(path).expanduser())
            if not Path(path).exists():
                raise ValueError(f"policy.path: {self.path} does not exist; a name on the hub does not begin with / . or ~")
        folder, file = (str(Path(path).parent), Path(path).name) if path.endswith(".gguf") else (path, self.gguf_file)
        if file is None:
            must_be_a_model(path)
            return {"pretrained_model_name_or_path": path, "revision": self.revision}
        if Path(folder).is_dir() and not (Path(folder) / file).is_file():
            there = ", ".join(sorted(p.name for p in Path(folder).glob("*.gguf"))) or "none"
            raise ValueError(f"policy.path: no file {file} in {folder}; GGUF files there: {there}")
        missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(f"policy.path: GGUF files need {' and '.join(missing)}, which is not installed: {install('gguf')}")
        return {"pretrained_model_name_or_path": folder, "revision": self.revision, "gguf_file": file}

    @property
    def shape(self) -> Shape | None:
        source = self.source()
        file = Path(source["pretrained_model_name_or_path"]) / "config.json"
        if "gguf_file" in source or not file.is_file():
            return None
        config = json_object(file, self.path)
        inner = config.get("text_config")
        config = inner if isinstance(inner, dict) else config

        def first(*names: str) -> int | None:
            return next((config[name] for name in names if isinstance(config.get(name), int)), None)

        layers, heads = first("num_hidden_layers", "n_layer", "num_layers"), first("num_attention_heads", "n_head", "num_heads")
        if layers is None or heads is None:
            return None
        return Shape(layers, heads, first("max_position_embeddings", "n_positions"))

    def _from(self, loader: Any, **options: Any) -> Any:
        source = self.source()
        try:
            return loader.from_pretrained(**source, trust_remote_code=False, **options)
        except Exception as error:  # of many kinds: a folder may hold anything
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(" :")
            raise ValueError(
                f"policy.path: cannot load '{self.path}': {reason} (a path is a folder with config.json, a tokenizer and "
                "weights, a GGUF file, package:NAME/FILE, or a name on a reachable hub)"
            ) from error

    def config(self, *, alphabet: str) -> Any:
        from transformers import AutoConfig

        return self._from(AutoConfig)

    def tokenizer(self, *, alphabet: str) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        tokenizer = self._from(AutoTokenizer, padding_side="left")
        if not tokenizer("0")["input_ids"]:  # made by transformers from a configuration alone
            raise ValueError(f"policy.path: there is no tokenizer in '{self.path}' (tokenizer.json or a vocabulary)")
        if tokenizer.chat_template is None and (self.chat == "always" or self.system is not None or self.chat_options):
            raise ValueError(
                f"policy: the tokenizer of '{self.path}' has no chat template, which chat: {self.chat}, system or chat_options "
                "require; use a chat model, or leave them out and write the whole prompt into the task"
            )
        return tokenizer

    def load(self, *, alphabet: str, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        from transformers import AutoModelForCausalLM, GenerationConfig

        from .attention import tappable

        tokenizer, unpacked = self.tokenizer(alphabet=alphabet), "gguf_file" in self.source()
        if not unpacked:
            must_be_plain(self.path, self.config(alphabet=alphabet))
        own = GenerationConfig()  # instead of the folder's, of which `_end` takes the end tokens
        model, loading = self._from(AutoModelForCausalLM, dtype=self.dtype, generation_config=own, output_loading_info=True)
        must_be_whole(self.path, model, loading)
        if getattr(model, "hf_quantizer", None) is not None and unpacked:
            model.hf_quantizer = None  # its weights are unpacked, and would not be saved beside it
            del model.config.quantization_config
        self._end(model, tokenizer)
        self.written(tokenizer, "?")  # a template that takes no system message says so now
        return tappable(model), tokenizer

    def _end(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Let model and tokenizer know what ends a response, the chat template's end of a turn included, and what pads.

        Raises ValueError where nothing that the model can emit ends one.
        """
        source, config = self.source(), model.config
        named = stored_ends(source["pretrained_model_name_or_path"], self.revision)
        for part in (config, config.get_text_config()):
            named = named or token_list(getattr(part, "eos_token_id", None), f"config.json of '{self.path}'")
        turn = end_of_turn(tokenizer, self.chat_options) if self._templated(tokenizer) else None
        room = config.get_text_config().vocab_size
        every = dict.fromkeys([tokenizer.eos_token_id, *named, turn])
        ends = [token for token in every if token is not None and 0 <= token < min(room, len(tokenizer))]
        if not ends:
            raise ValueError(f"policy.path: neither tokenizer nor generation configuration of '{self.path}' names an end token")
        model.generation_config.eos_token_id = ends
        if tokenizer.eos_token_id != ends[0]:
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
        if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= room:
            tokenizer.pad_token = tokenizer.eos_token  # masks, not ids, say what padding is

    @property
    def takes_messages(self) -> bool:
        return self.chat != "never"

    @property
    def opened(self) -> str:
        return self.response_prefix

    def encode(self, tokenizer: PreTrainedTokenizerBase, text: str | Sequence[Message], tools: Tools = ()) -> list[int]:
        written = self.written(tokenizer, text, tools)
        if written is None:
            ids, written = super().encode(tokenizer, text), str(text)
        else:
            ids = tokenizer(written, add_special_tokens=False)["input_ids"]  # the template has written them
        if not written.endswith(self.response_prefix):
            end = written[-max(40, len(self.response_prefix)) :]
            raise ValueError(f"policy.response_prefix: a prompt ends in {end!r}, not in {self.response_prefix!r}")
        return ids

    def between(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: str | Sequence[Message],
        observation: str | Sequence[Message],
        tools: Tools = (),
    ) -> str:
        talk = [*as_messages(prompt), {"role": "assistant", "content": SPOKEN}, *as_messages(observation)]
        written = self.written(tokenizer, talk, tools)
        if written is None:
            return super().between(tokenizer, prompt, observation, tools)
        _, found, behind = written.rpartition(SPOKEN)
        if not found:
            raise ValueError(
                f"policy: the chat template of '{self.path}' leaves out the policy's earlier turns, so it cannot "
                "write an episode of several turns"
            )
        return behind

    def _templated(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether prompts go through the chat template."""
        return self.chat != "never" and tokenizer.chat_template is not None

    def written(self, tokenizer: PreTrainedTokenizerBase, text: str | Sequence[Message], tools: Tools = ()) -> str | None:
        if not self._templated(tokenizer):
            return None
        messages = as_messages(text)
        if self.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, **self.chat_options}
        options |= {"tools": list(tools)} if tools else {}
        try:
            return str(tokenizer.apply_chat_template(messages, **options))
        except Exception as error:  # the template's own, of whatever kind
            said = messages[-1]["content"][:60]
            raise ValueError(f"policy: the chat template of '{self.path}' refuses the prompt {said!r}: {error}") from error


def _in_package(path: str) -> str:
    """`package:NAME/FILE` as a path. Raises ValueError where the package is not installed or holds no such file."""
    name, _, file = path.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"policy.path: {path} names a file of the package '{name}', which is not installed; install it with pip"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / file).exists():
        there = ", ".join(sorted(str(p.relative_to(folder)) for p in folder.rglob("*.gguf"))) or "none"
        raise ValueError(f"policy.path: the package '{name}' holds no '{file}'; GGUF files there: {there}")
    return str(folder / file)
