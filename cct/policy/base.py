"""The Policy axis."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from cct.registry import Component, Knobs, Registry, install

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from cct.rollout import Message


Tools = Sequence[dict[str, Any]]  # JSON schemas

# Added to the recipe's seed for the stream of demonstrations, so that they are not the training prompts over again.
WARM_START_SEED = 1_000_003


class WarmStart(Knobs):
    """Supervised steps on the task's demonstrations before reinforcement learning; the result is cached."""

    steps: int = Field(700, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(64, ge=1)
    """Demonstrations per step."""
    learning_rate: float = Field(2e-3, gt=0, le=1)
    """Peak of a schedule that rises for `warmup` steps and falls to 0 along a cosine."""
    warmup: int = Field(50, ge=0)
    """Steps of linear rise."""


class LoRA(Knobs):
    """Low-rank adapters on a frozen model (Hu et al. 2021, by peft); merged for generation and export."""

    rank: int = Field(16, ge=1, le=1024)
    """Rank of the matrices."""
    alpha: int = Field(32, ge=1, le=4096)
    """The adapters' output is scaled by alpha / rank."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Linear layers that get adapters: all but the output layer, or those of these names. A head or an embedding whose
    weight is tied to the other's is refused."""


class Shape(NamedTuple):
    """Sizes of a model that other parts must fit."""

    layers: int
    heads: int
    """Of attention, per layer."""
    positions: int | None
    """Tokens of a prompt with its response; None where there is no limit."""


class Policy(Component):
    """A causal language model with its tokenizer."""

    warm_start: WarmStart | None = None
    """Supervised start on the task's demonstrations; null for none."""
    lora: LoRA | None = None
    """Train low-rank adapters instead of all weights; needs the extra `.[lora]`. Null trains all weights."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"demonstrations"}) if self.warm_start else frozenset()

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"attention", "hidden_states", "distribution", "reference"})

    def ready(self) -> None:
        if self.lora and find_spec("peft") is None:
            raise ValueError(f"lora needs peft, which is not installed: {install('lora')}")

    @property
    def shape(self) -> Shape | None:
        """The model's, where it is known without asking a hub or importing torch."""
        return None

    @property
    def reads_alphabet(self) -> bool:
        """Whether its tokenizer is made of the task's characters."""
        return False

    def load(self, *, alphabet: str, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Model (attention that can be tapped, before any warm start) and tokenizer (with pad and end tokens).

        alphabet: the task's characters, for policies that make their own tokenizer. seed: of fresh weights.
        """
        raise NotImplementedError

    def config(self, *, alphabet: str) -> Any:
        """The model's transformers configuration, without loading weights."""
        raise NotImplementedError

    def tokenizer(self, *, alphabet: str) -> PreTrainedTokenizerBase:
        """The tokenizer, without loading weights."""
        raise NotImplementedError

    @property
    def takes_messages(self) -> bool:
        """Whether a prompt may be a list of messages."""
        return False

    @property
    def opened(self) -> str:
        """What the end of every prompt has opened of the response; evidence sees it as the response's beginning."""
        return ""

    def encode(self, tokenizer: PreTrainedTokenizerBase, text: str | Sequence[Message], tools: Tools = ()) -> list[int]:
        """Token ids of a prompt, a text or messages, as the model is to see it. Raises ValueError where it takes none.

        tools: JSON schemas of what the chat template tells the policy about.
        """
        if not isinstance(text, str):
            raise ValueError(
                f"policy '{self.use}': the prompt is a list of messages, and there is no chat template for it; use a "
                "chat model with `chat` at auto, or turn the row into text with task.template"
            )
        return encode_prompt(tokenizer, text)

    def written(self, tokenizer: PreTrainedTokenizerBase, text: str | Sequence[Message], tools: Tools = ()) -> str | None:
        """A prompt, or a conversation up to the policy's next turn, as the chat template writes it; None where none is used.

        Raises ValueError where the template refuses it.
        """
        return None

    def between(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: str | Sequence[Message],
        observation: str | Sequence[Message],
        tools: Tools = (),
    ) -> str:
        """What stands between a turn of the policy and its next one: the end of the turn, the observation, what opens the next.

        Without a chat template the observation alone. Raises ValueError where the template cannot write it.
        """
        if not isinstance(observation, str):
            raise ValueError(
                f"policy '{self.use}': the observation is a list of messages, and there is no chat template for it"
            )
        return observation


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text with what the tokenizer puts in front (a start token), without what it puts behind (an end token)."""
    whole, bare = (tokenizer(text or "0", add_special_tokens=special)["input_ids"] for special in (True, False))
    start = next(place for place in range(len(whole) + 1) if whole[place : place + len(bare)] == bare)
    return whole[:start] + (bare if text else [])


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a response, the tokenizer's own end token first.

    Chat models end a turn by another token than a text; their generation configuration names both.
    """
    named = model.generation_config.eos_token_id if model.generation_config is not None else None
    named = named if isinstance(named, list) else [named]
    return tuple(dict.fromkeys(token for token in [tokenizer.eos_token_id, *named] if token is not None))


policies: Registry[Policy] = Registry("policy", Policy)
