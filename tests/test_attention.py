"""Attention statistics against attention maps written out, on tensors and tapped from tiny models; the agent's forward."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import eager_twin, padded, tiny_model
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from cct.agent.agent import Agent
from cct.errors import TrainingStopped
from cct.policy import Runs, attention_concentration, kernel_of, tap, tappable
from cct.statistic import Attention, Concentration, HiddenChange, Statistic, TokenEntropy, TokenLogprob

LOWEST = torch.finfo(torch.float32).min
PROMPTS, RESPONSES = [[3, 4, 5, 6, 7], [8], [9, 10, 11]], [[12, 13, 14, 15], [16, 17, 18, 19, 3, 4, 1], [5]]


# --- oracles --------------------------------------------------------------------------------------
def of_distribution(p: torch.Tensor, statistic: str) -> float:
    """1 - H(p) / log n of one query's attention over the n keys it sees."""
    if len(p) < 2:
        return 1.0
    if statistic == "max":
        return p.max().item()
    entropy = -(p * p.log()).nansum() if statistic == "shannon" else -p.square().sum().log()
    return 1 - entropy.item() / math.log(len(p))


def of_maps(maps: torch.Tensor, visible: torch.Tensor, statistic: str, sinks: int = 0) -> torch.Tensor:
    """From attention maps [B, H, S, S] and what is visible [B, S, S]: [B, H, S]."""
    result = torch.empty(maps.shape[:3])
    for b, h, q in torch.cartesian_prod(*map(torch.arange, maps.shape[:3])).tolist():
        p = maps[b, h, q][visible[b, q]][sinks:].double()
        result[b, h, q] = of_distribution(p / p.sum(), statistic)
    return result


def draw(batch: int = 2, heads: int = 4, kv_heads: int = 2, length: int = 9, dim: int = 8, scale: float = 2.0):
    generator = torch.Generator().manual_seed(0)

    def make(h):
        return scale * torch.randn(batch, h, length, dim, generator=generator)

    return make(heads), make(kv_heads)


def maps_of(query, key, visible, scaling) -> torch.Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return (query @ key.transpose(2, 3) * scaling).masked_fill(~visible.unsqueeze(1), -math.inf).softmax(-1)


def visible_keys(attention_mask: torch.Tensor) -> torch.Tensor:
    """[B, S, S]: causal, and only tokens."""
    return attention_mask.bool().unsqueeze(1) & torch.ones(attention_mask.shape[1], attention_mask.shape[1]).tril().bool()


