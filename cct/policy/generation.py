"""Generation engines. `transformers` is here; every engine takes token ids and returns token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from cct.registry import Component, Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Completion:
    """One sampled continuation."""

    tokens: tuple[int, ...]
    """Emitted ids, the end token included where there is one."""
    finished: bool
    """Ended by itself rather than at the length limit."""


class Generation(Component):
    """An engine that samples responses from the current policy."""

    max_new_tokens: int = Field(64, ge=1, le=131_072)
    """Length limit of a response, in tokens."""
    temperature: float = Field(1.0, gt=0, le=10)
    """Of sampling; the trainer's log-probabilities are taken at the same one. Evaluation is greedy."""
    batch_size: int = Field(256, ge=1)
    """Sequences decoded at once."""

    def generate(
        self,
        actor: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int] | None,
    ) -> list[Completion]:
        """One completion per prompt (token ids), each sampled from its own seed; greedy where seeds is None."""
        raise NotImplementedError


engines: Registry[Generation] = Registry("generation", Generation)


@engines.register("transformers")
class Transformers(Generation):
    """transformers' own `generate`, in this process, on the weights being trained."""

    def generate(self, actor, tokenizer, prompts, seeds):
        import torch
        from transformers import GenerationConfig, LogitsProcessorList

        end, pad, device = tokenizer.eos_token_id, tokenizer.pad_token_id, actor.device
        config = GenerationConfig(max_new_tokens=self.max_new_tokens, eos_token_id=end, pad_token_id=pad, do_sample=False)
        training = actor.training
        actor.eval()
        completions: list[Completion] = []
        for start in range(0, len(prompts), self.batch_size):
            batch = prompts[start : start + self.batch_size]
            width = max(map(len, batch))
            ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in batch], device=device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch], device=device)
            sampling = [self._noise(seeds[start : start + self.batch_size])] if seeds is not None else []
            with torch.no_grad():
                output = actor.generate(
                    input_ids=ids, attention_mask=mask, generation_config=config, logits_processor=LogitsProcessorList(sampling)
                )
            for row in output[:, width:].tolist():
                finished = end in row
                completions.append(Completion(tuple(row[: row.index(end) + 1] if finished else row), finished))
        actor.train(training)
        return completions

    def _noise(self, seeds: Sequence[int]):
        """Logits processor under which the greedy choice is a sample at this temperature (the Gumbel-max trick).

        Each sequence draws from a generator of its own, so that what it samples does not depend on the batch.
        """
        import torch

        generators = [torch.Generator().manual_seed(seed) for seed in seeds]

        def add(input_ids, scores):
            noise = torch.empty(scores.shape, dtype=torch.float32)
            for row, generator in zip(noise, generators, strict=True):
                row.exponential_(generator=generator)
            noise.clamp_(min=torch.finfo(torch.float32).tiny).log_().neg_()
            return scores.float() / self.temperature + noise.to(scores.device)

        return add
