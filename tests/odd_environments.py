"""An environment that does what it is told, bad things included; worker processes import it from here."""

from __future__ import annotations

import os
import random
import sys
import time

import numpy

from cct.environment import Action, Environment, Episode, Start, Step, environments

LOG = "CCT_TEST_LOG"  # a file into which episodes write that they were closed


@environments.register("obedient")
class Obedient(Environment):
    """Does what the action says."""

    @property
    def components(self):
        return ("a", "b")

    @property
    def bounds(self):
        return -1.0, 1.0

    def open(self, prompt, seed):
        if prompt.text == "cannot open":
            raise KeyError("no such level")
        return Told(prompt, seed)


@environments.register("unmakable")
class Unmakable(Environment):
    """Works where it was made, and in no other process."""

    def ready(self):
        raise ValueError("no licence here")


class Told(Episode):
    def __init__(self, prompt, seed):
        self.prompt, self.seed, self.turn = prompt, seed, 0

    def reset(self):
        return {"nothing": None, "number": 3, "messages": [], "state": Start("x", 7), "over": Step(done=True)}.get(
            self.prompt.text, Start(f"seed {self.seed} {random.random()}", "first")
        )

    def step(self, action: Action):
        self.turn += 1
        answers = {
            "not a step": {"observation": "x"},
            "no observation": Step(),
            "no messages": Step([]),
            "empty": Step(""),
            "long": Step("x" * 200),
            "number": Step(5),
            "messages": Step([{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "name": "c"}]),
            "no role": Step([{"content": "a"}]),
            "no mapping": Step(["a"]),
            "content": Step([{"role": "user", "content": None}]),
            "surrogate": Step("\ud800"),
            "nan": Step("x", float("nan")),
            "inf": Step("x", {"a": float("inf")}),
            "huge": Step("x", 1e13),
            "text reward": Step("x", "1"),
            "unknown": Step("x", {"a": 1.0, "c": 2.0}),
            "named": Step("x", {"a": numpy.float32(0.25), "b": 0.5}),
            "plus": Step("x", 0.75),
            "beyond": Step(reward=3.0, done=True),
            "state": Step("x", state=3),
            "done": Step(reward=1.0, done=True),
            "cut": Step("seen by nobody", truncated=True),
            "done?": Step("x", done="no"),
            "numpy flag": Step(done=numpy.bool_(True)),
        }
        if action.text in answers:
            return answers[action.text]
        return getattr(self, action.text.split()[0])(*action.text.split()[1:])

    def draw(self):
        return Step(f"{self.turn}: {random.random()} {numpy.random.random()}", state=f"{self.prompt.text}/{self.turn}")

    def seed_globals(self):
        random.seed(0)
        numpy.random.seed(0)
        return Step("seeded")

    def fail(self):
        raise RuntimeError("the game crashed")

    def exit(self):
        sys.exit(3)

    def die(self):
        os._exit(7)

    def hang(self):
        time.sleep(600)

    def sleep(self, seconds):
        time.sleep(float(seconds))
        return Step("rested")

    def process(self):
        return Step(str(os.getpid()))

    def close(self):
        if LOG in os.environ:
            with open(os.environ[LOG], "a") as log:
                log.write(f"{self.prompt.text} {self.turn}\n")
        if self.prompt.text == "cannot close":
            raise OSError("still busy")
