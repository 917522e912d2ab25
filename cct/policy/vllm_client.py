"""A client of vLLM 0.32's servers over HTTP: responses by token ids, renewal of weights, and what is wrong with a server.

The server must run with `VLLM_SERVER_DEV_MODE=1` and `--enable-scale-out`. Every answer is read strictly: whatever a server of
the present weights could not have said is a `ServerFault`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, TypeVar

import httpx2
from pydantic import BaseModel, Field, ValidationError

from .generation import Completion

FLAGS = "VLLM_SERVER_DEV_MODE=1 and --enable-scale-out --logprobs-mode processed_logprobs --load-format safetensors"
QUICK = 10.0  # seconds for an answer that needs no computation


class ServerFault(Exception):
    """What is wrong with a server; the message follows its URL. final: waiting changes nothing."""

    def __init__(self, text: str, *, final: bool = False):
        super().__init__(text)
        self.final = final


class Logprob(BaseModel):
    logprob: float


class SampledToken(Logprob):
    token_id: int


class Logprobs(BaseModel):
    content: list[SampledToken]


class Version(BaseModel):
    version: str


class Choice(BaseModel):
    token_ids: list[int] = Field(min_length=1)
    finish_reason: Literal["stop", "length"]
    logprobs: Logprobs | None = None
    weight_versions: list[Version] = Field(min_length=1)


class Answer(BaseModel):
    choices: Annotated[list[Choice], Field(min_length=1, max_length=1)]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class WeightInfo(BaseModel):
    weight_version: str


class ModelConfiguration(BaseModel, protected_namespaces=()):
    dtype: str
    max_model_len: int
    logprobs_mode: str


class Configuration(BaseModel, protected_namespaces=()):
    model_config_: ModelConfiguration = Field(alias="model_config")


class ServerInfo(BaseModel):
    vllm_config: Configuration


T = TypeVar("T", bound=BaseModel)


def read(kind: type[T], content: bytes, path: str) -> T:
    """An answer. Raises ServerFault where it is none."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ServerFault(f"its answer to {path} makes no sense ({place}: {first['msg']}): {content[:100]!r}") from None


def refused(status: int, path: str, text: str) -> ServerFault:
    """The fault of an answer that is an error. Endpoints that only a flag opens say so."""
    closed = status in (403, 404)
    what = f"; start it with {FLAGS}" if closed else ""
    return ServerFault(f"it answers {path} with status {status}: {text[:200]}{what}", final=closed)


class Client:
    """Talks to the servers of a run.

    timeout: seconds that an answer may take. connections: to all of them at most. vocabulary: number of token ids there are.
    """

    def __init__(self, *, timeout: float, connections: int, vocabulary: int):
        limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
        self.http = httpx2.AsyncClient(timeout=httpx2.Timeout(timeout, connect=QUICK), limits=limits, trust_env=False)
        self.vocabulary = vocabulary

    async def call(self, method: str, url: str, path: str, timeout: float | None = None, **content: Any) -> bytes:
        """What the server answers. Raises ServerFault where it does not, or with an error."""
        wait = httpx2.USE_CLIENT_DEFAULT if timeout is None else timeout
        try:
            response = await self.http.request(method, url + path, timeout=wait, **content)
        except httpx2.TimeoutException as error:
            seconds = self.http.timeout.read if timeout is None else timeout
            raise ServerFault(f"it did not answer {path} in {seconds:g} s ({type(error).__name__})") from None
        except httpx2.HTTPError as error:
            raise ServerFault(f"it cannot be reached ({type(error).__name__}: {error})") from None
        if response.status_code != 200:
            raise refused(response.status_code, path, response.text)
        return response.content

    async def respond(self, url: str, prompt: Sequence[int], params: dict[str, Any], version: str) -> Completion:
        """A response to a prompt (token ids), sampled from the weights of a version. params: vLLM's SamplingParams."""
        return completion(await self._generate(url, prompt, params, version), params, self.vocabulary)

    async def prompt_logprobs(self, url: str, prompt: Sequence[int], version: str) -> list[float]:
        """Log-probabilities of all tokens of a prompt but the first."""
        params = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        answer = await self._generate(url, prompt, params, version)
        found = (answer.prompt_logprobs or [])[1:]
        if len(found) != len(prompt) - 1 or not all(step and t in step for step, t in zip(found, prompt[1:], strict=True)):
            raise ServerFault("its log-probabilities of a prompt are not of that prompt's tokens")
        return [step[t].logprob for step, t in zip(found, prompt[1:], strict=True) if step]

    async def _generate(self, url: str, prompt: Sequence[int], params: dict[str, Any], version: str) -> Answer:
        path = "/inference/v1/generate"
        answer = read(Answer, await self.call("POST", url, path, json={"token_ids": prompt, "sampling_params": params}), path)
        if others := {span.version for span in answer.choices[0].weight_versions} - {version}:
            raise ServerFault(
                f"it sampled from weights {min(others)!r}, not {version!r}: it was restarted, or another run renews its weights"
            )
        return answer

    async def version(self, url: str) -> str:
        """The name of its weights; vLLM's is `default` until they are renewed."""
        return read(WeightInfo, await self.call("GET", url, "/weight_info", QUICK), "/weight_info").weight_version

    async def renew(self, url: str, folder: str, version: str) -> None:
        """Load weights from a folder that the server sees, forget what was read by the old ones, and name them."""
        await self.call("POST", url, "/pause", params={"mode": "abort"})
        reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self.call("POST", url, "/collective_rpc", json=reload)
        await self.call("POST", url, "/reset_prefix_cache")
        await self.call("POST", url, "/update_weight_version", json={"new_version": version})
        await self.call("POST", url, "/resume")