# --- the statistic on tensors ---------------------------------------------------------------------
@pytest.mark.parametrize("statistic", ["shannon", "renyi2", "max"])
@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize("kind", ["none", "bool", "lowest", "infinite"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_concentration_equals_attention_written_out(statistic, sinks, kind, kv_heads):
    query, key = draw(kv_heads=kv_heads)
    tokens = torch.ones(2, 9)
    if kind != "none":
        tokens[0, :4] = 0  # left padding: rows of the mask in which nothing is visible
    visible = visible_keys(tokens)
    masks = {
        "none": None,
        "bool": visible.unsqueeze(1),
        "lowest": torch.zeros(2, 1, 9, 9).masked_fill(~visible.unsqueeze(1), LOWEST),
        "infinite": torch.zeros(2, 1, 9, 9).masked_fill(~visible.unsqueeze(1), -math.inf),
    }
    got = attention_concentration(query, key, mask=masks[kind], scaling=0.3, statistic=statistic, sinks=sinks)
    expected = of_maps(maps_of(query, key, visible, 0.3), visible, statistic, sinks)
    assert got.shape == (2, 4, 9) and got.isfinite().all()
    assert_close(got, expected, atol=1e-5, rtol=0)
    assert expected.std() > 0.05  # the comparison says something


@pytest.mark.parametrize("statistic", ["shannon", "renyi2", "max"])
@pytest.mark.parametrize("hidden", [-1e4, -1e9])
def test_an_additive_mask_may_hide_with_any_large_number(statistic, hidden):
    query, key = draw()
    visible = visible_keys(torch.ones(2, 9))
    mask = torch.zeros(2, 1, 9, 9).masked_fill(~visible.unsqueeze(1), hidden)
    got = attention_concentration(query, key, mask=mask, scaling=0.3, statistic=statistic)
    assert_close(got, of_maps(maps_of(query, key, visible, 0.3), visible, statistic), atol=1e-5, rtol=0)


def test_one_mask_for_the_whole_batch():
    query, key = draw()
    causal = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    assert_close(attention_concentration(query, key, mask=causal), attention_concentration(query, key))


def test_the_default_scaling_is_that_of_attention():
    query, key = draw(dim=16)
    assert torch.equal(attention_concentration(query, key), attention_concentration(query, key, scaling=0.25))


@pytest.mark.parametrize("statistic", ["shannon", "renyi2"])
def test_concentration_of_the_extremes(statistic):
    key = torch.eye(8).view(1, 1, 8, 8)
    uniform = attention_concentration(torch.zeros(1, 1, 8, 8), key, statistic=statistic)
    assert_close(uniform, torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0]).view(1, 1, 8), atol=1e-6, rtol=0)  # one key only: 1
    pointed = attention_concentration(1e3 * key, key, statistic=statistic)
    assert_close(pointed, torch.ones(1, 1, 8), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "statistic, expected",
    [
        ("shannon", 1 - (math.log(4) - 0.75 * math.log(3)) / math.log(2)),
        ("renyi2", 1 - math.log(1.6) / math.log(2)),
        ("max", 0.75),
    ],
)
def test_concentration_by_hand(statistic, expected):
    """Two keys with attention 1/4 and 3/4."""
    query, key = torch.tensor([0.0, math.log(3)]).view(1, 1, 2, 1), torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    assert attention_concentration(query, key, scaling=1.0, statistic=statistic)[0, 0, 1].item() == pytest.approx(
        expected, abs=1e-6
    )


def test_concentration_is_detached_and_float32():
    query, key = draw()
    got = attention_concentration(query.bfloat16().requires_grad_(), key.bfloat16())
    assert got.dtype == torch.float32 and not got.requires_grad
    assert_close(got, attention_concentration(query, key), atol=0.03, rtol=0)


def test_no_sinks_left_out_of_less_than_there_are():
    """Queries that see no more than the sinks, or one key besides, have nothing to spread over."""
    query, key = draw()
    assert attention_concentration(query, key, sinks=3)[:, :, :4].eq(1).all()


def test_an_unknown_statistic_is_refused():
    with pytest.raises(ValueError, match="renyi2"):
        attention_concentration(*draw(), statistic="gini")


# --- runs and kernels -----------------------------------------------------------------------------
def causal_within(runs: Runs, rows: int, length: int) -> torch.Tensor:
    """The mask [B, 1, S, S] that the runs stand for; padding sees nothing."""
    visible = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    for row, first, end in runs.spans:
        visible[row, 0, first:end, first:end] = torch.ones(end - first, end - first).tril().bool()
    return visible


PACKED = Runs(((0, 2, 9), (1, 0, 1), (1, 1, 5), (1, 5, 8)))  # left padding; three sequences, then right padding


def test_packed_rows_by_their_lengths():
    assert Runs.packed([[3, 4], [2]]) == Runs(((0, 0, 3), (0, 3, 7), (1, 0, 2)))


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_mask_is_taken_apart_into_runs(kind):
    visible = causal_within(PACKED, 2, 9)
    visible[1, 0, 8, :8] = True  # what padding sees does not matter, as long as it is not itself
    mask = visible if kind == "bool" else torch.zeros(visible.shape).masked_fill(~visible, LOWEST)
    assert Runs.of(mask) == PACKED


@pytest.mark.parametrize(
    "query, key, visible",
    [(5, 3, False), (7, 2, False), (4, 6, True), (8, 0, False)],
    ids=["hole", "window", "looks ahead", "lacks the first"],
)
def test_a_mask_that_says_more_is_not_made_of_runs(query, key, visible):
    mask = torch.ones(1, 1, 9, 9).tril().bool()
    mask[0, 0, query, key] = visible
    assert Runs.of(mask) is None


def test_a_long_mask_is_taken_apart_block_by_block():
    runs = Runs(((0, 3, 300), (0, 300, 600)))
    mask = causal_within(runs, 1, 600)
    assert Runs.of(mask) == runs
    mask[0, 0, 599, 299] = True
    assert Runs.of(mask) is None


