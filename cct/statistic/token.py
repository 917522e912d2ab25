"""Statistics of the distribution that a token is drawn from, and of the hidden state that emits it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from .base import LayerStatistic, Statistic, statistics

if TYPE_CHECKING:
    from torch import Tensor

    from .forward import Forward


@statistics.register("entropy")
class TokenEntropy(Statistic):
    """Entropy, in nats, of the distribution that token t is drawn from."""

    @property
    def name(self) -> str:
        return "token_entropy"

    def measure(self, forward: Forward) -> Tensor:
        return forward.entropy


@statistics.register("logprob")
class TokenLogprob(Statistic):
    """Log-probability of token t itself; a gate reads that of the token before."""

    knows = "token"

    @property
    def name(self) -> str:
        return "token_logprob"

    def measure(self, forward: Forward) -> Tensor:
        return forward.logprobs


@statistics.register("collision")
class Collision(Statistic):
    """Sum of squared probabilities of the distribution that token t is drawn from: the chance that two draws agree."""

    reads: ClassVar[frozenset[str]] = frozenset({"distribution"})

    def measure(self, forward: Forward) -> Tensor:
        return (2 * forward.distribution).logsumexp(-1).exp()


@statistics.register("hidden_change")
class HiddenChange(LayerStatistic):
    """Distance of the hidden state that emits token t from the one before, mean over layers; 0 if there is none before."""

    distance: Literal["cosine", "relative"] = "cosine"
    """1 - cosine, or the norm of the difference over the norm of the earlier state."""

    reads: ClassVar[frozenset[str]] = frozenset({"hidden_states"})

    @property
    def name(self) -> str:
        return f"hidden_change/{self.distance}/{self.layers_name}"

    def measure(self, forward: Forward) -> Tensor:
        import torch

        changes = []
        for layer in self.layer_indices(forward.n_layers):
            state = forward.hidden_states[layer].float()
            before, here = state[:, :-1], state[:, 1:]
            if self.distance == "cosine":
                change = 1 - torch.nn.functional.cosine_similarity(before, here, dim=-1)
            else:
                change = (here - before).norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-6)
            changes.append(torch.nn.functional.pad(change, (1, 0)))
        there_is_one = torch.nn.functional.pad(forward.attention_mask[:, :-1], (1, 0)).bool()
        return forward.emitting(torch.stack(changes).mean(0).masked_fill(~there_is_one, 0.0))
