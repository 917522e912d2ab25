"""The values that flow: `Prompt`, `Response`, `Rollout`, `Trace` and `Credit`.

Shape legend, used as name suffixes everywhere:
    B  responses            T  response positions (right-padded)
    S  prompt + response    P  prompt positions (left-padded), S = P + T
    H  attention heads      D  width of the model

Index t of [B, T] is a response token; a quantity "at t" was read at the position that predicts
token t, so it knows tokens before t only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from cct.registry import Knobs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """A question, and what is needed to judge an answer."""

    text: str
    answer: str = ""
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Response:
    """What the policy emitted for one prompt."""

    text: str
    """Decoded without special tokens."""
    tokens: tuple[int, ...]
    """Emitted token ids, the end token included."""
    finished: bool
    """It ended by itself; False where the length limit cut it (`finish_reason`)."""
    logprobs: tuple[float, ...] = ()
    """Per token, of the distribution that the engine drew it from; empty where greedy."""


class Concentration(Knobs):
    """A statistic of the policy's attention that a part asks the forward for.

    c = 1 - H(p) / log n over the n visible keys of the query, averaged over heads and layers.
    """

    statistic: Literal["shannon", "renyi2"] = "shannon"
    """Which entropy H: Shannon, or Renyi of order 2 (-log sum p^2)."""
    layers: Literal["last_half", "last_quarter", "all"] | tuple[int, ...] = "last_half"
    """Layers averaged over; indices may be negative."""
    sinks: int = Field(0, ge=0, le=64)
    """Leading keys left out (attention sinks); the rest is renormalised."""

    def layer_indices(self, n_layers: int) -> list[int]:
        """Indices in [0, n_layers). Raises ValueError where one does not exist."""
        if self.layers == "all":
            return list(range(n_layers))
        if self.layers == "last_half":
            return list(range(n_layers // 2, n_layers))
        if self.layers == "last_quarter":
            return list(range(n_layers - max(1, n_layers // 4), n_layers))
        bad = [i for i in self.layers if not -n_layers <= i < n_layers]
        if bad or not self.layers:
            raise ValueError(f"attention layers {list(self.layers)} do not fit a model of {n_layers} layers")
        return sorted({i % n_layers for i in self.layers})


@dataclass
class Attention:
    """Queries and keys of one layer as the kernel saw them, detached: enough to attend once more."""

    query: Tensor  # [B, H, S, head_dim]
    key: Tensor  # [B, H_kv, S, head_dim]
    mask: Tensor | None  # bool or additive [B, 1, S, S]; None means plain causal
    scaling: float


@dataclass
class Trace:
    """What one forward of the actor leaves behind for the critic, detached."""

    input_ids: Tensor  # [B, S]
    attention_mask: Tensor  # [B, S], 1 = token
    hidden_states: dict[int, Tensor]  # layer -> [B, S, D] after that layer (0: embeddings), where the critic reads it
    attention: dict[int, Attention]  # of the layers that were asked for
    token_logprobs: Tensor  # [B, S], log-probability of the token AT this position; 0 in the prompt
    entropy: Tensor  # [B, S], entropy of the distribution that emitted the token AT this position; 0 in the prompt
    concentration: dict[int, Tensor] = field(default_factory=dict)  # layer -> [B, H, S], where the critic reads it
    values: Tensor | None = None  # the critic's then, index t read before token t: [B, T + 1], or of each critic [B, T + 1, n]


@dataclass
class Rollout:
    """What happened: one iteration's responses and what the behaviour policy thought of them."""

    input_ids: Tensor  # [B, S]
    attention_mask: Tensor  # [B, S]
    mask: Tensor  # [B, T] bool, tokens the policy emitted and is trained on
    rewards: Tensor  # [B, T]
    groups: Tensor  # [B] int, responses to one prompt share a number
    truncated: Tensor  # [B] bool, cut by the length limit
    logprobs: Tensor  # [B, T] of the behaviour policy, by the trainer's forward
    rollout_logprobs: Tensor | None = None  # [B, T] of the distribution sampled from, by the engine
    values: Tensor | None = None  # [B, T] V(s_t)
    bootstrap: Tensor | None = None  # [B] V after the last token of a cut response, 0 elsewhere
    reference_logprobs: Tensor | None = None  # [B, T]
    stats: dict[str, Tensor] = field(default_factory=dict)  # name -> [B, T], detached statistics of the forward
    moments: dict[str, tuple[float, float]] = field(default_factory=dict)  # name -> mean, std over earlier iterations
    seed: int = 0  # for parts that draw, derived from recipe seed and iteration

    @property
    def prompt_width(self) -> int:
        return self.input_ids.shape[1] - self.mask.shape[1]

    @property
    def scores(self) -> Tensor:
        """Sum of each response's rewards, [B]; masked positions do not count."""
        return self.rewards.masked_fill(~self.mask, 0.0).sum(1)

    @property
    def valid(self) -> Tensor:
        """Responses with at least one trainable token, [B]; dropped ones have none."""
        return self.mask.any(1)

    def replace(self, **changes: Any) -> Rollout:
        return replace(self, **changes)


@dataclass
class Credit:
    """What it was worth."""

    advantages: Tensor  # [B, T], 0 where masked
    value_targets: Tensor | None = None  # [B, T]
    gate: Tensor | None = None  # [B, T] per-token discount, where the transport has one


def derive_seed(*parts: str | int) -> int:
    """An independent seed in [0, 2^31) for a purpose and an iteration: `derive_seed(recipe.seed, "sample", 3)`."""
    return int.from_bytes(sha256(repr(parts).encode()).digest()[:4], "big") >> 1
