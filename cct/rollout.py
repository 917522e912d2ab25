"""The values that flow: `Prompt`, `Response`, `Rollout`, `Trace` and `Credit`; and the statistics asked of a forward.

Shape legend, used as name suffixes everywhere:
    B  responses            T  response positions (right-padded)
    S  prompt + response    P  prompt positions (left-padded), S = P + T
    H  attention heads      D  width of the model

Index t of [B, T] is a response token; a quantity "at t" was read at the position that predicts
token t, so it knows tokens before t only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from cct.registry import Knobs

if TYPE_CHECKING:
    from torch import Tensor


# One turn of a conversation: its role and its content; a tool's result also names the call it answers.
Message = dict[str, str]

# Whose ratio of trainer to engine counts at a token: its own, that of the tokens after it.
RatioScope = frozenset[Literal["own", "later"]]

# How losses per token become one: see `geometry.aggregate`.
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum_over_constant"]


@dataclass(frozen=True)
class Prompt:
    """A question, and what is needed to judge an answer."""

    text: str
    """The question; of messages those after the system's, each behind its role where there are several."""
    answer: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    """What goes through the chat template in place of the text, where the task has messages: {role, content} each."""
    place: str = field(default="", compare=False)
    """Where it was read, such as `train.jsonl:17`; empty where it was made."""

    @property
    def written(self) -> str | tuple[Message, ...]:
        """What the policy encodes: the messages where there are some, else the text."""
        return self.messages or self.text


@dataclass(frozen=True)
class Turn:
    """One turn of an episode: what the policy emitted, and what its environment made of it."""

    text: str
    """Decoded without special tokens."""
    tokens: int
    """Emitted in it, its end token included."""
    finished: bool = True
    """The policy ended it; False where the length limit did."""
    observation: str = ""
    """What the policy read next, as text; empty after the last turn."""
    rewards: dict[str, float] = field(default_factory=dict)
    """By the name of the component; "" where the environment names none."""
    state: str | None = None
    """The environment's name of the state in which the turn began."""


@dataclass(frozen=True)
class Response:
    """What the policy emitted for one prompt: one text, or the turns of an episode."""

    text: str
    """Decoded without special tokens; of an episode its last turn."""
    tokens: tuple[int, ...]
    """Emitted token ids, the end token included; of an episode those of all turns, without what was observed between them."""
    finished: bool
    """It ended by itself; False where a limit cut it (`finish_reason`)."""
    logprobs: tuple[float, ...] = ()
    """Per token, of the distribution that the engine drew it from; empty where greedy."""
    turns: tuple[Turn, ...] = ()
    """Of an episode; empty without an environment."""


class Statistic(Knobs):
    """A detached number per response token that a part asks the behaviour forward for.

    A gate's must know nothing of token t: read it at the position that emits t (`forward.emitting`), or of the
    distribution that t is drawn from. One that looks at t or beyond is for reweighting advantages only.
    """

    layers: Literal["last_half", "last_quarter", "all"] | tuple[int, ...] = "last_half"
    """Layers read, where it reads any; indices may be negative."""

    reads: ClassVar[frozenset[str]] = frozenset()
    """What the forward must leave behind: `attention` and `hidden_states` of its layers, the `distribution`."""

    def measure(self, forward: Forward) -> Tensor:
        """[B, T] for the response tokens; entries at padding do not matter."""
        raise NotImplementedError

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
            raise ValueError(f"layers {list(self.layers)} do not fit a model of {n_layers} layers")
        return sorted({i % n_layers for i in self.layers})

    def fits(self, n_layers: int, n_heads: int) -> None:
        """Raises ValueError where the model has no such layers or heads."""
        self.layer_indices(n_layers)

    @property
    def layers_name(self) -> str:
        """The layers as part of a name in `Rollout.stats`."""
        return self.layers if isinstance(self.layers, str) else "+".join(map(str, self.layers))


