"""The agent: actor and critic, and the one forward that everything is read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cct.critic.towers import Tower
from cct.errors import attributed_to
from cct.handover import read_only
from cct.packing import Packed, can_pack, pack, worth_sharing
from cct.policy.attention import attention_concentration, packed_concentration, tap
from cct.policy.head import LOGITS_AT_ONCE, distribution_of, entropy_of, plain_head, reading, token_logprobs
from cct.rollout import Trace
from cct.statistic import Attention, Forward, Statistic
from cct.statistic.forward import PackedAttention


@dataclass
class Reading:
    """What one forward says about each response token; index t of [B, T] is read before token t."""

    logprobs: Tensor  # [B, T] at the sampling temperature
    entropy: Tensor  # [B, T] of the distribution that token t was drawn from, detached; 0 where it was not asked for
    values: Tensor | None = None  # [B, T + 1]; the last follows token T
    stats: dict[str, Tensor] = field(default_factory=dict)  # name -> [B, T]
    trace: Trace | None = None  # what the critic read, to train it without another forward of the actor


class Agent(nn.Module):
    """An actor, and a critic that reads it.

    temperature: of sampling; log-probabilities are taken at the same one. bf16: compute in bfloat16 wherever
    autocast does; behaviour and update alike, or their ratio would not start at 1. logits_at_once: tokens of a forward
    whose logits stand in memory together. share: whether a forward computes a prompt once for all of its responses; auto does
    where `worth_sharing` says so. window: the longest sequence that may be shared, None for any.
    """

    def __init__(
        self,
        actor: PreTrainedModel,
        critic: Tower | None,
        temperature: float = 1.0,
        *,
        bf16: bool = False,
        logits_at_once: int | None = None,
        share: bool | Literal["auto"] = False,
        window: int | None = None,
    ):
        super().__init__()
        self.actor = actor
        self.critic = critic
        self.temperature = temperature
        self.bf16 = bf16
        self.share, self.window = share, window
        self.iteration: int | None = None  # named where a part fails
        self.logits_at_once = logits_at_once or max(1, LOGITS_AT_ONCE // actor.config.get_text_config().vocab_size)
        self._head = (plain_head(actor),)  # in a tuple, or it would be a part of this module a second time

    def like(self, other: PreTrainedModel, *, share: bool = True) -> Agent:
        """Another actor read in the same way, without a critic. share: prompts too, where this one shares them."""
        return Agent(
            other,
            None,
            self.temperature,
            bf16=self.bf16,
            logits_at_once=self.logits_at_once,
            share=self.share and share,
            window=self.window,
        )

    def _precision(self, tensor: Tensor) -> torch.autocast:
        return torch.autocast(tensor.device.type, torch.bfloat16, enabled=self.bf16)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        width: int,
        *,
        statistics: dict[str, Statistic] | None = None,
        with_critic: bool = False,
        with_entropy: bool = True,
    ) -> Reading:
        """One forward over [B, S] tokens (prompts left-padded, responses right-padded) of which the last `width` respond.

        statistics: what to measure, by name. with_critic: leave a trace and the critic's values.
        """
        critic = self.critic if with_critic else None
        wanted, n_layers = statistics or {}, self.actor.config.get_text_config().num_hidden_layers
        layers = {what: _layers_of(wanted, what, n_layers) for what in ("attention", "hidden_states")}
        of_critic = (critic.reads_attention, critic.reads_hidden) if critic is not None else ((), ())
        packed = self._packed(input_ids, attention_mask, width)
        given, tokens = _inputs(input_ids, attention_mask, width, packed)
        head = self._head[0]
        whole = head is None or any("distribution" in what.reads for what in wanted.values())
        of_tokens = (
            nullcontext()
            if whole or head is None
            else reading(head, tokens, self.temperature, entropy=with_entropy, at_once=self.logits_at_once)
        )
        with tap(self.actor, layers["attention"] | {*of_critic[0]}) as opened, self._precision(input_ids), of_tokens:
            output = self.actor(
                **given, use_cache=False, output_hidden_states=bool(layers["hidden_states"]) or bool(of_critic[1])
            )

        def of_rows(x: Tensor) -> Tensor:
            return x if packed is None else packed.responding(x[0])

        distribution = distribution_of(output.logits[:, :-1], self.temperature) if whole else None
        logprobs, entropy = (
            output.logits.unbind(-1)
            if distribution is None
            else (token_logprobs(distribution, tokens), entropy_of(distribution))
        )
        read = Reading(of_rows(logprobs), of_rows(entropy.detach()))
        with torch.no_grad():
            states = {layer: output.hidden_states[layer + 1].detach() for layer in layers["hidden_states"]}
            forward = Forward(
                input_ids,
                attention_mask,
                width,
                n_layers,
                read.logprobs.detach(),
                read.entropy,
                opened.attention,
                states if packed is None else {layer: packed.unpack(state[0]) for layer, state in states.items()},
                concentration,
                of_rows(distribution.detach()) if distribution is not None else None,
            )
            read.stats = {name: self._measured(name, what, forward) for name, what in wanted.items()}
        if critic is not None:
            self._add_values(read, critic, forward, output.hidden_states, packed)
        return read

    def _packed(self, input_ids: Tensor, attention_mask: Tensor, width: int) -> Packed | None:
        """The rows as a pack, where prompts are to be shared."""
        device = input_ids.device.type
        if not self.share or device not in ("cpu", "cuda") or not can_pack(attention_mask, width):
            return None
        lengths = attention_mask.sum(1)
        if self.window is not None and int(lengths.max()) > self.window:
            if self.share == "auto":
                return None
            raise ValueError(
                f"training.share_prefix: a sequence of {int(lengths.max())} tokens is longer than the policy's sliding window "
                f"of {self.window}, within which prompts can be shared; set it to auto or false"
            )
        if self.share == "auto" and not worth_sharing(input_ids, attention_mask, width):
            return None
        return pack(input_ids, attention_mask, width)

    def _add_values(
        self, read: Reading, critic: Tower, forward: Forward, hidden_states: Sequence[Tensor], packed: Packed | None
    ) -> None:
        """The critic's values and statistics, and the trace that they were read from."""
        to_left = (forward.input_ids.shape[1] - forward.width, 0)
        states = {layer: hidden_states[layer].detach() for layer in critic.reads_hidden}
        of_tokens = [nn.functional.pad(x, to_left) for x in (forward.logprobs, forward.entropy)]
        of_heads = {
            layer: concentration(forward.attention[layer], pack=critic.reads_packed) for layer in critic.reads_concentration
        }
        if packed is not None and not critic.reads_packed:
            states = {layer: packed.unpack(state[0]) for layer, state in states.items()}
        elif packed is not None:
            of_tokens = [packed.pack(x).unsqueeze(0) for x in of_tokens]
        read.trace = trace = Trace(
            forward.input_ids,
            forward.attention_mask,
            hidden_states=states,
            attention={layer: forward.attention[layer] for layer in critic.reads_attention},
            token_logprobs=of_tokens[0],
            entropy=of_tokens[1],
            concentration=of_heads,
            packed=packed if critic.reads_packed else None,
        )
        raw, read.values = self.values(trace, forward.width)
        with torch.no_grad():
            trace.values = critic.head.members(raw)
            read.stats |= {name: statistic[:, :-1] for name, statistic in critic.head.statistics(raw).items()}

    def values(self, trace: Trace, width: int) -> tuple[Tensor, Tensor]:
        """The critic's raw outputs and values on a trace, [B, width + 1 (, ...)]; index t is read before token t."""
        assert self.critic is not None
        name = f"critic ({type(self.critic).__name__})"
        with self._precision(trace.input_ids), attributed_to(name, self.iteration), read_only(name, vars(trace)):
            raw = self.critic(trace)
            raw = (raw if trace.packed is None else trace.packed.unpack(raw[0]))[:, -width - 1 :].float()
            return raw, self.critic.head.value(raw)

    def _measured(self, name: str, what: Statistic, forward: Forward) -> Tensor:
        part = f"statistic '{name}' ({type(what).__name__})"
        with attributed_to(part, self.iteration), read_only(part, vars(forward)):
            measured = what.measure(forward).detach().float()
            if measured.shape != forward.logprobs.shape:
                raise ValueError(
                    f"it has shape {tuple(measured.shape)}; expected one number for each response token, "
                    f"{tuple(forward.logprobs.shape)}"
                )
        return measured


