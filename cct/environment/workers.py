"""Many episodes at once, in this process or in workers that can be ended.

Workers are spawned, not forked (torch has threads), and make the environment again from its name and knobs. Each holds many
episodes and answers one call at a time, so that a call that hangs or ends the process is known. Its other episodes are
played again in a new worker, from their prompts, seeds and actions.
"""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cct.evidence.base import Failure
from cct.registry import RAISED, load_plugin, origin

from .base import Action, Environment, Start, Step, environments
from .player import Player

if TYPE_CHECKING:
    from cct.rollout import Prompt

# What there is of an episode: where it begins, and what was done in it.
Played = tuple["Prompt", int, Sequence[Action]]

_POOLS: weakref.WeakSet[EpisodePool] = weakref.WeakSet()
GRACE = 2.0  # seconds in which a worker closes its episodes before it is ended


class EpisodePool:
    """Plays an environment's episodes together, a turn at a time. Numbers count from 0 at each `start` or `replay`.

        with EpisodePool(environment) as pool:
            starts = pool.start([(prompt, seed), ...])
            steps = pool.step([0, 2], [Action("first"), Action("third")])

    A call returns when all its episodes have answered; workers run in parallel. An episode that raised, hung, or answered with
    something that cannot be used is a `Failure`, and over; the others know nothing of it.
    """

    def __init__(self, environment: Environment):
        self.environment = environment
        self._player = Player(environment)
        self._workers = [_Worker(environment) for _ in range(environment.workers)]
        self._answered: dict[int, list[_Job]] = {}  # of each living episode
        self._failures: dict[int, Failure] = {}
        _POOLS.add(self)

    def start(self, items: Sequence[tuple[Prompt, int]]) -> list[Start | Failure]:
        """Begin an episode for each (prompt, seed); those that were living are over."""
        self.end(list(self._answered))
        self._forget()
        found = self._run(_Job(number, "start", item) for number, item in enumerate(items))
        return [found[number] for number in range(len(items))]

    def replay(self, items: Sequence[Played]) -> list[Start | Step | Failure]:
        """Begin episodes at a later turn, each after its actions. Returns the answers to the last ones; starts where none."""
        self.end(list(self._answered))
        self._forget()
        jobs = [
            job
            for number, (prompt, seed, actions) in enumerate(items)
            for job in (_Job(number, "start", (prompt, seed)), *(_Job(number, "step", (action,)) for action in actions))
        ]
        found = self._run(jobs)
        return [found[number] for number in range(len(items))]

    def step(self, which: Sequence[int], actions: Sequence[Action]) -> list[Step | Failure]:
        """The answers to one turn of each of these episodes. One that failed before gives the same Failure again."""
        if len(set(which)) < len(which):
            raise ValueError(f"an episode takes one turn at a time; step was given the numbers {list(which)}")
        found = self._run(_Job(number, "step", (action,)) for number, action in zip(which, actions, strict=True))
        return [found[number] for number in which]

    def end(self, which: Sequence[int]) -> None:
        """Close episodes that go no further, cut by a limit for instance."""
        self._run(_Job(number, "end", ()) for number in which if number in self._answered)

    def close(self, grace: float = GRACE) -> None:
        """End all episodes and workers; a later start begins anew. grace: seconds that workers have to close their episodes."""
        self._forget()
        for worker in self._workers:
            worker.queue.clear()
            worker.stop(grace)

    def __enter__(self) -> EpisodePool:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _forget(self) -> None:
        self._player.close()
        self._answered.clear()
        self._failures.clear()

    # --- a turn -----------------------------------------------------------------------------------
    def _run(self, jobs: Iterable[_Job]) -> dict[int, Any]:
        """The last answer in each job's episode."""
        found: dict[int, Any] = {}
        if not self._workers:
            for job in jobs:
                failure = self._failures.get(job.number)
                found[job.number] = self._take(job, failure or getattr(self._player, job.call)(job.number, *job.arguments))
            return found
        for job in jobs:
            self._worker_of(job.number).queue.append(job)
        try:
            while busy := [worker for worker in self._workers if self._has_work(worker, found)]:
                for worker in _ready(busy):
                    self._receive(worker, found)
        except BaseException:  # Control-C, for one
            self.close(grace=0.0)
            raise
        return found

    def _worker_of(self, number: int) -> _Worker:
        return self._workers[number % len(self._workers)]

    def _has_work(self, worker: _Worker, found: dict[int, Any]) -> bool:
        """Whether it waits for an answer, after sending the next call where it does not."""
        while worker.current is None and worker.queue:
            job = worker.queue.popleft()
            failure = self._failures.get(job.number) or worker.send(job)
            if failure:
                found[job.number] = self._take(job, failure)
        return worker.current is not None

    def _receive(self, worker: _Worker, found: dict[int, Any]) -> None:
        job = worker.current
        assert job is not None
        answer, lost = worker.answer()
        if job is not BEGIN:
            found[job.number] = self._take(job, answer)
        if not lost:
            return
        if job is BEGIN:  # it would not come up a second time either
            for other in self._of(worker) | {each.number for each in worker.queue}:
                self._failures[other] = answer
        again = [each for number in sorted(self._of(worker)) for each in self._answered[number]]
        worker.queue = deque([*again, *(each for each in worker.queue if each.answer is None)])

    def _of(self, worker: _Worker) -> set[int]:
        """Numbers of its living episodes."""
        return {number for number in self._answered if self._worker_of(number) is worker and number not in self._failures}

    def _take(self, job: _Job, answer: Any) -> Any:
        """Keep what plays the episode again, or that it is over."""
        again = job.answer is not None
        if again and not isinstance(answer, Failure) and answer != job.answer:
            answer = Failure(
                f"replayed after its worker ended, it answered {_short(answer)}, but before {_short(job.answer)}; an episode "
                "must follow from its prompt, seed and actions"
            )
        if isinstance(answer, Failure):
            self._failures[job.number] = answer
        if job.call == "end" or isinstance(answer, Failure) or (isinstance(answer, Step) and answer.over):
            self._answered.pop(job.number, None)
        elif not again:
            self._answered.setdefault(job.number, []).append(_Job(job.number, job.call, job.arguments, answer))
        return answer