class Concentration(Statistic):
    """How concentrated the attention of the query that emits a token is, averaged over heads and layers.

    1 - H(p) / log n over the n visible keys for the two entropies; the largest p itself for `max`.
    """

    statistic: Literal["shannon", "renyi2", "max"] = "shannon"
    """Shannon's entropy H, Renyi's of order 2 (-log sum p^2), or the largest attention probability."""
    sinks: int = Field(0, ge=0, le=64)
    """Leading keys left out (attention sinks); the rest is renormalised."""
    heads: Literal["all"] | tuple[Annotated[int, Field(ge=0)], ...] = "all"
    """Query heads averaged over, the same in every layer."""

    reads: ClassVar[frozenset[str]] = frozenset({"attention"})

    def fits(self, n_layers: int, n_heads: int) -> None:
        super().fits(n_layers, n_heads)
        if self.heads != "all" and (not self.heads or max(self.heads) >= n_heads):
            raise ValueError(f"heads {list(self.heads)} do not fit a model of {n_heads} attention heads")

    def measure(self, forward: Forward) -> Tensor:
        import torch

        per_layer = []
        for layer in self.layer_indices(forward.n_layers):
            per_head = forward.concentration(forward.attention[layer], self)
            chosen = per_head if self.heads == "all" else per_head[:, list(self.heads)]
            per_layer.append(chosen.mean(1))
        return forward.emitting(torch.stack(per_layer).mean(0))


class TokenEntropy(Statistic):
    """Entropy, in nats, of the distribution that token t was drawn from."""

    def measure(self, forward: Forward) -> Tensor:
        return forward.entropy


class TokenLogprob(Statistic):
    """Log-probability of token t itself: it knows t, so a gate may use it for later tokens only."""

    def measure(self, forward: Forward) -> Tensor:
        return forward.logprobs


class HiddenChange(Statistic):
    """How far the hidden state that emits token t is from the one before it, mean over layers; 0 where there is none before."""

    distance: Literal["cosine", "relative"] = "cosine"
    """1 - cosine, or the norm of the difference over the norm of the earlier state."""

    reads: ClassVar[frozenset[str]] = frozenset({"hidden_states"})

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


# Queries at once wherever attention is written out: bounds extra memory to H * 256 * S per sequence.
QUERY_BLOCK = 256