class CudaKernels(TorchDispatchMode):
    """What CUDA's attention kernels return, by their documented shapes, written out; and what they refuse."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kernel = getattr(self, function.name().removeprefix("aten::"), None)
        if kernel is None:
            return function(*args, **(kwargs or {}))
        self.called.append(function.name().removeprefix("aten::"))
        return kernel(*args, **(kwargs or {}))

    @staticmethod
    def attend(query, key, bias, causal, scale):
        logits = query.float() @ key.float().transpose(-1, -2) * scale
        if causal:
            logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -math.inf)
        logits = logits if bias is None else logits + bias
        return (logits.softmax(-1) @ key.float()).to(query.dtype), logits.logsumexp(-1)

    def _scaled_dot_product_flash_attention(self, query, key, value, dropout, causal, *, scale):
        assert query.dtype in (torch.bfloat16, torch.float16) and key is value and query.shape == key.shape and causal
        return *self.attend(query, key, None, causal, scale), None, None, 0, 0, None, None, None

    def _scaled_dot_product_efficient_attention(self, query, key, value, bias, wants_lse, dropout=0.0, causal=False, *, scale):
        assert query.shape[:2] == key.shape[:2] and wants_lse and causal == (bias is None)
        if bias is not None:
            assert bias.shape == (*query.shape[:3], key.shape[2]) and bias.stride(2) % 16 == 0 and bias.dtype == query.dtype
        output, lse = self.attend(query, key, bias, causal, scale)
        return output, torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=math.nan), None, None

    def _flash_attention_forward(self, query, key, value, ends, ends_key, most, most_key, dropout, causal, debug, *, scale):
        assert query.dtype in (torch.bfloat16, torch.float16) and ends.dtype == torch.int32 and torch.equal(ends, ends_key)
        assert causal and not debug and most == most_key == ends.diff().max()
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        each = [
            self.attend(query[a:b].transpose(0, 1), key[a:b].transpose(0, 1), None, True, scale)
            for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        ]
        output, lse = torch.cat([o.transpose(0, 1) for o, _ in each]), torch.cat([lse for _, lse in each], 1)
        return output, lse, None, None, None


EXPECTED_KERNELS = {
    ("flash", "none"): {"_scaled_dot_product_flash_attention"},
    ("flash", "runs"): {"_flash_attention_forward"},
    ("flash", "mask of runs"): {"_flash_attention_forward"},
    ("flash", "window"): {"_scaled_dot_product_efficient_attention"},
    **{("efficient", mask): {"_scaled_dot_product_efficient_attention"} for mask in ("none", "runs", "mask of runs", "window")},
    **{(kernel, mask): set() for kernel in ("blocks", "cpu") for mask in ("none", "runs", "mask of runs", "window")},
}


@pytest.mark.parametrize("kernel, kind", EXPECTED_KERNELS)
@pytest.mark.parametrize("statistic", ["shannon", "renyi2"])
@pytest.mark.parametrize("sinks", [0, 2])
def test_every_kernel_gives_the_same_concentration(kernel, kind, statistic, sinks):
    """CUDA's kernels are stood in for by what their schemas say: this tests what is made of them, not them."""
    query, key = draw(length=9)
    if kernel == "flash":
        query, key = query.bfloat16(), key.bfloat16()
    causal = torch.ones(2, 1, 9, 9).tril().bool()
    visible = {"none": causal, "window": causal.triu(-3)}.get(kind, causal_within(PACKED, 2, 9))
    mask = {"none": None, "runs": PACKED}.get(kind, visible)
    with CudaKernels() as kernels:
        got = attention_concentration(query, key, mask=mask, scaling=0.3, statistic=statistic, sinks=sinks, kernel=kernel)
    assert set(kernels.called) == EXPECTED_KERNELS[kernel, kind]
    expected = of_maps(maps_of(query.float(), key.float(), visible[:, 0], 0.3), visible[:, 0], statistic, sinks)
    tokens = visible.diagonal(dim1=2, dim2=3).expand(2, 4, 9)
    assert_close(got[tokens], expected[tokens], atol=0.05 if kernel == "flash" else 1e-5, rtol=0)  # bfloat16, two keys
    assert got.isfinite().all() and got.dtype == torch.float32


