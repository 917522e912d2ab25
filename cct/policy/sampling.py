"""Engines: token ids in, token ids out, from the weights being trained."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from .base import end_tokens
from .weights import generating_by, is_split, logprobs_of, named_weights

if TYPE_CHECKING:
    from .generation import VLLM, Generation

PROBE_SHAPE = (4, 32)  # sequences, tokens
PROBE_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}  # measured in float32: 1e-6 in order, 0.1 and more with a stale head
DEFAULT_CPU_CACHE_GB = 1.0


class EngineError(RuntimeError):
    """An engine that cannot start, or whose weights are not the trainer's."""


@dataclass(frozen=True)
class Completion:
    """One continuation."""

    tokens: tuple[int, ...]
    """Emitted ids; the end token, or the token that completes a stop string, is the last where there is one."""
    finished: bool
    """Ended by itself rather than at the length limit (the engine's `finish_reason`)."""
    logprobs: tuple[float, ...] = ()
    """Per token, of the distribution that it was drawn from: temperature, top-k and top-p applied. Empty where greedy."""


class Engine:
    """An engine on an actor's weights.

    One whose weights are a copy of the actor's takes them over in `sync`. All processes call every method together.
    """

    def __init__(self, knobs: Generation, actor: PreTrainedModel, tokenizer: Tokenizer):
        self.knobs, self.actor, self.tokenizer = knobs, actor, tokenizer
        self.ends = list(end_tokens(actor, tokenizer))

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None, limits: Sequence[int] | None = None
    ) -> list[Completion]:
        """One completion per prompt (token ids), each sampled from its own seed; greedy where seeds is None.

        limits: the length limit of each, in tokens, where it is not `max_new_tokens`.
        """
        raise NotImplementedError

    def sync(self) -> dict[str, float]:
        """The actor's weights have changed. Returns metrics; raises EngineError where the engine's differ after it."""
        return {}

    def rest(self) -> None:
        """Nothing will be generated until the next `generate`; memory may be given back."""

    def close(self) -> None:
        """The engine is no longer needed."""


