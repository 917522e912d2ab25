"""One iteration of the training loop up to its updates, which are kept and not taken."""

from __future__ import annotations

from types import SimpleNamespace

from cct.training.loop import Ahead, Loop
from cct.training.minibatches import CriticBatch, PolicyBatch
from cct.training.rows import Samples
from cct.training.sampler import Sampler


class Given(Sampler):
    """A sampler of responses that were sampled before."""

    def __init__(self, rows, *arguments):
        super().__init__(*arguments)
        self.rows = rows

    def sample(self, iteration, on_stage=lambda stage: None, version=None):
        return Samples(iteration, self.rows, {})


class Held(Loop):
    """The loop, but no optimizer takes a step."""

    def __init__(self, recipe, agent, tokenizer, reference=None, rows=None):
        super().__init__(recipe, agent, tokenizer, reference)
        if rows is not None:
            self.sampler = Given(rows, recipe, agent.actor, tokenizer)
            self.ahead = Ahead(self.sampler)
        self.batches: list[PolicyBatch | CriticBatch] = []

    def update(self, batches):
        self.batches.extend(batches)

    def update_metrics(self):
        return {}

    def collect(self, number=1):
        """The fields of iteration `number`, and as `updates` the batches that would have been learnt from, in order."""
        self.batches = []
        return SimpleNamespace(**vars(self.iterate(number)), updates=self.batches)
