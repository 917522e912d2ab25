"""The engine of vLLM servers: requests shared out, weights renewed and probed, faults noticed and waited for."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import torch
from filelock import AsyncFileLock
from safetensors.torch import save_file
from torch import distributed
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from .generation import Completion, Engine, EngineError
from .vllm import PROBE_SHAPE, sampling, write_configuration
from .vllm_client import Client, ServerFault, described
from .vllm_process import LocalServer, local_servers
from .vllm_server import VLLMServer
from .weights import named_weights, probe

SHARD = 4 * 2**30  # bytes of a file of weights, and of their copy in memory
T = TypeVar("T")


@dataclass
class Server:
    """A server as this process sees it."""

    url: str
    down: float | None = None
    """When a fault was first found, by `time.monotonic`; None while it answers."""
    given_up: str = ""
    """Why no response is asked of it until the next renewal; empty while it is used or waited for."""
    gap: float = 0.0
    """What the last probe found, in nats."""
    local: LocalServer | None = None
    """Where this process started it."""


class VLLMServerEngine(Engine):
    """Responses come from whichever server is free. A response is a function of its seed, whoever samples it.

    A server with a fault gets no requests; the others take its share. It is used again once it answers, has the present
    weights (they are renewed where it has others) and passes the probe. After `patience` it is given up, and tried once more at
    every renewal. The run ends where no server is left, or where a response failed more than `retries` times.
    """

    def __init__(self, knobs: VLLMServer, actor: PreTrainedModel, tokenizer: Tokenizer):
        super().__init__(knobs, actor, tokenizer)

        self.vllm: VLLMServer = knobs
        together = distributed.is_available() and distributed.is_initialized()
        self.rank, self.world = (distributed.get_rank(), distributed.get_world_size()) if together else (0, 1)
        limit = knobs.limit(getattr(actor.config.get_text_config(), "max_position_embeddings", None))
        self.limit = limit[0] if limit is not None else None
        self.lanes = -(-knobs.batch_size // self.world)  # requests in flight at a server, of this process
        self.renewals, self.again, self.heard = 0, 0, list[str]()
        self.servers: list[Server] = []
        self.client: Client | None = None
        self.loop = asyncio.new_event_loop()
        Thread(target=self.loop.run_forever, name="vllm_server", daemon=True).start()
        try:
            self.folder, self.dtype = self._by_first(self._begin)
            self._write()
            self._connect(self._by_first(self._start))
            self._renew()
        except BaseException:
            self.close()
            raise

    # --- starting ---------------------------------------------------------------------------------
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

    def _start(self) -> Sequence[str]:
        """URLs of the servers, started where cct starts them."""
        if self.vllm.urls:
            return self.vllm.urls

        self.servers = [Server(one.url, local=one) for one in local_servers(self.vllm, self.dtype, self.folder, self.world)]
        for server in self.servers:
            assert server.local is not None
            server.local.start(self.weights)
            server.down = time.monotonic()
        self._tell(f"starting {len(self.servers)} vLLM servers; their logs are in {self.folder}")
        asyncio.run_coroutine_threadsafe(self._start_again(), self.loop)
        return [server.url for server in self.servers]

    def _connect(self, urls: Sequence[str]) -> None:

        self.servers = self.servers or [Server(url) for url in urls]
        vocabulary = self.actor.get_input_embeddings().num_embeddings
        self.client = Client(timeout=self.vllm.timeout, connections=(self.lanes + 2) * len(urls), vocabulary=vocabulary)

    async def _start_again(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for server in self.servers:
                if (local := server.local) and local.restarts > 0 and (ended := local.ended):
                    local.restarts -= 1
                    self._tell(f"vLLM at {server.url}: {ended}; starting it again")
                    local.start(self.weights)

    # --- responses --------------------------------------------------------------------------------
    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None, limits: Sequence[int] | None = None
    ) -> list[Completion]:
        most = limits if limits is not None else [self.vllm.max_new_tokens] * len(prompts)
        own = seeds if seeds is not None else [None] * len(prompts)
        params = [sampling(self.vllm, self.ends, seed, limit) for seed, limit in zip(own, most, strict=True)]
        return self._run(self._share_out(list(zip(prompts, params, strict=True)))) if prompts else []

    async def _share_out(self, requests: list[tuple[Sequence[int], dict[str, Any]]]) -> list[Completion]:
        """Their completions, each asked of a server with a free lane."""
        queue, failed, found = asyncio.Queue[int](), Counter[int](), dict[int, Completion]()
        for number in range(len(requests)):
            queue.put_nowait(number)

        async def lane(server: Server) -> None:
            while True:
                number = await queue.get()
                try:
                    found[number] = await self.client.respond(server.url, *requests[number], self.version)
                except ServerFault as fault:
                    failed[number] += 1
                    self.again += 1
                    if failed[number] > self.vllm.retries:
                        text = f"a response failed {failed[number]} times (generation.retries), the last time at {server.url}"
                        raise EngineError(f"{text}: {fault}") from fault
                    raise
                finally:
                    if number not in found:
                        queue.put_nowait(number)
                    queue.task_done()

        async def serve(server: Server) -> None:
            while not server.given_up:
                lanes = [asyncio.create_task(lane(server)) for _ in range(min(self.lanes, len(requests)))]
                try:
                    await asyncio.gather(*lanes)
                except ServerFault as fault:
                    self._found(server, fault)
                finally:
                    await _end(*lanes)
                await self._back(server)

        done, tasks = asyncio.create_task(queue.join()), [asyncio.create_task(serve(server)) for server in self.servers]
        serving = asyncio.gather(*tasks)
        try:
            await asyncio.wait({done, serving}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                serving.result()
                self._must_have_one()
        finally:
            await _end(done, *tasks, serving)
        return [found[number] for number in range(len(requests))]

    # --- faults -----------------------------------------------------------------------------------
    def _found(self, server: Server, fault: ServerFault) -> None:
        if server.down is None:
            server.down = time.monotonic()
            self._tell(f"vLLM at {server.url}: {fault}; it is waited for up to {self.vllm.patience:g} s")

    async def _back(self, server: Server) -> None:
        """Returns once the server has the present weights, or is given up."""
        pause = 0.1
        while True:
            try:
                server.gap = await self._settled(server)
            except ServerFault as fault:
                self._found(server, fault)
                assert server.down is not None
                if fault.final or time.monotonic() >= server.down + self.vllm.patience:
                    if not server.given_up:
                        others = sum(not other.given_up for other in self.servers) - 1
                        self._tell(f"vLLM at {server.url} is given up: {fault}; {others} others take its share")
                    server.given_up = str(fault)
                    return
                await asyncio.sleep(pause)
                pause = min(2 * pause, 5.0)
            else:
                if server.down is not None:
                    self._tell(f"vLLM at {server.url} answers with the present weights")
                server.down, server.given_up = None, ""
                return

    async def _settled(self, server: Server) -> float:
        """Renew the weights of a server that has others, and probe them. Returns the mean difference in nats."""

        if (local := server.local) is not None and local.restarts == 0 and (ended := local.ended):
            raise ServerFault(ended, final=True)
        if await self.client.version(server.url) != self.version:
            async with AsyncFileLock(self.folder / f"{self.servers.index(server)}.lock"):  # one process of all that notice
                if await self.client.version(server.url) != self.version:
                    await self.client.renew(server.url, str(self.weights), self.version)
        told = [await self.client.prompt_logprobs(server.url, tokens, self.version) for tokens in self.sequences]
        gap = float((self.expected - self.expected.new_tensor(told)).abs().mean())
        try:
            self.vllm.must_agree(gap, self.dtype, "its")
        except EngineError as error:
            raise ServerFault(str(error), final=True) from None
        return gap

    def _must_have_one(self) -> None:
        if all(server.given_up for server in self.servers):
            why = "; ".join(f"{server.url}: {server.given_up}" for server in self.servers)
            raise EngineError(f"no vLLM server is left: {why}. Start them again, then resume the run")

    # --- weights ----------------------------------------------------------------------------------
    def sync(self) -> dict[str, float]:
        self._write()
        self._renew()
        used = [server.gap for server in self.servers if not server.given_up]
        return {"engine/probe_gap": max(used), "engine/servers": float(len(used)), "engine/sent_again": float(self.sent_again)}

    def _write(self) -> None:
        """Write the actor's weights where servers find them: the first process, from what all of them gather."""

        self.renewals += 1
        self.weights = self.folder / str(self.renewals)
        self.version = f"{self.folder.name}-{self.renewals}"
        shard, size, count = dict[str, Any](), 0, 0
        if self.rank == 0:
            self.weights.mkdir()
            write_configuration(self.actor, self.tokenizer, self.weights)
        for name, tensor in named_weights(self.actor, getattr(torch, self.dtype)):  # tied ones under both names, as vLLM needs
            if self.rank == 0:
                if size >= SHARD:
                    save_file(shard, self.weights / f"model-{count}.safetensors", metadata={"format": "pt"})
                    shard, size, count = {}, 0, count + 1
                shard[name] = tensor.to("cpu", copy=True).contiguous()
                size += shard[name].nbytes
        if self.rank == 0:
            save_file(shard, self.weights / f"model-{count}.safetensors", metadata={"format": "pt"})

    def _renew(self) -> None:
        """The first process renews and probes all servers at once; all processes know what came of it."""

        length = min(PROBE_SHAPE[1], (self.limit or PROBE_SHAPE[1] + 1) - 1)
        self.sequences, self.expected = probe(self.actor, (PROBE_SHAPE[0], length))
        states = self._by_first(lambda: self._run(self._renew_all()))
        for server, (server.gap, server.given_up) in zip(self.servers, states, strict=True):
            server.down = None if not server.given_up else server.down or time.monotonic()
        told = self._gathered((self.heard, self.again))
        for line in (line for heard, _ in told for line in heard):
            self.say(line)
        self.sent_again, self.again, self.heard = sum(again for _, again in told), 0, []

    async def _renew_all(self) -> list[tuple[float, str]]:
        await asyncio.gather(*map(self._back, self.servers))
        self._must_have_one()
        for server in self.servers:
            if server.local is not None:
                server.local.restarts = max(server.local.restarts, self.vllm.retries)
        for old in self.folder.iterdir():
            if old.is_dir() and old != self.weights:
                shutil.rmtree(old, ignore_errors=True)
        return [(server.gap, server.given_up) for server in self.servers]

    def close(self) -> None:
        if self.client is not None:
            self._run(self.client.http.aclose())
        self.loop.call_soon_threadsafe(self.loop.stop)
        for server in self.servers:
            if server.local is not None:
                server.local.stop()
        if self.rank == 0 and not any(server.local and server.given_up for server in self.servers):  # or its log tells why
            shutil.rmtree(self.folder, ignore_errors=True)

    # --- processes and threads --------------------------------------------------------------------
    def _tell(self, line: str) -> None:
        """Say it, in the first process; the others' lines are said at the next renewal."""
        if self.rank == 0:
            self.say(line)
        else:
            self.heard.append(f"process {self.rank}: {line}")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result; it runs in a thread of its own, as this one may have an event loop already (a notebook's)."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

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


async def _end(*work: asyncio.Future[Any]) -> None:
    """Cancel what still runs, and wait until it has ended."""
    for one in work:
        one.cancel()
    await asyncio.gather(*work, return_exceptions=True)
