"""Log-probabilities of tokens from a model's output head, without all its logits standing at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

# Logits that stand at once unless told otherwise: 256 MB in float32, and enough tokens to keep a matrix product busy.
LOGITS_AT_ONCE = 2**26


def distribution_of(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities [..., V], float32, of logits [..., V] at a temperature above 0."""
    return (logits.float() / temperature).log_softmax(-1)


def token_logprobs(distribution: Tensor, tokens: Tensor) -> Tensor:
    """[...] of the tokens [...] in log-probabilities [..., V]."""
    return distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def entropy_of(distribution: Tensor) -> Tensor:
    """Nats, [...], of log-probabilities [..., V]; detached."""
    return -(distribution.exp() * distribution).sum(-1)


def plain_head(model: PreTrainedModel) -> nn.Module | None:
    """The output head, where the model's logits are what it gives; None where more is done to them (soft caps, scales).

    One forward of two tokens tells.
    """
    head, seen = model.get_output_embeddings(), list[Tensor]()
    if head is None:
        return None
    hook = head.register_forward_hook(lambda module, args, output: seen.append(output))
    try:
        with torch.no_grad():
            tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
            logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        hook.remove()
    return head if len(seen) == 1 and seen[0] is logits else None


@contextmanager
def reading(head: nn.Module, tokens: Tensor, temperature: float, *, entropy: bool, at_once: int) -> Iterator[None]:
    """While open, `head` answers hidden states [B, T + 1, D] with [B, T, 2]: log-probability of token t, and entropy, at t.

    tokens: [B, T]; index t is read at the position before it, and the last position is left out. entropy: detached; 0 where
    it is not asked for. at_once: tokens whose logits stand at the same time; where there are more, the backward computes
    them again.
    """
    logits_of, own = head.forward, "forward" in vars(head)

    def some(hidden: Tensor, tokens: Tensor) -> Tensor:
        distribution = distribution_of(logits_of(hidden), temperature)
        logprobs = token_logprobs(distribution, tokens)
        return torch.stack([logprobs, entropy_of(distribution) if entropy else torch.zeros_like(logprobs)], -1)

    def forward(hidden: Tensor) -> Tensor:
        hidden, wanted = hidden[:, :-1].flatten(0, 1), tokens.flatten()
        if len(wanted) <= at_once:
            return some(hidden, wanted).unflatten(0, tokens.shape)
        pieces = zip(hidden.split(at_once), wanted.split(at_once), strict=True)
        return torch.cat([checkpoint(some, *piece, use_reentrant=False) for piece in pieces]).unflatten(0, tokens.shape)

    head.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own:
            head.forward = logits_of  # type: ignore[method-assign]
        else:
            del head.forward
