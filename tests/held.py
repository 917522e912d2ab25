"""One iteration of the training loop up to its updates, which are kept and not taken."""

from __future__ import annotations

from types import SimpleNamespace

from cct.training.loop import Loop
from cct.training.minibatches import CriticBatch, PolicyBatch


class Held(Loop):
    """The loop, but no optimizer takes a step."""

    def __init__(self, recipe, agent, tokenizer, reference=None):
        super().__init__(recipe, agent, tokenizer, reference)
        self.batches: list[PolicyBatch | CriticBatch] = []

    def update(self, batches):
        self.batches.extend(batches)

    def update_metrics(self):
        return {}

    def collect(self, number=1):
        """The fields of iteration `number`, and as `updates` the batches that would have been learnt from, in order."""
        self.batches = []
        return SimpleNamespace(**vars(self.iterate(number)), updates=self.batches)
