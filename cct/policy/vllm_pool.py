"""The servers of a run: requests are shared out among them, and faults noticed and waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from filelock import AsyncFileLock
from torch import Tensor

from .generation import Completion, EngineError
from .vllm_client import Client, ServerFault
from .vllm_process import LocalServer
from .vllm_server import OfServers

T = TypeVar("T")
Request = tuple[Sequence[int], dict[str, Any]]  # a prompt's token ids, and vLLM's sampling parameters


@dataclass(frozen=True)
class Weights:
    """What every server must have."""

    folder: Path
    """Where it finds them."""
    version: str
    """Their name, unique across runs."""
    dtype: str
    sequences: list[list[int]]
    """Token ids of the probe."""
    logprobs: Tensor
    """The trainer's log-probabilities of them [B, S - 1]."""


@dataclass
class Server:
    """A server as this process sees it."""

    url: str
    local: LocalServer | None = None
    """Where this process started it."""
    down: float | None = None
    """When a fault was first found, by `time.monotonic`; None while it answers."""
    faults: int = 0
    """While it was asked for responses, since the last renewal."""
    given_up: str = ""
    """Why no response is asked of it until the next renewal; empty while it is used or waited for."""
    gap: float = 0.0
    """What the last probe found, in nats."""


class Pool:
    """Responses come from whichever server is free. A response is a function of its seed, whoever samples it.

    A server with a fault gets no requests; the others take its share. It is used again once it answers, has the present
    weights (they are renewed where it has others) and passes the probe. After `patience`, or at more than `retries` faults, it
    is given up, and tried once more at every renewal. EngineError is raised where no server is left.

    lanes: requests in flight at a server at most. locks: a folder that all processes see. tell: called with what was found.
    """

    def __init__(
        self,
        knobs: OfServers,
        servers: list[Server],
        *,
        lanes: int,
        vocabulary: int,
        locks: Path,
        tell: Callable[[str], None],
    ):
        self.knobs, self.servers, self.lanes, self.locks, self.tell = knobs, servers, lanes, locks, tell
        self.again = 0  # responses that were asked for again
        self.client = Client(timeout=knobs.timeout, connections=(lanes + 2) * len(servers), vocabulary=vocabulary)
        self.weights: Weights
        self.loop = asyncio.new_event_loop()
        self.thread = Thread(target=self.loop.run_forever, name="vllm_server", daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result; it runs in a thread of its own, as this one may have an event loop already (a notebook's)."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self.run(self._leave())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        for server in self.servers:
            if server.local is not None:
                server.local.stop()

    async def _leave(self) -> None:
        await _end(*[task for task in asyncio.all_tasks() if task is not asyncio.current_task()])
        await self.client.http.aclose()

    # --- responses --------------------------------------------------------------------------------
    async def responses(self, requests: Sequence[Request]) -> list[Completion]:
        """Of each request, by a server with a free lane."""
        queue, found = asyncio.Queue[int](), dict[int, Completion]()
        for number in range(len(requests)):
            queue.put_nowait(number)

        async def lane(server: Server) -> None:
            while True:
                number = await queue.get()
                try:
                    found[number] = await self.client.respond(server.url, *requests[number], self.weights.version)
                except ServerFault:
                    self.again += 1
                    raise
                finally:
                    if number not in found:
                        queue.put_nowait(number)
                    queue.task_done()

        async def serve(server: Server) -> None:
            while not server.given_up:
                if server.down is not None:
                    await self._back(server)
                    continue
                lanes = [asyncio.create_task(lane(server)) for _ in range(min(self.lanes, len(requests)))]
                try:
                    await asyncio.gather(*lanes)
                except ServerFault as fault:
                    self._found(server, fault)
                    server.faults += 1
                    if server.faults > self.knobs.retries:
                        self._give_up(server, f"fault {server.faults} since the last update (generation.retries): {fault}")
                finally:
                    await _end(*lanes)

        serving = [asyncio.create_task(serve(server)) for server in self.servers]
        done, over = asyncio.ensure_future(queue.join()), asyncio.gather(*serving)
        either: list[asyncio.Future[Any]] = [done, over]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                over.result()
                self._must_have_one()
        finally:
            await _end(done, *serving, over)
        return [found[number] for number in range(len(requests))]

    # --- faults -----------------------------------------------------------------------------------
    def _found(self, server: Server, fault: ServerFault) -> None:
        if server.down is None:
            server.down = time.monotonic()
            self.tell(f"vLLM at {server.url}: {fault}; waiting for it up to {self.knobs.patience:g} s")

    async def _back(self, server: Server) -> None:
        """Returns once the server has the present weights, or is given up."""
        pause = 0.1
        while True:
            try:
                server.gap = await self._settled(server)
            except ServerFault as fault:
                self._found(server, fault)
                assert server.down is not None
                if fault.final or time.monotonic() >= server.down + self.knobs.patience:
                    self._give_up(server, str(fault))
                    return
                await asyncio.sleep(pause)
                pause = min(2 * pause, 5.0)
            else:
                if server.down is not None:
                    self.tell(f"vLLM at {server.url} answers, and has the present weights")
                server.down, server.given_up = None, ""
                return

    async def _settled(self, server: Server) -> float:
        """Renew the weights of a server that has others, and probe them. Returns the mean difference in nats."""
        if (local := server.local) is not None and local.restarts == 0 and (ended := local.ended):
            raise ServerFault(ended, final=True)
        weights = self.weights
        if await self.client.version(server.url) != weights.version:
            async with AsyncFileLock(self.locks / f"{self.servers.index(server)}.lock"):  # one of all processes that notice
                if await self.client.version(server.url) != weights.version:
                    await self.client.renew(server.url, str(weights.folder), weights.version)
        told = [await self.client.prompt_logprobs(server.url, tokens, weights.version) for tokens in weights.sequences]
        gap = float((weights.logprobs - weights.logprobs.new_tensor(told)).abs().mean())
        try:
            self.knobs.must_agree(gap, weights.dtype, "its")
        except EngineError as error:
            raise ServerFault(str(error), final=True) from None
        return gap

    def _give_up(self, server: Server, why: str) -> None:
        if not server.given_up:
            others = sum(not other.given_up for other in self.servers) - 1
            self.tell(f"vLLM at {server.url} is given up: {why}; servers left: {others}")
        server.given_up = why

    def _must_have_one(self) -> None:
        if all(server.given_up for server in self.servers):
            why = "; ".join(f"{server.url}: {server.given_up}" for server in self.servers)
            raise EngineError(f"no vLLM server is left: {why}. Start them again, then resume the run")

    # --- weights ----------------------------------------------------------------------------------
    async def renew(self, weights: Weights) -> None:
        """Give all servers these weights at once. One that was given up gets another try."""
        self.weights = weights
        await asyncio.gather(*map(self._back, self.servers))
        self._must_have_one()
        for server in self.servers:
            if server.local is not None:
                server.local.restarts = self.knobs.retries

    def start(self, weights: Path) -> None:
        """Start the servers of this process on a folder with a model; those that end are started again on the present one."""
        for server in self.servers:
            if server.local is not None:
                server.local.start(weights)
                server.down = time.monotonic()
        asyncio.run_coroutine_threadsafe(self._start_again(), self.loop)

    async def _start_again(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for server in self.servers:
                if (local := server.local) is not None and local.restarts > 0 and (ended := local.ended):
                    local.restarts -= 1
                    self.tell(f"vLLM at {server.url}: {ended}; it is started again")
                    local.start(self.weights.folder)


async def _end(*work: asyncio.Future[Any]) -> None:
    """Cancel what still runs, and wait until it has ended."""
    for one in work:
        one.cancel()
    await asyncio.gather(*work, return_exceptions=True)
