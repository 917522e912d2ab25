"""Metrics of an iteration; docs/runs.md explains their names."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from cct.geometry import Geometry
from cct.geometry.functional import correction_weights
from cct.rollout import Credit, Rollout
from cct.statistic import Statistic
from cct.transport.functional import (
    agreement,
    exact_advantage,
    explained_variance,
    explained_variance_within,
    gated_gae,
    join,
    masked_mean_std,
)

from .minibatches import correction
from .rows import Row


def rollout_metrics(rollout: Rollout, seen: Rollout, credit: Credit, scores: Tensor, geometry: Geometry) -> dict[str, float]:
    """Of a rollout and its credit; an episode of several rows counts as one.

    seen: the rollout as the transport saw it. scores: [B] of the evidence alone.
    """
    joined, split = join(rollout)
    if split is not None:
        seen = joined if seen is rollout else join(seen)[0]
        credit = Credit(*(None if x is None else split.join(x) for x in vars(credit).values()))  # type: ignore[arg-type]
        scores = scores.new_zeros(len(joined.mask)).index_add_(0, split.episode, scores)
        rollout = joined
    mask, emitted = rollout.mask, rollout.attention_mask[:, rollout.prompt_width :]
    tokens = (emitted if rollout.turns is None else rollout.turns >= 0).sum(1).float()
    mean = lambda x: float(masked_mean_std(x, mask)[0])  # noqa: E731
    kept = rollout.valid
    metrics = {
        "train/reward": float(scores[kept].mean()) if bool(kept.any()) else 0.0,
        "train/length": float(tokens.mean()),
        "train/tokens": float(tokens.sum()),
        "train/truncated": float(rollout.truncated.float().mean()),
        "train/dropped": float((~kept).float().mean()),
        "advantage/mean": mean(credit.advantages),
        "advantage/std": float(masked_mean_std(credit.advantages, mask)[1]),
    }
    if "entropy" in rollout.stats:
        assert rollout.rollout_logprobs is not None
        metrics["train/entropy"] = mean(rollout.stats["entropy"])
        gap = (rollout.logprobs - rollout.rollout_logprobs).abs().masked_fill(~mask, 0.0)
        metrics |= {"engine/logprob_gap": mean(gap), "engine/logprob_gap_max": float(gap.max())}
    if geometry.correction != "none":
        raw, used = correction(rollout, geometry)
        metrics |= {
            "correction/raw": mean(raw),
            "correction/raw_max": float(raw.masked_fill(~mask, 0.0).max()),
            "correction/used": mean(used),
            "correction/changed": mean((raw != used).float()),
        }
    if credit.gate is not None:
        gate_mean, gate_std = masked_mean_std(credit.gate, mask)
        metrics |= {"gate/mean": float(gate_mean), "gate/std": float(gate_std)}
    if rollout.values is not None and credit.value_targets is not None:
        monte_carlo = gated_gae(rollout.rewards, torch.zeros_like(rollout.rewards), mask, gamma=1.0, lam=1.0)[0]
        metrics |= {
            "critic/explained_variance": explained_variance(rollout.values, monte_carlo, mask),
            "critic/explained_variance_within": explained_variance_within(rollout.values, monte_carlo, mask, rollout.groups),
            "critic/explained_variance_of_target": explained_variance(rollout.values, credit.value_targets, mask),
            "critic/value": mean(rollout.values),
        }
        if seen is not rollout and seen.values is not None:
            metrics["baseline/explained_variance"] = explained_variance(seen.values, monte_carlo, mask)
    if "value_disagreement" in rollout.stats:
        metrics["critic/disagreement"] = mean(rollout.stats["value_disagreement"])
    return metrics | oracle_metrics(seen, credit)


def lag_metrics(rollout: Rollout, iteration: int) -> dict[str, float]:
    """Age of the tokens, and their importance under the policy before the update where the trainer's forward gave it."""
    assert rollout.versions is not None and rollout.rollout_logprobs is not None
    mask = rollout.mask
    metrics = {"lag/age": float(masked_mean_std(max(0, iteration - 1) - rollout.versions.float(), mask)[0])}
    if "entropy" not in rollout.stats or not bool(mask.any()):
        return metrics
    ratio = correction_weights(rollout.logprobs, rollout.rollout_logprobs, mask, "none", "token", 1.0)[0][mask]
    return metrics | {
        "lag/ratio": float(ratio.mean()),
        "lag/ratio_max": float(ratio.max()),
        "lag/effective_sample_size": float(ratio.mean() ** 2 / ratio.square().mean()),
    }


def refill_metrics(replaced: Sequence[Sequence[int]], tokens: int, rows: Sequence[Row], flat: float) -> dict[str, float]:
    """Of an iteration's refills. replaced: the groups of each. tokens: sampled in all. flat: share of the final groups."""
    return {
        "refill/rounds": float(len(replaced)),
        "refill/prompts": float(sum(map(len, replaced))),
        "refill/tokens": float(tokens - sum(len(row.emitted) for row in rows)),
        "refill/without_contrast": flat,
    }


def oracle_metrics(seen: Rollout, credit: Credit) -> dict[str, float]:
    """Credit against the exact advantage at the tokens that decide, `exact/NAME`; empty where no oracle knows it."""
    if seen.exact_values is None or seen.decisions is None:
        return {}
    truth, at = exact_advantage(seen.rewards, seen.exact_values, seen.mask), seen.decisions
    found = agreement(credit.advantages[at], truth[at])
    if seen.values is not None:
        found["explained_variance_within"] = explained_variance_within(seen.values, seen.exact_values, at, seen.groups)
    return {f"exact/{name}": x for name, x in found.items()}


def statistic_metrics(rollout: Rollout, asked: Iterable[Statistic]) -> dict[str, float]:
    """`statistic/NAME/mean` and `/std` of each, over trainable tokens."""
    found = {what.name: masked_mean_std(rollout.stats[what.name], rollout.mask) for what in asked}
    return {
        f"statistic/{name}/{moment}": float(x)
        for name, moments in found.items()
        for moment, x in zip(("mean", "std"), moments, strict=True)
    }


class Clock:
    """Seconds that the stages of an iteration take."""

    def __init__(self, on_stage: Callable[[str], None]):
        self.on_stage, self.began = on_stage, list[tuple[str, float]]()

    def begin(self, stage: str) -> None:
        self.on_stage(stage)
        self.began.append((stage, time.perf_counter()))

    def stop(self, tokens: float) -> dict[str, float]:
        """`time/STAGE` of each; `time/iteration`, up to the end of the update, and the tokens a second in it."""
        self.began.append(("end", time.perf_counter()))
        seconds: dict[str, float] = defaultdict(float)
        for (name, before), (_, after) in pairwise(self.began):
            seconds[f"time/{name}"] += after - before
        whole = sum(x for name, x in seconds.items() if name != "time/sync")
        return {**seconds, "time/iteration": whole, "train/tokens_per_second": tokens / whole}
