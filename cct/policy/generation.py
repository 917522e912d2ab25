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
        *,
        seed: int,
        greedy: bool = False,
    ) -> list[Completion]:
        """One completion per prompt (token ids), reproducible from `seed`; greedy ignores temperature and seed."""
        raise NotImplementedError


engines: Registry[Generation] = Registry("generation", Generation)


@engines.register("transformers")
class Transformers(Generation):
    """transformers' own `generate`, in this process, on the weights being trained."""

    def generate(self, actor, tokenizer, prompts, *, seed, greedy=False):
        import torch
        from transformers import GenerationConfig

        end, pad, device = tokenizer.eos_token_id, tokenizer.pad_token_id, actor.device
        sampling = (
            {"do_sample": False} if greedy else {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        )
        config = GenerationConfig(max_new_tokens=self.max_new_tokens, eos_token_id=end, pad_token_id=pad, **sampling)
        training = actor.training
        actor.eval()
        completions: list[Completion] = []
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            for start in range(0, len(prompts), self.batch_size):
                batch = prompts[start : start + self.batch_size]
                width = max(map(len, batch))
                ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in batch], device=device)
                mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch], device=device)
                output = actor.generate(input_ids=ids, attention_mask=mask, generation_config=config)
                for row in output[:, width:].tolist():
                    finished = end in row
                    completions.append(Completion(tuple(row[: row.index(end) + 1] if finished else row), finished))
        actor.train(training)
        return completions
