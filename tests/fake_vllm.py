"""A server that answers as vLLM 0.32's do, with a real model by transformers, and that can go wrong in the ways of servers."""

from __future__ import annotations

import argparse
import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cct.policy.builtin import Transformers
from cct.policy.weights import logprobs_of


class FakeVLLM:
    """Serves the model of a folder at a port of its own once it is started; it keeps its port when it is started again.

    spoil: changes an answer of /inference/v1/generate before it is sent, or returns bytes to send in its place.
    on_generate: called with the number of the request to /inference/v1/generate, from 1, before it is answered.
    """

    def __init__(self, folder: Path, *, port: int = 0, max_model_len: int = 64, logprobs_mode: str = "processed_logprobs"):
        self.folder, self.max_model_len, self.logprobs_mode = folder, max_model_len, logprobs_mode
        self.requests, self.renewals, self.greatest, self.in_flight = 0, 0, 0, 0
        self.spoil: Callable[[dict[str, Any]], dict[str, Any] | bytes] = lambda answer: answer
        self.on_generate: Callable[[int], None] = lambda number: None
        self.reloads, self.dev_mode, self.scale_out = True, True, True
        self.going, self.lock = threading.Event(), threading.RLock()
        self.going.set()
        self.server: ThreadingHTTPServer | None = None
        self.port = port
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Again with the weights of the folder that it began with, as a supervisor would."""
        self.version, self.aborts = "default", 0
        self.load(self.folder)
        self.connections: set[socket.socket] = set()
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), type("Handler", (Handler,), {"fake": self}))
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def die(self) -> None:
        """At once, with every connection."""
        server, self.server = self.server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            for connection in list(self.connections):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def restart(self) -> None:
        self.die()
        self.start()

    def load(self, folder: Path) -> None:
        with self.lock:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
            for file in Path(folder).glob("*.safetensors"):
                model.load_state_dict(load_file(file), strict=False)
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
            self.model = model.eval()

    def respond(self, path: str, body: dict[str, Any]) -> dict[str, Any] | bytes:
        if path.startswith("/server_info"):
            model = {"dtype": "torch.float32", "max_model_len": self.max_model_len, "logprobs_mode": self.logprobs_mode}
            return {"vllm_config": {"model_config": model}}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path.startswith("/pause"):
            self.aborts += 1
        if path == "/collective_rpc" and self.reloads:
            self.load(Path(body["kwargs"]["weights_path"]))
        if path == "/update_weight_version":
            self.version = body["new_version"]
            self.renewals += 1
        return self.generate(body) if path == "/inference/v1/generate" else {"success": True}

    def generate(self, body: dict[str, Any]) -> dict[str, Any] | bytes:
        self.requests += 1
        self.on_generate(self.requests)
        self.going.wait()
        params, prompt, aborts = body["sampling_params"], body["token_ids"], self.aborts
        with self.lock, torch.no_grad():
            answer: dict[str, Any] = {}
            if "prompt_logprobs" in params:
                logprobs = logprobs_of(self.model, torch.tensor([prompt]))[0].tolist()
                steps = [{str(token): {"logprob": x}} for token, x in zip(prompt[1:], logprobs, strict=True)]
                answer["prompt_logprobs"] = [None, *steps]
            seed = params.get("seed")
            knobs = {name: params[name] for name in ("temperature", "top_p", "top_k") if params.get(name)}
            knobs["max_new_tokens"] = params["max_tokens"]
            engine = Transformers(**knobs).open(self.model, self.tokenizer)
            (found,) = engine.generate([prompt], None if seed is None else [seed])
        pairs = zip(found.tokens, found.logprobs or [0.0] * len(found.tokens), strict=True)
        choice = {
            "token_ids": list(found.tokens),
            "finish_reason": "abort" if self.aborts > aborts else "stop" if found.finished else "length",
            "weight_versions": [{"version": self.version, "start": 0, "end": len(found.tokens)}],
            "logprobs": {"content": [{"token_id": token, "logprob": x} for token, x in pairs]},
        }
        return self.spoil(answer | {"choices": [choice]})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeVLLM

    def setup(self) -> None:
        super().setup()
        self.fake.connections.add(self.connection)

    def finish(self) -> None:
        self.fake.connections.discard(self.connection)
        super().finish()

    def answer(self) -> None:
        fake, path = self.fake, self.path.split("?")[0]
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        if path == "/inference/v1/generate" and not fake.scale_out:
            return self.say(403, b'{"error": {"message": "Scale-out endpoints are disabled."}}')
        if path == "/inference/v1/generate" and not body:
            return self.say(400, b'{"error": {"message": "token_ids: Field required"}}')
        if path != "/inference/v1/generate" and not fake.dev_mode:
            return self.say(404, b'{"detail": "Not Found"}')
        fake.in_flight += 1
        fake.greatest = max(fake.greatest, fake.in_flight)
        try:
            answer = fake.respond(path, body)
        finally:
            fake.in_flight -= 1
        self.say(200, answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    def say(self, status: int, content: bytes) -> None:
        with suppress(ConnectionError):  # who asked has left, or this server died
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    do_GET = do_POST = answer

    def log_message(self, *args: Any) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("model", "host", "port"):
        parser.add_argument(f"--{name}")
    arguments = parser.parse_args()
    FakeVLLM(Path(arguments.model), port=int(arguments.port))
    threading.Event().wait()
