"""What the passes of a recipe's agent hold, counted by running them on tensors that have shapes and no memory.

The agent's own code runs, once each: a reading forward, a critic's pass, a policy's pass. So whatever the
model, the critic or the precision, what is counted is what the code does. Not seen: what a kernel takes
inside, and what an allocator loses between tensors.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel

from cct.agent.agent import Agent
from cct.packing import Packed, pack
from cct.policy import LoRA, Policy
from cct.policy.attention import tappable
from cct.recipe import Recipe


@dataclass(frozen=True)
class Peak:
    """The most bytes alive at once in a pass, beside what was there before."""

    total: int = 0
    logits: int = 0
    """Of these, tensors over the vocabulary."""
    left: int = 0
    """Still alive at the end."""


@dataclass(frozen=True)
class Footprint:
    """Sizes of a recipe's agent, and what its passes over one micro-batch hold, in bytes."""

    actor: int
    """Parameters of the actor, adapters included."""
    trained: int
    """Those of the actor that learn."""
    critic: int
    """Parameters of the critic."""
    weight_bytes: int
    """Of one parameter as the passes see it."""
    layers: int
    largest: int
    """Parameters of the largest module that holds some directly, or of a layer."""
    cache_per_token: int
    """Elements that one token takes in the cache of keys and values."""
    vocabulary: int
    teacher: int = 0
    """Bytes of the frozen teacher."""
    read: Peak = Peak()
    """The behaviour forward; what is left is the trace that the critic learns from."""
    critic_pass: Peak = Peak()
    policy_pass: Peak = Peak()


class _Fake(FakeTensorMode):
    """A copied tensor stays of the same mode: the standard critic is a copy of the actor."""

    def __deepcopy__(self, memo: Any) -> _Fake:
        return self


