"""vLLM servers: their knobs.

`vllm_remote` is the engine, `vllm_pool` shares requests among servers, `vllm_client` talks to one, `vllm_process` starts one.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from .vllm import OfVLLM

LOOPBACK = {"localhost", "127.0.0.1", "::1"}


class OfServers(OfVLLM):
    """What vLLM servers are asked for, and how faults of theirs are dealt with."""

    urls: tuple[str, ...] = ()
    """Servers that run already, as `http://node7:8000`; docs/launch.md says how to start one. Alternative to `servers`."""
    servers: int = Field(0, ge=0, le=64)
    """Number of servers that cct starts on this machine, on the GPUs that follow those trained on, and stops at the end."""
    folder: str | None = None
    """Folder for the weights, visible to all processes and servers. Null: a temporary one, if all are on one machine."""
    tensor_parallel: int = Field(1, ge=1, le=64)
    """GPUs of each server that cct starts."""
    memory_fraction: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory for the weights and KV cache of a server that cct starts."""
    retries: int = Field(3, ge=0, le=100)
    """Faults between two updates that a server may have, each followed by a recovery, before it is given up; one that cct
    started and that ended is started again as often."""
    timeout: float = Field(600.0, gt=0, le=86_400)
    """Seconds that a response or a renewal of weights may take; a server that needs longer has stalled."""
    patience: float = Field(300.0, ge=0, le=86_400)
    """Seconds that a server with a fault is waited for before it is given up; cct's own have as long to start. With several
    processes on GPUs, less than the 10 minutes that NCCL waits."""

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        urls = tuple(url.rstrip("/") for url in urls)
        for url in urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ValueError(f"{url!r} is not a server URL like http://node7:8000")
        if len(set(urls)) < len(urls):
            raise ValueError("a URL is listed twice")
        return urls

    @model_validator(mode="after")
    def _are_there(self) -> OfServers:
        if not self.urls and not self.servers:
            raise ValueError("set urls to servers that run, or servers to the number that cct should start on this machine")
        if self.folder is None and (far := [url for url in self.urls if urlsplit(url).hostname not in LOOPBACK]):
            raise ValueError(f"set folder to one that {far[0]} sees under the same path: the weights reach a server through it")
        return self

    @property
    def unread(self) -> dict[str, str]:
        own = ("servers", "dtype", "kv_cache_gb", "eager", "tensor_parallel", "memory_fraction")
        return dict.fromkeys(own, "with urls, servers are started elsewhere") if self.urls else {}

    @property
    def elsewhere(self) -> bool:
        return True

    @property
    def one_machine(self) -> bool:
        return not self.urls

    def ready(self) -> None:
        if not self.urls:
            return super().ready()
        from .vllm_client import described

        if problems := described(self.urls, self.max_length)[1]:
            raise ValueError("; ".join(problems))
