"""Worker processes for slow or hanging evidence.

A pool lives from the first batch that its evidence judges to `close_workers`, at the end of a run. Workers are
spawned, not forked (torch has threads), and make the evidence again from its name and knobs.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cct.registry import load_plugin, origin

from .base import Evidence, Failure, Verdict, evidences, plain

if TYPE_CHECKING:
    from pebble import ProcessFuture, ProcessPool

    from cct.rollout import Prompt, Response

_POOLS: dict[str, ProcessPool] = {}
_PART: Evidence | Failure | None = None  # in a worker: what it judges by, or why it has nothing


def verdicts(
    part: Evidence, prompts: Sequence[Prompt], responses: Sequence[Response], iteration: int = 0
) -> Generator[Verdict | Failure]:
    """A verdict or a failure for each response, from the part's workers where it has some. iteration: see `Evidence.at`.

    One at a time: who has seen enough closes it, and the rest is not judged.
    """
    if not part.workers:
        part = part.at(iteration)
        one_by_one = type(part).judge_batch is Evidence.judge_batch
        yield from map(part.attempt, prompts, responses) if one_by_one else _batch(part, prompts, responses)
        return
    pool = _pool(part)
    futures = [
        pool.schedule(_judge, args=(prompt, response, iteration), timeout=part.time_limit)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    try:
        for future in futures:
            yield _result(future, part)
    finally:
        for future in futures:
            future.cancel()  # those that are done stay as they are


def _batch(part: Evidence, prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[Verdict | Failure]:
    """All verdicts at once; failures where that raised, or gave another number of them."""
    try:
        found = list(part.judge_batch(prompts, responses))
        if len(found) != len(responses):
            raise ValueError(f"judge_batch returned {len(found)} verdicts for {len(responses)} responses")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return [Failure.of(error)] * len(responses)
    return found


def close_workers() -> None:
    """End all worker processes; a later batch would start new ones."""
    while _POOLS:
        pool = _POOLS.popitem()[1]
        pool.stop()
        pool.join()


atexit.register(close_workers)


def _pool(part: Evidence) -> ProcessPool:
    from pebble import ProcessPool

    knobs = part.model_dump(mode="json", exclude={"weight", "on_error", "time_limit"})
    key = json.dumps(knobs, sort_keys=True)
    if key not in _POOLS or not _POOLS[key].active:
        made_of = (origin(type(part)), {name: knob for name, knob in knobs.items() if name != "use"}, part.use)
        _POOLS[key] = ProcessPool(part.workers, 0, _prepare, made_of, multiprocessing.get_context("spawn"))
    return _POOLS[key]


def _prepare(source: str, knobs: dict[str, Any], use: str) -> None:
    """In a worker, before its time counts: make the evidence, and let it import what it needs."""
    global _PART
    try:
        load_plugin(source, Path.cwd())
        _PART = evidences[use].model_validate({**knobs, "time_limit": None})
        _PART.ready()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a worker that ended here would be replaced for ever
        _PART = Failure(Failure.of(error).reason)


def _judge(prompt: Prompt, response: Response, iteration: int) -> Any:
    """In a worker. Nothing but plain numbers and text goes back, since not every exception can be sent."""
    assert _PART is not None
    if isinstance(_PART, Failure):
        return _PART
    try:
        return plain(_PART.at(iteration)(prompt, response))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Failure(Failure.of(error).reason)


def _result(future: ProcessFuture, part: Evidence) -> Verdict | Failure:
    from pebble import ProcessExpired

    try:
        return future.result()
    except TimeoutError:
        return Failure(f"took longer than time_limit, {part.time_limit:g} s", timed_out=True)
    except ProcessExpired as error:
        return Failure(f"its worker process ended (exit code {error.exitcode})")
    except Exception as error:
        return Failure.of(error)