def _inputs(input_ids: Tensor, attention_mask: Tensor, width: int, packed: Packed | None) -> tuple[dict[str, Any], Tensor]:
    """What the actor is called with, and the tokens of which its head gives the log-probabilities."""
    if packed is None:
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
        kept = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": positions,
            "logits_to_keep": width + 1,
        }
        return kept, input_ids[:, -width:]
    given, first = packed.inputs(input_ids), packed.prompts.count
    emitting = nn.functional.pad(packed.before[first:], (0, 1))  # the head leaves the last out
    return {**given, "logits_to_keep": emitting}, given["input_ids"][:, first:]


def _layers_of(wanted: Mapping[str, Statistic], what: str, n_layers: int) -> set[int]:
    """Layers whose `attention` or `hidden_states` the statistics read."""
    return {layer for one in wanted.values() if what in one.reads for layer in one.layer_indices(n_layers)}


def concentration(
    attention: Attention, statistic: Literal["shannon", "renyi2", "max"] = "shannon", sinks: int = 0, *, pack: bool = False
) -> Tensor:
    """`attention_concentration` of a layer that was tapped, [B, H, S]; by default the critic's feature.

    pack: where prompts were shared leave it [1, H, N], over the pack.
    """
    if isinstance(attention, PackedAttention) and statistic != "max" and not sinks:
        found = packed_concentration(*attention.of_pack, attention.packed, scaling=attention.scaling, statistic=statistic)
        return found.T.unsqueeze(0) if pack else attention.packed.unpack(found).transpose(1, 2)
    return attention_concentration(
        attention.query, attention.key, mask=attention.mask, scaling=attention.scaling, statistic=statistic, sinks=sinks
    )
