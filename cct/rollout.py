"""The values that flow: `Prompt`, `Response`, `Rollout`, `Trace` and `Credit`.

Shape legend, used as name suffixes everywhere:
    B  responses            T  response positions (right-padded)
    S  prompt + response    P  prompt positions (left-padded), S = P + T
    H  attention heads      D  width of the model

Index t of [B, T] is a response token; a quantity "at t" was read at the position that predicts
token t, so it knows tokens before t only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from cct.packing import Packed
    from cct.statistic.forward import Attention


# One turn of a conversation: its role and its content; a tool's result also names the call it answers.
Message = dict[str, str]


def as_messages(text: str | Sequence[Message]) -> list[Message]:
    """A text as a user's message; messages as they are."""
    return [{"role": "user", "content": text}] if isinstance(text, str) else list(text)


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
    """What goes through the chat template instead of the text, where the task has messages: {role, content} each."""
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


@dataclass
class Trace:
    """What one forward of the actor leaves behind for the critic, detached.

    packed: for critics that say `reads_packed`, where prompts were shared. Then hidden states, token_logprobs, entropy and
    concentration are [1, N, D], [1, N], [1, N] and [1, H, N] over the pack, and attention holds `PackedAttention`.
    """

    input_ids: Tensor  # [B, S]
    attention_mask: Tensor  # [B, S], 1 = token
    hidden_states: dict[int, Tensor]  # layer -> [B, S, D] after that layer (0: embeddings), where the critic reads it
    attention: dict[int, Attention]  # of the layers that were asked for
    token_logprobs: Tensor  # [B, S], log-probability of the token AT this position; 0 in the prompt
    entropy: Tensor  # [B, S], entropy of the distribution that emitted the token AT this position; 0 in the prompt
    concentration: dict[int, Tensor] = field(default_factory=dict)  # layer -> [B, H, S], where the critic reads it
    values: Tensor | None = None  # the critic's then, index t read before token t: [B, T + 1], or of each critic [B, T + 1, n]
    packed: Packed | None = None


@dataclass
class Rollout:
    """What happened: one iteration's responses and what the behaviour policy thought of them."""

    input_ids: Tensor  # [B, S]
    attention_mask: Tensor  # [B, S]
    mask: Tensor  # [B, T] bool, tokens the policy emitted and is trained on
    rewards: Tensor  # [B, T]
    groups: Tensor  # [B] int, responses to one prompt share a number
    truncated: Tensor  # [B] bool, cut by the length limit
    logprobs: Tensor  # [B, T] of the policy before the update, by the trainer's forward; where that was left out, by the engine
    rollout_logprobs: Tensor | None = None  # [B, T] of the distribution sampled from, by the engine
    values: Tensor | None = None  # [B, T] V(s_t)
    bootstrap: Tensor | None = None  # [B] V after the last token of a cut response, 0 elsewhere; None: nothing follows any
    reference_logprobs: Tensor | None = None  # [B, T]
    teacher_logprobs: Tensor | None = None  # [B, T] of the recipe's teacher
    greedy_scores: Tensor | None = None  # [B] of the greedy response to the same prompt, NaN where it was not judged
    prompt_values: Tensor | None = None  # [B] of the response's prompt, by earlier iterations, where a transport remembers them
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
    weights: dict[str, float] = field(
        default_factory=dict
    )  # of the components that are the recipe's evidence, NaN for none given
    exact_values: Tensor | None = None  # [B, T] V(s_t) by an oracle, which tasks of the laboratory alone have
    decisions: Tensor | None = None  # [B, T] bool, tokens that decide something, by the same

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