@pytest.mark.parametrize("length", [700])
@pytest.mark.parametrize("statistic", ["shannon", "max"])
def test_long_sequences_under_runs_and_windows(length, statistic):
    """Longer than a block of queries, and long enough to be taken apart."""
    query, key = draw(batch=2, heads=2, kv_heads=1, length=length)
    runs = Runs(((0, 100, 700), (1, 0, 300), (1, 300, 650)))
    masks = {"runs": causal_within(runs, 2, length), "window": torch.ones(2, 1, length, length).tril().triu(-50).bool()}
    for visible in masks.values():
        got = attention_concentration(query, key, mask=visible, scaling=0.3, statistic=statistic)
        maps = maps_of(query, key, visible[:, 0], 0.3).double()
        n = visible.sum(-1)
        spread = -torch.special.xlogy(maps, maps).sum(-1)
        expected = maps.amax(-1) if statistic == "max" else 1 - spread / n.clamp(min=2).log()
        expected = torch.where(n < 2, 1.0, expected)
        tokens = visible.diagonal(dim1=2, dim2=3).expand(2, 2, length)
        assert_close(got[tokens].double(), expected[tokens], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "shape, dtype, expected", [((1, 2, 3, 64), torch.float32, "cpu"), ((1, 2, 3, 6), torch.bfloat16, "cpu")]
)
def test_the_kernel_of_the_cpu(shape, dtype, expected):
    assert kernel_of(torch.empty(shape, dtype=dtype)) == expected
    assert kernel_of(torch.empty(shape, dtype=dtype, device="meta")) == "blocks"


# --- the tap on models ----------------------------------------------------------------------------
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.mark.parametrize(
    "family, config, windows",
    [
        *(("qwen3", {"num_key_value_heads": n}, (0, 0, 0)) for n in (1, 2, 4)),
        *(("llama", {"num_key_value_heads": n}, (0, 0, 0)) for n in (1, 2, 4)),
        *(("qwen3", {"num_key_value_heads": n, **SLIDING}, (0, 4, 4)) for n in (1, 2, 4)),
        ("mistral", {}, (0, 0, 0)),
        ("mistral", {"sliding_window": 4}, (4, 4, 4)),
        ("gemma", {}, (0, 0, 0)),
        ("gemma3", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (4, 0, 4)),
        ("gpt2", {}, (0, 0, 0)),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, (0, 0, 0)),
        ("gpt_neox", {}, (0, 0, 0)),
        ("phi3", {}, (0, 0, 0)),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("is_padded", [True, False])
def test_the_tap_equals_attention_maps_in_every_layer(family, config, windows, is_padded):
    """windows: keys that a query of each layer sees at most, itself included; 0 for all before it."""
    model = tiny_model(family, **config)
    prompts, responses = (PROMPTS, RESPONSES) if is_padded else ([[3, 4, 5], [6, 7, 8]], [[9, 10, 11, 12], [13, 14, 15, 16]])
    ids, mask, _ = padded(prompts, responses, left=2 * is_padded)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0), "use_cache": False}
    with torch.no_grad(), tap(model, range(3)) as opened:
        logits = model(**inputs).logits
    with torch.no_grad():
        eager = eager_twin(model)(**inputs, output_attentions=True)
    tokens = mask.bool()
    assert_close(logits[tokens], eager.logits[tokens], atol=1e-5, rtol=1e-5)
    assert sorted(opened.attention) == [0, 1, 2]
    for layer, maps in enumerate(eager.attentions):
        visible = visible_keys(mask)
        if windows[layer]:
            visible &= torch.ones(visible.shape[1:]).triu(1 - windows[layer]).bool()
        for statistic, sinks in [("shannon", 0), ("renyi2", 0), ("shannon", 1)]:
            read = opened.attention[layer]
            got = attention_concentration(
                read.query, read.key, mask=read.mask, scaling=read.scaling, statistic=statistic, sinks=sinks
            )
            expected = of_maps(maps, visible, statistic, sinks).transpose(1, 2)[tokens]
            assert_close(got.transpose(1, 2)[tokens], expected, atol=1e-5, rtol=0)
            assert expected.std() > 0.05


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_what_is_read_at_a_position_does_not_know_later_tokens(family):
    model, change_from = tiny_model(family), 6
    ids, mask, _ = padded(PROMPTS, RESPONSES)
    other = torch.where(torch.arange(ids.shape[1]) < change_from, ids, (ids + 5) % 20)

    def read(ids):
        with torch.no_grad(), tap(model, range(3)) as opened:
            model(input_ids=ids, attention_mask=mask, use_cache=False)
        return [attention_concentration(a.query, a.key, mask=a.mask, scaling=a.scaling) for a in opened.attention.values()]

    for a, b in zip(read(ids), read(other), strict=True):
        assert_close(a[:, :, :change_from], b[:, :, :change_from], atol=1e-6, rtol=0)
        assert not torch.equal(a[:, :, change_from:], b[:, :, change_from:])