class TransformersEngine(Engine):
    """transformers' `generate` on the actor itself, or on a whole copy where ZeRO-3 or FSDP has split its weights.

    On split weights the processes would have to agree on every forward, and their responses end at different lengths.
    """

    def __init__(self, knobs: Generation, actor: PreTrainedModel, tokenizer: Tokenizer):
        super().__init__(knobs, actor, tokenizer)
        self.model = actor
        if is_split(actor):
            whole = cast(PreTrainedModel, type(actor)(actor.config))
            self.model = whole.to(device=actor.device, dtype=actor.dtype)  # type: ignore[call-arg]
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
                past_key_values=self._read(prompts),
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

    def _read(self, prompts: Sequence[Sequence[int]]) -> DynamicCache | None:
        """Keys and values of all but the prompts' last tokens, each prompt read once; None where nothing would be saved."""
        place = {prompt: number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        if len(place) == len(prompts) or max(map(len, prompts)) == 1:
            return None
        input_ids, attention_mask = self._padded(list(place))
        cache = DynamicCache(config=self.model.config)
        self.model(
            input_ids=input_ids[:, :-1],
            attention_mask=attention_mask[:, :-1],
            position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0)[:, :-1],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache.batch_select_indices(torch.tensor([place[tuple(prompt)] for prompt in prompts], device=input_ids.device))
        return cache

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


class VLLMEngine(Engine):
    """vLLM in this process. It starts with dummy weights; the actor's go over tensor by tensor, as after every update."""

    def __init__(self, knobs: VLLM, actor: PreTrainedModel, tokenizer: Tokenizer):
        super().__init__(knobs, actor, tokenizer)
        self.vllm: VLLM = knobs
        on_gpu = torch.cuda.is_available()
        self.dtype = knobs.dtype if knobs.dtype != "auto" else "bfloat16" if on_gpu else "float32"
        self.asleep = False
        # vLLM reads these when it is imported: no process of its own, no threads pinned under the trainer's feet.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        warnings.filterwarnings("ignore", module="vllm")
        cache = knobs.kv_cache_gb or (None if on_gpu else DEFAULT_CPU_CACHE_GB)
        threads = torch.get_num_threads()
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if several:  # by these vLLM finds its place among processes that are there already
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
            for name, value in {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": actor.device.index or 0}.items():
                os.environ.setdefault(name, str(value))
        try:
            from vllm import LLM

            with tempfile.TemporaryDirectory() as folder:  # all that it reads from there: the configuration and the tokenizer
                plain = type(actor.config).from_dict(actor.config.to_dict() | {"architectures": [type(actor).__name__]})
                plain.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                self.llm = LLM(
                    model=folder,
                    load_format="dummy",
                    dtype=self.dtype,
                    max_model_len=knobs.max_length,
                    max_num_seqs=knobs.batch_size,
                    gpu_memory_utilization=knobs.memory_fraction,
                    kv_cache_memory_bytes=int(cache * 2**30) if cache else None,
                    tensor_parallel_size=knobs.tensor_parallel,
                    distributed_executor_backend="external_launcher" if several else None,
                    enforce_eager=knobs.eager or not on_gpu,
                    enable_sleep_mode=knobs.sleep and on_gpu,
                    logprobs_mode="processed_logprobs",
                    generation_config="vllm",
                    disable_log_stats=True,
                    seed=0,
                )
        except Exception as error:
            raise EngineError(_explained(error)) from error
        torch.set_num_threads(threads)
        self.sharers = torch.distributed.new_subgroups(knobs.tensor_parallel)[0] if knobs.tensor_parallel > 1 else None
        self.sync()

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None, limits: Sequence[int] | None = None
    ) -> list[Completion]:
        if self.asleep:
            self.sync()
        most = list(limits) if limits is not None else [self.vllm.max_new_tokens] * len(prompts)
        if self.sharers is None:
            return self._generate(prompts, seeds, most)
        everyone: list[Any] = [None] * self.vllm.tensor_parallel  # whoever shares the engine asks it for the same
        torch.distributed.all_gather_object(everyone, (list(prompts), seeds, most), group=self.sharers)
        whole = [prompt for some, _, _ in everyone for prompt in some]
        completions = self._generate(
            whole,
            None if seeds is None else [seed for _, some, _ in everyone for seed in some],
            [limit for _, _, some in everyone for limit in some],
        )
        first = sum(len(some) for some, _, _ in everyone[: torch.distributed.get_rank(self.sharers)])
        return completions[first : first + len(prompts)]

    def _generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None, limits: Sequence[int]
    ) -> list[Completion]:
        from vllm import SamplingParams

        knobs = self.vllm
        common: dict[str, Any] = {
            "stop": list(knobs.stop) or None,
            "include_stop_str_in_output": True,
            "stop_token_ids": self.ends,
            "detokenize": bool(knobs.stop),
        }
        sampled = common | {"temperature": knobs.temperature, "top_p": knobs.top_p, "top_k": knobs.top_k, "logprobs": 0}
        params = [
            SamplingParams(**sampled, max_tokens=most, seed=seed)
            if seed is not None
            else SamplingParams(**common, max_tokens=most, temperature=0.0)
            for seed, most in zip(seeds if seeds is not None else [None] * len(prompts), limits, strict=True)
        ]
        outputs = self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False) if prompts else []
        completions = []
        for output in outputs:
            told = output.outputs[0]
            tokens = tuple(told.token_ids)
            logs = [step[token].logprob for step, token in zip(told.logprobs, tokens, strict=True)] if told.logprobs else []
            completions.append(Completion(tokens, told.finish_reason == "stop", tuple(logs)))
        return completions

    def sync(self) -> dict[str, float]:
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self.weights()})
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        self.llm.reset_prefix_cache()
        gap = self._probe()
        tolerance = self.vllm.probe_tolerance or PROBE_TOLERANCE[self.dtype]
        if not gap <= tolerance:  # NaN too
            raise EngineError(
                f"vLLM's weights are not the trainer's after a renewal: log-probabilities of {PROBE_SHAPE[0]} fixed sequences "
                f"differ by {gap:.3g} on average (generation.probe_tolerance allows {tolerance:g} in {self.dtype})"
            )
        return {"engine/probe_gap": gap}

    def weights(self):
        """What goes over. Both names of a tied head must: vLLM repacks the head on a CPU, and keeps the old one otherwise."""
        return named_weights(self.actor, getattr(torch, self.dtype))

    def _probe(self) -> float:
        """Mean absolute difference between trainer's and engine's log-probabilities of fixed random sequences."""
        from vllm import SamplingParams

        generator = torch.Generator().manual_seed(0)
        length = min(PROBE_SHAPE[1], self.llm.llm_engine.model_config.max_model_len - 1)
        vocabulary = self.actor.config.get_text_config().vocab_size
        sequences = torch.randint(0, vocabulary, (PROBE_SHAPE[0], length), generator=generator)
        training = self.actor.training
        self.actor.eval()
        trainer = logprobs_of(self.actor, sequences.to(self.actor.device)).cpu()
        self.actor.train(training)
        outputs = self.llm.generate(
            [{"prompt_token_ids": row} for row in sequences.tolist()],
            SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        engine = torch.tensor(
            [
                [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)]
                for output, row in zip(outputs, sequences.tolist(), strict=True)
            ]
        )
        return float((trainer - engine).abs().mean())

    def rest(self) -> None:
        if self.vllm.sleep and torch.cuda.is_available():
            self.llm.sleep(level=2)  # the weights are forgotten: new ones come before the next response anyway
            self.asleep = True

    def close(self) -> None:
        import gc

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def _explained(error: Exception) -> str:
    """What to do about a vLLM that does not start."""
    text = f"vLLM does not start: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if isinstance(error, ImportError):
        text += (
            f"; cct is made for vLLM 0.32 with torch 2.13 and transformers 5.19, found torch {version('torch')} and "
            f"transformers {version('transformers')}: install cct and the extra into a fresh environment in one command"
        )
    return text
