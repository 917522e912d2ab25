"""transformers' own `generate` as an engine, whose samples depend on each sequence's seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    DynamicLayer,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from .generation import Completion, Engine, Generation
from .weights import generating_by, is_split, named_weights


class TransformersEngine(Engine):
    """transformers' `generate` on the actor itself, or on a whole copy.

    A copy where ZeRO-3 or FSDP has split the weights: the processes would have to agree on every forward, and their responses
    end at different lengths. A copy too where `lag` samples from the weights before an update, while that changes the actor's.
    """

    def __init__(self, knobs: Generation, actor: PreTrainedModel, tokenizer: Tokenizer):
        super().__init__(knobs, actor, tokenizer)
        self.model = actor
        if knobs.lag or is_split(actor):
            self.model = cast(PreTrainedModel, type(actor)(actor.config).to(device=actor.device))  # type: ignore[call-arg]
            for parameter in self.model.parameters():  # buffers, such as rotary frequencies, keep their precision
                parameter.data = parameter.data.to(actor.dtype)
            self.sync()

    def sync(self) -> dict[str, float]:
        if self.model is not self.actor:
            own = self.model.state_dict()
            for name, weight in named_weights(self.actor):
                own[name].copy_(weight)
        return {}

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None, limits: Sequence[int] | None = None
    ) -> list[Completion]:
        training = self.model.training
        self.model.eval()
        completions: list[Completion] = []
        for start in range(0, len(prompts), self.knobs.batch_size):
            batch = slice(start, start + self.knobs.batch_size)
            most = limits[batch] if limits is not None else [self.knobs.max_new_tokens] * len(prompts[batch])
            completions += self._batch(prompts[batch], seeds[batch] if seeds is not None else None, most)
        self.model.train(training)
        return completions

    @torch.no_grad()
    def _batch(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None, limits: Sequence[int]) -> list[Completion]:
        knobs, device = self.knobs, self.actor.device
        input_ids, attention_mask = self._padded(prompts)
        width = input_ids.shape[1]
        sampler = _Sampler(knobs, torch.tensor(seeds, device=device)) if seeds is not None else None
        config = GenerationConfig(
            max_new_tokens=max(limits), eos_token_id=self.ends, pad_token_id=self.tokenizer.pad_token_id, do_sample=False
        )
        with generating_by(self.model, GenerationConfig()):  # which knows nothing that `config` does not say
            output: Tensor = self.model.generate(  # type: ignore[operator]
                input_ids=input_ids,
                attention_mask=attention_mask,
                past_key_values=self._read(prompts, width + max(limits)),
                generation_config=config,
                logits_processor=LogitsProcessorList([sampler] if sampler else []),
                stopping_criteria=StoppingCriteriaList([self._stopped(width)] if knobs.stop else []),
            )[:, width:]
        logprobs = torch.stack(sampler.logprobs, 1).tolist() if sampler else [[]] * len(prompts)
        rows = zip(output.tolist(), logprobs, limits, strict=True)
        return [self._completion(tokens[:most], logs[:most]) for tokens, logs, most in rows]

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Token ids and attention mask, [B, P] each, padded on the left."""
        pad, width, device = self.tokenizer.pad_token_id, max(map(len, prompts)), self.actor.device
        return (
            torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device),
            torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device),
        )

    def _read(self, prompts: Sequence[Sequence[int]], room: int) -> DynamicCache:
        """A cache with room for so many tokens, of all but the prompts' last ones, each prompt read once; empty where nothing
        would be saved."""
        cache = DynamicCache(config=self.model.config)
        place = {prompt: number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        if len(place) == len(prompts) or max(map(len, prompts)) == 1:
            return _growing(cache, room)
        input_ids, attention_mask = self._padded(list(place))
        self.model(
            input_ids=input_ids[:, :-1],
            attention_mask=attention_mask[:, :-1],
            position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0)[:, :-1],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache.batch_select_indices(torch.tensor([place[tuple(prompt)] for prompt in prompts], device=input_ids.device))
        return _growing(cache, room)

    def _stopped(self, width: int):
        """Stopping criterion: a stop string was just completed (transformers' own needs tokenizers of words)."""
        longest = max(map(len, self.knobs.stop)) + 4  # tokens; a few more, where a character takes several

        def stopped(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            tails = [self.tokenizer.decode(row) for row in input_ids[:, max(width, input_ids.shape[1] - longest) :].tolist()]
            return torch.tensor([any(s in tail for s in self.knobs.stop) for tail in tails], device=input_ids.device)

        return stopped

    def _completion(self, tokens: list[int], logprobs: list[float]) -> Completion:
        """What was emitted before the padding."""
        end = next((number + 1 for number, token in enumerate(tokens) if token in self.ends), len(tokens) + 1)
        if self.knobs.stop:
            text = self.tokenizer.decode
            told = (n for n in range(1, min(end, len(tokens) + 1)) if any(s in text(tokens[:n]) for s in self.knobs.stop))
            end = min(end, next(told, end))
        return Completion(tuple(tokens[:end]), end <= len(tokens), tuple(logprobs[:end]))


class _Growing(DynamicLayer):
    """Keys and values with room for those of tokens to come, which a `DynamicLayer` makes by copying all for each token."""

    def __init__(self, of: DynamicLayer, room: int):
        super().__init__()
        self.room, self.whole = room, list[Tensor]()
        if of.keys is not None and of.values is not None:
            self.update(of.keys, of.values)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.whole = [x.new_empty(*x.shape[:2], max(self.room, x.shape[2]), x.shape[3]) for x in (key_states, value_states)]
        before = self.get_seq_length()
        after = before + key_states.shape[2]
        for whole, x in zip(self.whole, (key_states, value_states), strict=True):
            whole[:, :, before:after] = x
        self.keys, self.values = (whole[:, :, :after] for whole in self.whole)
        return self.keys, self.values


def _growing(cache: DynamicCache, room: int) -> DynamicCache:
    """The cache with room in its layers, but for those of a sliding window."""
    cache.layers = [_Growing(layer, room) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def exponential(seeds: Tensor, step: int, size: int) -> Tensor:
    """Numbers from the standard exponential distribution, [B, size], float32, each a function of seed, step and column.

    seeds: int64 [B]. Counter-based, so there is no state, and every device gives the same bits: splitmix64 (Steele et al.
    2014) seeded by (seed, step), 53 bits of each output.
    """
    golden = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed number; products wrap around
    key = _mixed(_mixed(seeds * golden) + step)
    bits = _mixed(key.unsqueeze(1) + golden * torch.arange(1, size + 1, device=seeds.device))
    uniform = ((bits >> 11) & (2**53 - 1)).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().float()


def _mixed(x: Tensor) -> Tensor:
    """splitmix64's finalizer: each bit of the result depends on all of x."""
    x = (x ^ (x >> 30 & 2**34 - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & 2**37 - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & 2**33 - 1)


class _Sampler:
    """Logits processor under which the greedy choice is a sample (the Gumbel-max trick), and its log-probability known.

    Its noise depends on a sequence's own seed and its step only, so what it samples does not depend on the batch.
    """

    def __init__(self, knobs: Generation, seeds: Tensor):
        self.temperature = knobs.temperature
        self.seeds = seeds
        self.logprobs: list[Tensor] = []  # of each step's choices
        self.warpers: list[Any] = [TopKLogitsWarper(knobs.top_k)] if knobs.top_k else []
        self.warpers += [TopPLogitsWarper(knobs.top_p)] if knobs.top_p < 1 else []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.float() / self.temperature
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        noisy = scores - exponential(self.seeds, len(self.logprobs), scores.shape[1]).log()
        chosen = noisy.argmax(1, keepdim=True)
        self.logprobs.append(scores.log_softmax(1).gather(1, chosen).squeeze(1))
        return noisy