def test_the_tap_takes_the_layers_it_was_opened_for_and_nothing_once_closed():
    model = tiny_model()
    ids, mask, _ = padded(PROMPTS, RESPONSES)
    with torch.no_grad():
        with tap(model, [1]) as opened:
            model(input_ids=ids, attention_mask=mask)
        assert list(opened.attention) == [1] and not opened.attention[1].query.requires_grad
        read = opened.attention[1]
        model(input_ids=ids.flip(0), attention_mask=mask.flip(0))
        assert opened.attention[1] is read


def test_the_tap_closes_after_an_error():
    model = tiny_model()
    ids, mask, _ = padded(PROMPTS, RESPONSES)
    with pytest.raises(ZeroDivisionError), tap(model, [0]) as opened:
        raise ZeroDivisionError
    model(input_ids=ids, attention_mask=mask)
    assert not opened.attention


def test_the_tap_does_not_disturb_the_gradient():
    model = tiny_model()
    ids, mask, _ = padded(PROMPTS, RESPONSES)
    gradients = []
    for layers in ((), range(3)):
        model.zero_grad()
        with tap(model, layers) as opened:
            model(input_ids=ids, attention_mask=mask).logits.square().mean().backward()
        assert not any(x.query.requires_grad or x.key.requires_grad for x in opened.attention.values())
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


SMALL = {
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: GPTJForCausalLM(GPTJConfig(vocab_size=20, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)), "0 of 2 layers"),
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=20, hidden_size=32, n_layer=2, n_head=4)), "0 of 2 layers"),
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, attn_logit_softcapping=1.0)), r"soft-capped logits \(softcap\)"),
        (
            lambda: GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1, rope_parameters=ROPE)),
            r"learnt sinks \(s_aux\)",
        ),
        (
            lambda: Qwen3NextForCausalLM(
                Qwen3NextConfig(
                    **SMALL,
                    layer_types=["linear_attention", "full_attention"],
                    num_experts=2,
                    num_experts_per_tok=1,
                    moe_intermediate_size=8,
                    shared_expert_intermediate_size=8,
                    linear_num_key_heads=2,
                    linear_num_value_heads=2,
                    linear_key_head_dim=8,
                    linear_value_head_dim=8,
                )
            ),
            "1 of 2 layers",
        ),
    ],
    ids=["gptj", "bloom", "gemma2-softcap", "gpt-oss-sinks", "qwen3-next-linear"],
)
def test_a_model_whose_attention_cannot_be_tapped_is_refused_by_what_was_found(make, says):
    """Soft-capped logits and learnt sinks are not in the kernel behind the tap; leaving them out silently is another model."""
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=f"the attention of {type(model := make()).__name__} cannot be tapped: .*{says}"):
        tappable(model)
    assert not any("_cct_tap" in module.__dict__ for module in model.modules())