class Live(TorchDispatchMode):
    """Counts the bytes of tensors made while it is open, for as long as they live."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary, self.now, self.logits = vocabulary, 0, 0
        self.peak = Peak()
        self._known: dict[int, tuple[int, bool]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            self._meet(tensor, made=False)  # it was there before
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            self._meet(tensor, made=True)
        return result

    def _meet(self, tensor: Any, made: bool) -> None:
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        size, is_logits = storage.nbytes() if made else 0, tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary
        self._known[storage._cdata] = size, is_logits
        weakref.finalize(storage, self._gone, storage._cdata)
        self.now += size
        self.logits += size * is_logits
        if self.now > self.peak.total:
            self.peak = Peak(self.now, self.logits)

    def _gone(self, key: int) -> None:
        size, is_logits = self._known.pop(key)
        self.now -= size
        self.logits -= size * is_logits

    def closing(self) -> Peak:
        return Peak(self.peak.total, self.peak.logits, self.now)


class _Packing(Agent):
    """Reads every forward as one pack, whose places were found on tensors with memory."""

    given: Packed | None = None

    def _packed(self, input_ids: Tensor, attention_mask: Tensor, width: int) -> Packed | None:
        return self.given


def _packed(rows: int, prompts: int, prompt: int, width: int) -> Packed:
    """So many rows of `prompt` + `width` tokens, with so many prompts in turn."""
    ids = (torch.arange(rows) % prompts).unsqueeze(1).expand(-1, prompt + width)
    return pack(ids, torch.ones_like(ids), width)


def footprint(
    recipe: Recipe, config: Any, prompt: int, width: int, *, rows: int, accumulates: bool, prompts: int | None = None
) -> Footprint:
    """Run the passes of `recipe` over so many rows of `prompt` + `width` tokens, without memory.

    config: the model's transformers configuration. accumulates: gradients are there before a policy's
    pass, and are not counted as made in it. prompts: that the rows share, of whom each stands once; None where they do not.
    """
    training, text, dtype = recipe.training, config.get_text_config(), _dtype(recipe.policy, config)
    packed = _packed(rows, prompts, prompt, width) if prompts is not None else None
    with _Fake(allow_non_fake_inputs=True):
        actor = tappable(AutoModelForCausalLM.from_config(config, dtype=dtype))
        if recipe.policy.lora is not None:
            _adapt(actor, recipe.policy.lora)
        with warnings.catch_warnings():  # a copied tensor without memory warns that it has none
            warnings.simplefilter("ignore")
            critic = recipe.critic.build(actor, recipe.reward_bounds) if recipe.critic else None
        if training.gradient_checkpointing:
            actor.gradient_checkpointing_enable({"use_reentrant": False})
        agent = _Packing(
            actor.train(),
            critic,
            recipe.generation.temperature,
            bf16=training.precision == "bf16",
            logits_at_once=training.logits_at_once,
        )
        agent.given = packed
        ids, attention_mask = (make(rows, prompt + width, dtype=torch.long) for make in (torch.zeros, torch.ones))
        passes = {}
        with torch.no_grad(), Live(text.vocab_size) as live:
            reading = agent(ids, attention_mask, width, statistics=recipe.statistics, with_critic=True)
            passes["read"] = live.closing()
        if critic is not None and reading.trace is not None:
            with Live(text.vocab_size) as live:
                agent.values(reading.trace, width)[0].sum().backward()
            passes["critic_pass"] = live.closing()
        del reading
        trained = [p for p in actor.parameters() if p.requires_grad]
        if accumulates:
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
        with Live(text.vocab_size) as live:
            agent(ids, attention_mask, width, with_entropy=False).logprobs.sum().backward()
        passes["policy_pass"] = live.closing()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        count = lambda module: sum(p.numel() for p in module.parameters()) if module is not None else 0  # noqa: E731
        direct = [sum(p.numel() for p in module.parameters(recurse=False)) for module in actor.modules()]
        return Footprint(
            actor=count(actor),
            trained=sum(p.numel() for p in trained),
            critic=count(critic),
            weight_bytes=dtype.itemsize,
            layers=text.num_hidden_layers,
            largest=max(*direct, count(actor.base_model) // text.num_hidden_layers),
            cache_per_token=2 * text.num_hidden_layers * heads * head_dim,
            vocabulary=text.vocab_size,
            teacher=_bytes(recipe.teacher, recipe.alphabet) if recipe.teacher is not None else 0,
            **passes,
        )


def sizes(recipe: Recipe, config: Any) -> dict[str, int]:
    """Parameters of the recipe's critic and, beside it, of TAC and of a second Transformer, for this model."""
    from cct.critic import critics

    with torch.device("meta"):
        actor = AutoModelForCausalLM.from_config(config)
        parts = {"tac": critics["tac"](), "standard": critics["standard"]()}
        if recipe.critic is not None:
            parts[recipe.critic.use] = recipe.critic
        return {name: sum(p.numel() for p in part.build(actor, (0.0, 1.0)).parameters()) for name, part in parts.items()}


def _bytes(policy: Policy, alphabet: str) -> int:
    """Of a model's weights."""
    config = policy.config(alphabet=alphabet)
    model = AutoModelForCausalLM.from_config(config, dtype=_dtype(policy, config))
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _dtype(policy: Policy, config: Any) -> torch.dtype:
    """Of a model's weights; bf16 precision computes beside them."""
    named = getattr(policy, "dtype", "float32")
    stored = getattr(config, "dtype", None)
    return (stored if isinstance(stored, torch.dtype) else torch.float32) if named == "auto" else getattr(torch, named)


def _adapt(actor: PreTrainedModel, lora: LoRA) -> None:
    """Adapters of the right sizes at the right places: enough to count with."""
    actor.requires_grad_(False)
    targets = (lora.targets,) if isinstance(lora.targets, str) else tuple(lora.targets)
    linear = {name: module for name, module in actor.named_modules() if isinstance(module, nn.Linear)}
    for name, module in linear.items():
        wanted = module is not actor.get_output_embeddings() if lora.targets == "all-linear" else name.endswith(targets)
        if wanted:
            like: dict[str, Any] = {"bias": False, "dtype": module.weight.dtype}
            down, up = nn.Linear(module.in_features, lora.rank, **like), nn.Linear(lora.rank, module.out_features, **like)
            module.add_module("lora", nn.Sequential(down, up))
            module.register_forward_hook(lambda module, args, output: output + module.lora(args[0]))
