"""Engines by name, besides vLLM in this process: transformers', vLLM's servers, and whichever is faster here."""

from __future__ import annotations

from importlib.util import find_spec

from .generation import Generation, engines
from .vllm import VLLM
from .vllm_server import OfServers


@engines.register("transformers")
class Transformers(Generation):
    """transformers' own `generate`, in this process, on the weights being trained."""

    def open(self, actor, tokenizer):
        from .sampling import TransformersEngine

        return TransformersEngine(self, actor, tokenizer)


@engines.register("vllm_server")
class VLLMServer(OfServers):
    """vLLM servers on this or other machines; every process shares its requests among all of them."""

    def open(self, actor, tokenizer):
        from .vllm_remote import VLLMServerEngine

        return VLLMServerEngine(self, actor, tokenizer)


@engines.register("auto")
class Auto(VLLM):
    """vLLM if it is installed and there is a GPU, otherwise transformers, which is faster for toy models on a CPU."""

    def ready(self) -> None:
        """Nothing: one of the two is always there."""

    def open(self, actor, tokenizer):
        import torch

        from .sampling import TransformersEngine

        if torch.cuda.is_available() and find_spec("vllm"):
            return super().open(actor, tokenizer)
        return TransformersEngine(self, actor, tokenizer)