def test_gemma2_without_its_soft_cap_can_be_tapped():
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**SMALL, attn_logit_softcapping=None, initializer_range=0.3)).eval()
    ids = torch.arange(3, 15).view(1, 12)
    with torch.no_grad():
        assert_close(tappable(model)(input_ids=ids).logits, eager_twin(model)(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("training", [True, False])
def test_becoming_tappable_changes_neither_mode_nor_gradients(training):
    model = tappable(tiny_model().train(training))
    assert model.training is training and all(p.grad is None and p.requires_grad for p in model.parameters())


# --- which layers ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "layers, n, expected",
    [
        ("all", 3, [0, 1, 2]),
        ("last_half", 4, [2, 3]),
        ("last_half", 3, [1, 2]),
        ("last_half", 1, [0]),
        ("last_quarter", 8, [6, 7]),
        ("last_quarter", 2, [1]),
        ((0, -1), 4, [0, 3]),
        ((3, -1), 4, [3]),
    ],
)
def test_layers_by_name_and_number(layers, n, expected):
    assert Concentration(layers=layers).layer_indices(n) == expected


@pytest.mark.parametrize("layers", [(4,), (-5,), ()])
def test_layers_that_do_not_exist_are_refused(layers):
    with pytest.raises(ValueError):
        Concentration(layers=layers).layer_indices(4)


# --- the agent's forward --------------------------------------------------------------------------
def eager_reading(model, ids, mask, width):
    """Logits and attention maps of the positions that predict the response, without cct."""
    with torch.no_grad():
        output = eager_twin(model)(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            output_attentions=True,
            use_cache=False,
        )
    return output.logits[:, -width - 1 : -1], output.attentions


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_logprobs_and_entropy_are_those_of_the_sampling_distribution(family, temperature):
    model = tiny_model(family)
    ids, mask, width = padded(PROMPTS, RESPONSES, left=1, right=2)
    reading = Agent(model, None, temperature)(ids, mask, width)
    distribution = torch.distributions.Categorical(logits=eager_reading(model, ids, mask, width)[0] / temperature)
    tokens = mask[:, -width:].bool()
    assert reading.logprobs.shape == (3, width) and reading.values is None and reading.trace is None
    assert_close(reading.logprobs[tokens], distribution.log_prob(ids[:, -width:])[tokens], atol=1e-5, rtol=1e-5)
    assert_close(reading.entropy[tokens], distribution.entropy()[tokens], atol=1e-5, rtol=1e-5)
    assert reading.logprobs.requires_grad and not reading.entropy.requires_grad


@pytest.mark.parametrize("family", ["qwen3", "llama", "granite"])  # granite divides its logits by a number
@pytest.mark.parametrize("at_once", [1, 5, 1000])
def test_however_many_logits_stand_at_once_numbers_and_gradients_are_the_same(family, at_once):
    model = tiny_model(family)
    ids, mask, width = padded(PROMPTS, RESPONSES, left=1, right=2)
    agent = Agent(model, None, 0.7, logits_at_once=at_once)
    assert (agent._head == (None,)) == (family == "granite")
    reading = agent(ids, mask, width)
    expected = (eager_reading(model, ids, mask, width)[0] / 0.7).log_softmax(-1)
    tokens = mask[:, -width:].bool()
    assert_close(reading.logprobs[tokens], expected.gather(2, ids[:, -width:, None]).squeeze(2)[tokens], atol=1e-5, rtol=1e-5)
    assert_close(reading.entropy[tokens], -(expected.exp() * expected).sum(-1)[tokens], atol=1e-5, rtol=1e-5)
    weights = torch.arange(tokens.numel()).view_as(tokens) * tokens / 10
    (weights * reading.logprobs).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    output = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=False)
    whole = (output.logits[:, -width - 1 : -1] / 0.7).log_softmax(-1).gather(2, ids[:, -width:, None]).squeeze(2)
    (weights * whole).sum().backward()
    for name, parameter in model.named_parameters():
        assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


class _Largest(TorchDispatchMode):
    """The most numbers in a tensor whose last dimension is the vocabulary, the head's weight left out."""

    def __init__(self, head):
        super().__init__()
        self.vocabulary, self.weight, self.numbers = *head.weight.shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary:
                if tensor.shape == (self.weight, self.vocabulary):
                    continue
                self.numbers = max(self.numbers, tensor.numel())
        return result