def completion(answer: Answer, params: dict[str, Any], vocabulary: int) -> Completion:
    """The response of an answer. Raises ServerFault where its request could not have led to it."""
    choice, most = answer.choices[0], params["max_tokens"]
    tokens, told = choice.token_ids, choice.logprobs
    if len(tokens) > most or not all(0 <= token < vocabulary for token in tokens):
        raise ServerFault(f"its response is not at most {most} token ids from 0 to {vocabulary - 1}: {str(tokens)[:100]}")
    if choice.finish_reason == "length" and len(tokens) < most:
        raise ServerFault(f"its response was cut at {len(tokens)} of {most} tokens; raise its --max-model-len", final=True)
    if "logprobs" not in params:
        return Completion(tuple(tokens), choice.finish_reason == "stop")
    steps = told.content if told is not None else []
    if [step.token_id for step in steps] != tokens:
        raise ServerFault("its log-probabilities are not of the tokens of its response")
    logprobs = tuple(step.logprob for step in steps)
    if not all(math.isfinite(x) and x <= 1e-3 for x in logprobs):
        raise ServerFault(f"its log-probabilities are not finite numbers of at most 0: {str(logprobs)[:100]}")
    return Completion(tuple(tokens), choice.finish_reason == "stop", logprobs)


def described(urls: Sequence[str], needed: int | None) -> tuple[str, list[str]]:
    """The type of the servers' weights, such as float32, and what keeps a run from using them, one line each.

    needed: tokens of a prompt with its response at most, where known; otherwise all servers must take equally many.
    """
    with ThreadPoolExecutor(len(urls)) as pool:
        found = dict(zip(urls, pool.map(_described, urls), strict=True))
    problems = [
        f"{url}: {fault}; start a vLLM server there (docs/launch.md), or take it out of urls"
        for url, fault in found.items()
        if isinstance(fault, ServerFault)
    ]
    models = {url: model for url, model in found.items() if isinstance(model, ModelConfiguration)}
    for url, model in models.items():
        if needed is not None and model.max_model_len < needed:
            problems.append(
                f"{url}: it takes {model.max_model_len} tokens, but a prompt with its response may have {needed}; raise its "
                f"--max-model-len, or set generation.max_length to {model.max_model_len}"
            )
        if model.logprobs_mode != "processed_logprobs":
            problems.append(f"{url}: its log-probabilities are {model.logprobs_mode}; start it with {FLAGS}")
    for what, values in {
        "dtype": {url: model.dtype.removeprefix("torch.") for url, model in models.items()},
        "max-model-len": {url: str(model.max_model_len) for url, model in models.items()} if needed is None else {},
    }.items():
        if len(set(values.values())) > 1:
            told = ", ".join(f"{url} {value}" for url, value in values.items())
            problems.append(f"the servers differ in --{what}: {told}; start all with the same")
    return next((model.dtype.removeprefix("torch.") for model in models.values()), ""), problems


def _described(url: str) -> ModelConfiguration | ServerFault:
    path, info = "/inference/v1/generate", "/server_info?config_format=json"
    try:
        with httpx2.Client(timeout=httpx2.Timeout(60, connect=QUICK), trust_env=False) as client:
            if (tried := client.post(url + path, json={})).status_code == 403:  # 400 where the endpoint is open
                return refused(403, path, tried.text)
            response = client.get(url + info)  # vLLM looks at its machine first, which takes seconds
        if response.status_code != 200:
            return refused(response.status_code, info, response.text)
        return read(ServerInfo, response.content, info).vllm_config.model_config_
    except ServerFault as fault:
        return fault
    except httpx2.HTTPError as error:
        return ServerFault(f"it cannot be reached ({type(error).__name__}: {error})")