@dataclass(frozen=True)
class _Job:
    """A call of `Player`, and what it answered before, where it is made again."""

    number: int
    call: str
    arguments: tuple[Any, ...]
    answer: Start | Step | None = None


BEGIN = _Job(-1, "", ())  # the environment is being made, which has no time limit


class _Worker:
    """One process, started with its first call."""

    def __init__(self, environment: Environment):
        self.time_limit = environment.time_limit
        knobs = {name: knob for name, knob in environment.model_dump(mode="json").items() if name != "use"}
        self.made_of = origin(type(environment)), knobs, environment.use
        self.queue: deque[_Job] = deque()
        self.current: _Job | None = None
        self.deadline: float | None = None
        self.process: Any = None
        self.pipe: Connection

    def send(self, job: _Job) -> Failure | None:
        """Make it the current call. A Failure where it cannot be sent."""
        if self.process is None:
            self._spawn()
            self.queue.appendleft(job)
            return None
        try:
            self.pipe.send((job.call, job.number, *job.arguments))
        except OSError:
            pass  # it is dead, and `answer` will say so
        except Exception as error:
            return Failure(f"it cannot be sent to a worker process: {Failure.of(error).reason}")
        self.current, self.deadline = job, time.monotonic() + self.time_limit if self.time_limit else None
        return None

    def _spawn(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(theirs, *self.made_of), name="cct environment")
        self.process.start()
        theirs.close()
        self.current, self.deadline = BEGIN, None

    def answer(self) -> tuple[Any, bool]:
        """(answer to the current call, whether the process is gone)."""
        self.current = None
        try:
            if self.pipe.poll():
                return self.pipe.recv(), False
        except (OSError, EOFError):
            pass
        if self.deadline is not None and time.monotonic() >= self.deadline and self.process.is_alive():
            failure = Failure(f"took longer than time_limit, {self.time_limit:g} s", timed_out=True)
        else:
            self.process.join(GRACE)
            failure = Failure(f"its worker process ended (exit code {self.process.exitcode})")
        self.stop()
        return failure, True

    def stop(self, grace: float = 0.0) -> None:
        """End the process, after it had a while to close its episodes."""
        if self.process is None:
            return
        process, self.process = self.process, None
        if grace and self.current is None:
            try:
                self.pipe.send(None)
                process.join(grace)
            except OSError:
                pass
        process.kill()
        process.join()
        self.pipe.close()
        self.current = None


def _ready(busy: Sequence[_Worker]) -> list[_Worker]:
    """Those that have answered, died, or taken too long; waits for the first of them."""
    deadlines = [worker.deadline for worker in busy if worker.deadline is not None]
    timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
    woken = set(wait([end for worker in busy for end in (worker.pipe, worker.process.sentinel)], timeout))
    now = time.monotonic()
    return [
        worker
        for worker in busy
        if {worker.pipe, worker.process.sentinel} & woken or (worker.deadline is not None and now >= worker.deadline)
    ]


def _serve(pipe: Connection, source: str, knobs: dict[str, Any], use: str) -> None:
    """A worker: makes the environment, says so, and answers calls until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Control-C is the trainer's to handle
    import numpy  # noqa: F401  (its generator is the episodes' too; loading it counts in no step)

    player: Player | None = None
    failure: Failure | None = None
    try:
        load_plugin(source, Path.cwd())
        environment = environments[use].model_validate({**knobs, "workers": 0, "time_limit": None})
        environment.ready()
        player = Player(environment)
    except RAISED as error:
        failure = Failure(Failure.of(error).reason)
    try:
        pipe.send(None)
        while (call := pipe.recv()) is not None:
            answer = failure or getattr(player, call[0])(*call[1:])
            pipe.send(Failure(answer.reason) if isinstance(answer, Failure) else answer)  # not every exception can be sent
    except (EOFError, OSError):  # nobody is there any more
        pass
    if player:
        player.close()


def _short(answer: Any) -> str:
    return repr(answer)[:200]


def close_pools() -> None:
    """End all workers of all pools."""
    for pool in list(_POOLS):
        pool.close()


atexit.register(close_pools)