def test_no_more_logits_stand_at_once_than_allowed_forward_and_backward():
    model = tiny_model("qwen3")
    ids, mask, width = padded(PROMPTS, RESPONSES)
    for at_once, together in ((3, 3), (1000, 3 * width)):
        with _Largest(model.lm_head) as largest:
            Agent(model, None, logits_at_once=at_once)(ids, mask, width).logprobs.sum().backward()
        assert largest.numbers == together * model.config.vocab_size


def test_statistics_are_read_where_the_token_was_predicted():
    model = tiny_model(layers=4)
    ids, mask, width = padded(PROMPTS, RESPONSES)
    asked = {
        "half": Concentration(),
        "first": Concentration(layers=(0,), statistic="renyi2"),
        "sinks": Concentration(layers="all", sinks=1),
    }
    stats = Agent(model, None)(ids, mask, width, statistics=asked).stats
    maps = eager_reading(model, ids, mask, width)[1]
    tokens, visible = mask[:, -width:].bool(), visible_keys(mask)
    for name, layers, statistic, sinks in [
        ("half", (2, 3), "shannon", 0),
        ("first", (0,), "renyi2", 0),
        ("sinks", range(4), "shannon", 1),
    ]:
        every = torch.stack([of_maps(maps[layer], visible, statistic, sinks) for layer in layers]).mean((0, 2))
        assert stats[name].shape == (3, width) and not stats[name].requires_grad
        assert_close(stats[name][tokens], every[:, -width - 1 : -1][tokens], atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [1, 4, 256])
@pytest.mark.parametrize("kind", ["none", "bool", "infinite"])
def test_attention_in_blocks_is_attention(size, kind):
    query, key = draw()
    tokens = torch.ones(2, 9)
    if kind != "none":
        tokens[0, :4] = 0
    visible = visible_keys(tokens)
    masks = {
        "none": None,
        "bool": visible.unsqueeze(1),
        "infinite": torch.zeros(2, 1, 9, 9).masked_fill(~visible.unsqueeze(1), -math.inf),
    }
    blocks = list(Attention(query.requires_grad_(), key, masks[kind], 0.3).blocks(size))
    assert [rows.start for rows, _ in blocks] == list(range(0, 9, size))
    whole = torch.cat([p for _, p in blocks], 2)
    assert not whole.requires_grad
    assert_close(whole, maps_of(query.detach(), key, visible, 0.3).nan_to_num(0.0), atol=1e-6, rtol=0)


def test_heads_are_chosen():
    model = tiny_model(layers=4)
    ids, mask, width = padded(PROMPTS, RESPONSES)
    asked = {"some": Concentration(heads=(1, 3), layers=(2,)), "max": Concentration(statistic="max", heads=(0,), layers=(1,))}
    stats = Agent(model, None)(ids, mask, width, statistics=asked).stats
    maps, visible, tokens = eager_reading(model, ids, mask, width)[1], visible_keys(mask), mask[:, -width:].bool()
    for name, layer, heads, statistic in [("some", 2, [1, 3], "shannon"), ("max", 1, [0], "max")]:
        expected = of_maps(maps[layer], visible, statistic)[:, heads].mean(1)[:, -width - 1 : -1]
        assert_close(stats[name][tokens], expected[tokens], atol=1e-5, rtol=0)


@pytest.mark.parametrize("heads", [(), (4,), (0, 7)])
def test_heads_that_do_not_exist_are_refused(heads):
    Concentration(heads=(0, 3)).fits(2, 4)
    with pytest.raises(ValueError, match="4 attention heads"):
        Concentration(heads=heads).fits(2, 4)


@pytest.mark.parametrize("distance", ["cosine", "relative"])
def test_hidden_change_is_between_the_emitting_position_and_the_one_before(distance):
    model = tiny_model(layers=3)
    ids, mask, width = padded(PROMPTS, RESPONSES, right=2)
    stats = Agent(model, None)(ids, mask, width, statistics={"h": HiddenChange(distance=distance, layers=(0, 2))}).stats
    with torch.no_grad():
        states = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
    for row, response in enumerate(RESPONSES):
        for t in range(len(response)):
            at = ids.shape[1] - width + t - 1  # predicts token t
            total = 0.0
            for layer in (0, 2):
                here, before = states[layer + 1][row, at], states[layer + 1][row, at - 1]
                cosine = 1 - (here @ before / here.norm() / before.norm()).item()
                total += cosine if distance == "cosine" else ((here - before).norm() / before.norm()).item()
            only_one = len(PROMPTS[row]) == 1 and t == 0  # nothing before
            assert stats["h"][row, t].item() == pytest.approx(0.0 if only_one else total / 2, abs=1e-5)