@dataclass
class Attention:
    """Queries and keys of one layer as the kernel saw them, detached: enough to attend once more."""

    query: Tensor  # [B, H, S, head_dim]
    key: Tensor  # [B, H_kv, S, head_dim]
    mask: Tensor | None  # bool or additive [B, 1, S, S]; None means plain causal
    scaling: float

    def blocks(self, size: int = QUERY_BLOCK, start: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """The attention probabilities, `size` queries at a time: (queries, [B, H, size, S]), float32, detached.

        Never more than H * size * S numbers a sequence. A query that sees no key has zeros. start: the first query.
        """
        import torch

        length = self.query.shape[2]
        position = torch.arange(length, device=self.query.device)
        for first in range(start, length, size):
            rows = slice(first, min(first + size, length))
            mask = position <= position[rows].unsqueeze(1) if self.mask is None else self.mask[:, :, rows]
            yield rows, self._probabilities(self.query[:, :, rows], mask)

    def of_query(self, position: Tensor) -> Tensor:
        """The attention of one query per sequence, [B] of positions, over the keys: [B, H, S], float32, detached."""
        import torch

        batch = torch.arange(len(position), device=position.device)
        if self.mask is None:
            keys = torch.arange(self.query.shape[2], device=position.device)
            mask = (keys <= position.unsqueeze(1))[:, None, None]
        else:
            mask = self.mask.expand(len(position), -1, -1, -1)[batch, :, position].unsqueeze(2)
        return self._probabilities(self.query[batch, :, position].unsqueeze(2), mask).squeeze(2)

    def _probabilities(self, query: Tensor, mask: Tensor) -> Tensor:
        import torch

        with torch.no_grad():
            key = self.key.float().repeat_interleave(query.shape[1] // self.key.shape[1], dim=1)
            logits = query.float() @ key.transpose(-1, -2) * self.scaling
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
            return logits.softmax(-1).nan_to_num(0.0)


@dataclass
class Forward:
    """One forward of the actor as a `Statistic` sees it, detached."""

    input_ids: Tensor  # [B, S]
    attention_mask: Tensor  # [B, S], 1 = token
    width: int  # T
    n_layers: int
    logprobs: Tensor  # [B, T] of token t in it
    entropy: Tensor  # [B, T] of it
    attention: dict[int, Attention]  # layer -> queries and keys, of the layers asked for
    hidden_states: dict[int, Tensor]  # layer -> [B, S, D] after that layer, of the layers asked for
    concentration: Callable[[Attention, Concentration], Tensor]  # [B, H, S], each query's
    all_logprobs: Tensor | None = None

    @property
    def distribution(self) -> Tensor:
        """[B, T, V], the log-probabilities that token t was drawn from. Raises ValueError where no statistic reads them."""
        if self.all_logprobs is None:
            raise ValueError("the distribution was not kept: a statistic that uses it says reads = frozenset({'distribution'})")
        return self.all_logprobs

    def emitting(self, x: Tensor) -> Tensor:
        """[B, S, ...] by position, as [B, T, ...] at the positions that emit the response's tokens."""
        return x[:, -self.width - 1 : -1]

    def emitted(self, x: Tensor) -> Tensor:
        """[B, S, ...] by position, as [B, T, ...] at the response's tokens themselves."""
        return x[:, -self.width :]


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
    logprobs: Tensor  # [B, T] of the behaviour policy, by the trainer's forward; where that was left out, by the engine
    rollout_logprobs: Tensor | None = None  # [B, T] of the distribution sampled from, by the engine
    values: Tensor | None = None  # [B, T] V(s_t)
    bootstrap: Tensor | None = None  # [B] V after the last token of a cut response, 0 elsewhere; None: nothing follows any
    reference_logprobs: Tensor | None = None  # [B, T]
    greedy_scores: Tensor | None = None  # [B] of the greedy response to the same prompt, NaN where it was not judged
    stats: dict[str, Tensor] = field(default_factory=dict)  # name -> [B, T], detached statistics of the forward
    moments: dict[str, tuple[float, float]] = field(default_factory=dict)  # name -> mean, std over earlier iterations
    anchors: Tensor | None = None  # [B, T] int, the state in which the token's turn began, from an environment; negative: none
    starts: Tensor | None = None  # [B, T] bool, first tokens of segments, where the transport asked for branches
    branch_values: Tensor | None = None  # [B, T] at those: mean return of continuations sampled from there; 0 elsewhere
    seed: int = 0  # for parts that draw, derived from recipe seed and iteration
    episodes: Tensor | None = None  # [B] int, rows of one episode share a number; None: every row is one
    order: Tensor | None = None  # [B] int, place of the row in its episode, from 0 on
    turns: Tensor | None = None  # [B, T] int, number of the token's turn in its episode; -1 where the policy emitted none
    versions: Tensor | None = None  # [B, T] int, iteration whose update made the policy that emitted the token; -1 likewise
    components: dict[str, Tensor] = field(default_factory=dict)  # name -> [B, T] rewards by what gave them, unweighted

    @property
    def prompt_width(self) -> int:
        return self.input_ids.shape[1] - self.mask.shape[1]

    @property
    def scores(self) -> Tensor:
        """Sum of each response's rewards, [B], float32 at least; masked positions do not count."""
        from cct.tensors import at_least_float32

        return at_least_float32(self.rewards).masked_fill(~self.mask, 0.0).sum(1)

    @property
    def valid(self) -> Tensor:
        """Responses with at least one trainable token, [B]; dropped ones have none."""
        return self.mask.any(1)

    def replace(self, **changes: Any) -> Rollout:
        return replace(self, **changes)


@dataclass(frozen=True)
class Credit:
    """What it was worth, detached: whatever a transport or a gate reads, no gradient of a loss gets back through it."""

    advantages: Tensor  # [B, T], 0 where masked
    value_targets: Tensor | None = None  # [B, T]
    gate: Tensor | None = None  # [B, T] per-token discount, where the transport has one

    def __post_init__(self) -> None:
        for name, x in vars(self).items():
            if getattr(x, "requires_grad", False):
                object.__setattr__(self, name, x.detach())


def derive_seed(*parts: str | int) -> int:
    """An independent seed in [0, 2^31) for a purpose and an iteration: `derive_seed(recipe.seed, "sample", 3)`."""
    return int.from_bytes(sha256(repr(parts).encode()).digest()[:4], "big") >> 1
