"""`cct` in processes of its own without their start-up: they are forked from one that has imported the libraries already."""

from __future__ import annotations

import os
import socket
import sys
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory

forks = get_context("forkserver")
forks.set_forkserver_preload(
    ["cct.training.run", "transformers.models.qwen3.modeling_qwen3", *(["deepspeed"] if find_spec("deepspeed") else [])]
)


def command_line(arguments: list[str], environment: dict[str, str], output: Path) -> None:
    """`cct` in this process, which writes into the file `output`."""
    os.environ.update(environment)
    file = os.open(output, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    import torch

    from cct.cli import main

    torch.set_num_threads(1)
    sys.argv = ["cct", *arguments]
    sys.exit(main(arguments))


def cct(*arguments: str, ranks: int, timeout: float = 1200) -> None:
    """The command line in as many processes as ranks, one thread each, told their ranks as a cluster's launcher tells them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(ranks)]
        processes = [
            forks.Process(target=command_line, args=(list(arguments), common | {"LOCAL_RANK": str(rank)}, output))
            for rank, output in enumerate(outputs)
        ]
        try:
            for process in processes:
                process.start()
            running = list(processes)
            while running and wait([process.sentinel for process in running], timeout):
                running = [process for process in running if process.exitcode is None]
                if any(process.exitcode for process in processes):  # the others may wait for it
                    break
            codes = [process.exitcode for process in processes]
            assert codes == [0] * ranks, "\n".join([str(codes), *(output.read_text()[-4000:] for output in outputs)])
        finally:
            for process in processes:
                process.kill()