def test_a_statistic_of_one_s_own_sees_the_forward():
    class Margin(Statistic):
        """Probability of the likeliest token."""

        reads = frozenset({"distribution"})

        def measure(self, forward):
            return forward.distribution.amax(-1).exp()

    model = tiny_model()
    ids, mask, width = padded(PROMPTS, RESPONSES)
    reading = Agent(model, None, 0.7)(
        ids, mask, width, statistics={"m": Margin(), "entropy": TokenEntropy(), "logprob": TokenLogprob()}
    )
    tokens = mask[:, -width:].bool()
    expected = (eager_reading(model, ids, mask, width)[0] / 0.7).softmax(-1).amax(-1)
    assert_close(reading.stats["m"][tokens], expected[tokens], atol=1e-5, rtol=1e-5)
    assert torch.equal(reading.stats["entropy"], reading.entropy)
    assert torch.equal(reading.stats["logprob"], reading.logprobs.detach())
    assert not any(x.requires_grad for x in reading.stats.values())


def test_a_statistic_of_another_shape_is_refused():
    class Whole(Statistic):
        """One number a response."""

        def measure(self, forward):
            return forward.entropy.mean(1)

    ids, mask, width = padded(PROMPTS, RESPONSES)
    with pytest.raises(TrainingStopped, match=r"'w' .Whole.*has shape \(3,\); expected one number for each"):
        Agent(tiny_model(), None)(ids, mask, width, statistics={"w": Whole()})


@pytest.mark.parametrize("family", ["qwen3", "llama", "opt"])
def test_the_forward_does_not_know_padding_or_other_rows(family):
    agent, asked = Agent(tiny_model(family), None, 0.8), {"c": Concentration(sinks=1)}
    ids, mask, width = padded(PROMPTS, RESPONSES)
    wide_ids, wide_mask, wide = padded(PROMPTS, RESPONSES, left=4, right=3)
    short, long = agent(ids, mask, width, statistics=asked), agent(wide_ids, wide_mask, wide, statistics=asked)
    tokens = mask[:, -width:].bool()
    for a, b in [(short.logprobs, long.logprobs), (short.entropy, long.entropy), (short.stats["c"], long.stats["c"])]:
        assert_close(a[tokens], b[:, :width][tokens], atol=1e-5, rtol=1e-5)
    alone_ids, alone_mask, alone = padded(PROMPTS[1:2], RESPONSES[1:2])
    one = agent(alone_ids, alone_mask, alone, statistics=asked)
    assert_close(one.logprobs[0], short.logprobs[1, :alone], atol=1e-5, rtol=1e-5)
    assert_close(one.stats["c"][0], short.stats["c"][1, :alone], atol=1e-5, rtol=1e-5)
    noise = torch.where(mask.bool(), ids, 7)  # what ids the padding holds
    assert_close(agent(noise, mask, width).logprobs[tokens], short.logprobs[tokens], atol=1e-6, rtol=1e-6)


def test_logprobs_at_t_do_not_know_later_tokens():
    agent = Agent(tiny_model(), None)
    ids, mask, width = padded([[3, 4], [5, 6]], [[7, 8, 9, 10, 11], [12, 13, 14, 15, 16]])
    other = ids.clone()
    other[:, -2:] = torch.tensor([[17, 18], [19, 3]])
    a, b = (agent(x, mask, width, statistics={"c": Concentration()}) for x in (ids, other))
    assert_close(a.logprobs[:, :3], b.logprobs[:, :3], atol=1e-6, rtol=0)
    assert_close(a.stats["c"][:, :4], b.stats["c"][:, :4], atol=1e-6, rtol=0)  # read before token 3: knows tokens 0 to 2
    assert_close(a.entropy[:, :4], b.entropy[:, :4], atol=1e-6, rtol=0)
    assert not torch.equal(a.stats["c"][:, 4:], b.stats["c"][:, 4:])
