"""The engine of vLLM servers: what all processes of a run do together, and how weights reach the servers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from .generation import Completion, Engine, EngineError
from .vllm import PROBE_SHAPE, sampling, write_configuration
from .vllm_client import described
from .vllm_pool import Pool, Server, Weights
from .vllm_process import local_servers
from .vllm_server import OfServers
from .weights import named_weights, probe

SHARD = 4 * 2**30  # bytes of a file of weights, and of their copy in memory
T = TypeVar("T")


class VLLMServerEngine(Engine):
    """vLLM servers. Every process shares its requests among all of them; the first one renews their weights, by files."""

    def __init__(self, knobs: OfServers, actor: PreTrainedModel, tokenizer: Tokenizer):
        super().__init__(knobs, actor, tokenizer)
        self.vllm: OfServers = knobs
        together = distributed.is_available() and distributed.is_initialized()
        self.rank, self.world = (distributed.get_rank(), distributed.get_world_size()) if together else (0, 1)
        limit = knobs.limit(getattr(actor.config.get_text_config(), "max_position_embeddings", None))
        self.limit = limit[0] if limit is not None else None
        self.renewals, self.heard = 0, list[str]()
        self.pool: Pool | None = None
        self.folder, self.dtype = self._by_first(self._begin)
        try:
            weights = self._written()
            servers = local_servers(knobs, self.dtype, self.folder, self.world) if self.rank == 0 else []
            urls = knobs.urls or self._gathered([server.url for server in servers])[0]
            self.pool = Pool(
                knobs,
                [Server(url, servers[number] if servers else None) for number, url in enumerate(urls)],
                lanes=-(-knobs.batch_size // self.world),
                vocabulary=actor.config.get_text_config().vocab_size,
                locks=self.folder,
                tell=self._tell,
            )
            if servers:
                self._tell(f"starting {len(servers)} vLLM servers; their logs are in {self.folder}")
                self.pool.start(weights.folder)
            self._renew(weights)
        except BaseException:
            self.close()
            raise

    def _begin(self) -> tuple[Path, str]:
        """The folder of the weights, and their type."""
        dtype: str = self.vllm.dtype
        if self.vllm.urls:
            dtype, problems = described(self.vllm.urls, self.limit)
            if problems:
                raise EngineError("; ".join(problems))
        elif dtype == "auto":
            dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        try:
            if self.vllm.folder is not None:
                Path(self.vllm.folder).mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix="cct-weights-", dir=self.vllm.folder)).resolve(), dtype
        except OSError as error:
            raise EngineError(f"generation.folder: {error}") from error

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None, limits: Sequence[int] | None = None
    ) -> list[Completion]:
        most = limits if limits is not None else [self.vllm.max_new_tokens] * len(prompts)
        own = seeds if seeds is not None else [None] * len(prompts)
        requests = [
            (prompt, sampling(self.vllm, self.ends, seed, limit))
            for prompt, seed, limit in zip(prompts, own, most, strict=True)
        ]
        return self._pool.run(self._pool.responses(requests)) if requests else []

    def sync(self) -> dict[str, float]:
        again = self._renew(self._written())
        gaps = [server.gap for server in self._pool.servers if not server.given_up]
        return {"engine/probe_gap": max(gaps), "engine/servers": float(len(gaps)), "engine/asked_again": float(again)}

    def _written(self) -> Weights:
        """The actor's weights in a new folder: the first process writes what all of them gather."""
        self.renewals += 1
        folder = self.folder / str(self.renewals)
        if self.rank == 0:
            folder.mkdir()
            write_configuration(self.actor, self.tokenizer, folder)
        shard, size, count = dict[str, Tensor](), 0, 0

        def save() -> None:
            save_file(shard, folder / f"model-{count}.safetensors", metadata={"format": "pt"})

        for name, tensor in named_weights(self.actor, getattr(torch, self.dtype)):  # both names of a tied head, as vLLM needs
            if self.rank == 0:
                if size >= SHARD:
                    save()
                    shard, size, count = {}, 0, count + 1
                shard[name] = tensor.to("cpu", copy=True).contiguous()
                size += shard[name].nbytes
        if self.rank == 0:
            save()
        length = min(PROBE_SHAPE[1], (self.limit or PROBE_SHAPE[1] + 1) - 1)
        sequences, logprobs = probe(self.actor, (PROBE_SHAPE[0], length))
        return Weights(folder, f"{self.folder.name}-{self.renewals}", self.dtype, sequences, logprobs)

    def _renew(self, weights: Weights) -> int:
        """The first process renews and probes all servers; all processes know what came of it. Returns how many responses were
        asked for again since the last time, on all processes."""
        pool = self._pool
        pool.weights = weights

        def renewed() -> list[tuple[float, str]]:
            pool.run(pool.renew(weights))
            for old in self.folder.iterdir():
                if old.is_dir() and old != weights.folder:
                    shutil.rmtree(old, ignore_errors=True)
            return [(server.gap, server.given_up) for server in pool.servers]

        for server, (gap, given_up) in zip(pool.servers, self._by_first(renewed), strict=True):
            server.gap, server.given_up, server.faults = gap, given_up, 0
            server.down = server.down if given_up else None
        told = self._gathered((self.heard, pool.again))
        for line in (line for heard, _ in told for line in heard):
            self.say(line)
        self.heard, pool.again = [], 0
        return sum(again for _, again in told)

    def close(self) -> None:
        failed = False
        if self.pool is not None:
            failed = any(server.local is not None and server.given_up for server in self.pool.servers)
            self.pool.close()
        if self.rank == 0 and not failed:  # else its log tells why
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _pool(self) -> Pool:
        assert self.pool is not None
        return self.pool

    # --- processes --------------------------------------------------------------------------------
    def _tell(self, line: str) -> None:
        """Say it, in the first process; the others' lines are said at the next renewal."""
        if self.rank == 0:
            self.say(line)
        else:
            self.heard.append(f"process {self.rank}: {line}")

    def _gathered(self, value: T) -> list[T]:
        """Every process's value."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            distributed.all_gather_object(values, value)
        return values

    def _by_first(self, work: Callable[[], T]) -> T:
        """What the first process makes of it; its EngineError is raised by all."""
        made: Any = None
        error: str | None = None
        if self.rank == 0:
            try:
                made = work()
            except EngineError as raised:
                error = str(raised)
        made, error = self._gathered((made, error))[0]
        if error is not None:
            raise EngineError(error)
        return made
