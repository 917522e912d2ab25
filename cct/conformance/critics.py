"""Properties of critics, on a random model of two layers: values [B, T + 1], read through the same forward as in a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cct.critic import Critic
from cct.policy.base import policies
from cct.training.agent import Agent

from .base import Broken, Property, hypothesis
from .cases import numbers, python, same

BOUNDS = (-0.5, 2.0)  # of the reward
ROUNDING = 1e-4
BFLOAT16 = 0.1  # of the range of values: a random model's hidden states and attention, rounded to eight bits


@dataclass(frozen=True)
class Batch:
    """Lengths of prompts and responses; tokens are drawn from the seed."""

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    seed: int
    pick: int

    def tokens(self, left: int = 0, right: int = 0) -> tuple[Tensor, Tensor, int]:
        """input_ids, attention_mask and the responses' width, with `left` and `right` more positions of padding."""
        before, width = max(self.prompts) + left, max(1, *self.responses) + right
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randint(3, 13, (len(self.prompts), max(self.prompts) + max(1, *self.responses)), generator=generator)
        ids = torch.zeros(len(self.prompts), before + width, dtype=torch.long)
        seen = torch.zeros_like(ids)
        for row, (p, r) in enumerate(zip(self.prompts, self.responses, strict=True)):
            ids[row, before - p : before + r] = drawn[row, max(self.prompts) - p : max(self.prompts) + r]
            seen[row, before - p : before + r] = 1
        return ids, seen, width


def cases() -> Any:
    st = hypothesis().strategies
    rows = st.integers(1, 3)
    return rows.flatmap(
        lambda b: st.builds(
            Batch,
            st.tuples(*[st.integers(1, 4)] * b),
            st.tuples(*[st.integers(0, 6)] * b),
            st.integers(0, 99),
            st.integers(0, 99),
        )
    )


_BUILT: dict[tuple[type[Critic], str], Agent] = {}


def agent_of(critic: Critic) -> Agent:
    """A random actor with this critic, whose weights are random too where it starts from zeros."""
    key = type(critic), critic.model_dump_json()
    if key not in _BUILT:
        scratch = policies["scratch"].model_validate(
            {"hidden_size": 32, "intermediate_size": 40, "layers": 2, "heads": 4, "kv_heads": 2, "alphabet": "0123456789"}
        )
        actor = scratch.load(alphabet="", seed=0)[0].eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for weight in actor.parameters():  # far from the start of training, where attention is uniform
                if weight.dim() > 1:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
            torch.manual_seed(0)
            tower = critic.build(actor, BOUNDS)
            for weight in tower.parameters():
                if not bool(weight.ne(0).any()):
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
        _BUILT[key] = Agent(actor, tower)
    return _BUILT[key]


def values(
    critic: Critic, batch: Batch, left: int = 0, right: int = 0, rows: Tensor | None = None, change: Any = None
) -> Tensor:
    """[B, T + 1]; the last follows the last token. change: of the token ids, in place."""
    ids, seen, width = batch.tokens(left, right)
    if change is not None:
        change(ids[:, -width:])
    rows = torch.arange(len(ids)) if rows is None else rows
    try:
        with torch.no_grad():
            found = agent_of(critic)(ids[rows], seen[rows], width, with_critic=True).values
    except Exception as error:
        raise Broken(f"it raised {type(error).__name__}: {error}") from error
    if found is None or found.shape != (len(rows), width + 1):
        raise Broken(f"its values are {None if found is None else tuple(found.shape)}; expected {(len(rows), width + 1)}")
    return found


def _real(batch: Batch, x: Tensor) -> Tensor:
    """0 where there is no token to come after a value, nor one before it."""
    known = torch.arange(x.shape[1]) <= torch.tensor(batch.responses).unsqueeze(1)
    return x.masked_fill(~known, 0.0)


def form(critic: Critic, batch: Batch) -> None:
    found = _real(batch, values(critic, batch))
    if not bool(found.isfinite().all()):
        raise Broken(f"values are not finite: {numbers(found)}")
    bounded = getattr(critic, "bounded", getattr(critic, "output", "") == "bounded")
    if bounded and (float(found.min()) < min(0.0, BOUNDS[0]) or float(found.max()) > BOUNDS[1]):
        raise Broken(f"values leave the rewards' bounds {BOUNDS}: {numbers(found)}")


def future(critic: Critic, batch: Batch) -> None:
    row = batch.pick % len(batch.responses)
    if not batch.responses[row]:
        return
    t = batch.pick % batch.responses[row]

    def change(tokens: Tensor) -> None:
        tokens[row, t : batch.responses[row]] = 15 - tokens[row, t : batch.responses[row]]

    before, after = _real(batch, values(critic, batch)), _real(batch, values(critic, batch, change=change))
    same(f"V[{row}, :{t + 1}]", before[row, : t + 1], after[row, : t + 1], "with other tokens from there on", ROUNDING)
    others = torch.arange(len(before)) != row
    same("V of the other responses", before[others], after[others], "with other tokens in one response", ROUNDING)


def padding(critic: Critic, batch: Batch) -> None:
    plain = _real(batch, values(critic, batch))
    for left, right in ((3, 0), (0, 3)):
        wide = values(critic, batch, left, right)[:, : plain.shape[1]]
        same("V", plain, _real(batch, wide), f"with {left} more positions of padding before and {right} after", ROUNDING)


def split(critic: Critic, batch: Batch) -> None:
    whole = values(critic, batch)
    for row in range(len(whole)):
        alone = values(critic, batch, rows=torch.tensor([row]))[0]
        known = batch.responses[row] + 1
        same(f"V[{row}]", whole[row, :known], alone[:known], "alone in a micro-batch", ROUNDING)


def order(critic: Critic, batch: Batch) -> None:
    turned = values(critic, batch, rows=torch.arange(len(batch.prompts)).flip(0)).flip(0)
    same("V", _real(batch, values(critic, batch)), _real(batch, turned), "with the responses in reverse order", ROUNDING)


@contextmanager
def _gradients(critic: Critic) -> Iterator[Agent]:
    agent = agent_of(critic)
    try:
        yield agent
    finally:
        agent.zero_grad(set_to_none=True)


def gradient(critic: Critic, case: None) -> None:
    with _gradients(critic) as agent:
        ids, seen, width = Batch((3, 2), (5, 4), 0, 0).tokens()
        reading = agent(ids, seen, width, with_critic=True)
        assert agent.critic is not None and reading.values is not None
        if reading.values.requires_grad:
            reading.values.sum().backward()
        touched = [name for name, p in agent.actor.named_parameters() if p.grad is not None and bool(p.grad.ne(0).any())]
        if touched:
            raise Broken(f"a gradient of its values reaches the actor: {', '.join(touched[:3])}; detach what it reads")


def learns(critic: Critic, case: None) -> None:
    """A step along the gradient of its loss lowers it."""
    with _gradients(critic) as agent:
        assert agent.critic is not None
        tower: nn.Module = agent.critic
        before = {name: p.detach().clone() for name, p in tower.named_parameters()}
        ids, seen, width = Batch((3, 2), (5, 4), 0, 0).tokens()
        target = torch.full((2, width), 1.5)

        def loss() -> Tensor:
            raw = agent(ids, seen, width, with_critic=True)
            assert raw.trace is not None and agent.critic is not None
            return agent.critic.head.loss(agent.values(raw.trace, width)[0][:, :-1], target).mean()

        try:
            first = loss()
            if not first.requires_grad:
                raise Broken("its loss has no gradient by its own weights, so it cannot learn")
            first.backward()
            with torch.no_grad():
                for p in tower.parameters():
                    if p.grad is not None:
                        p.sub_(1e-3 * p.grad / (1 + p.grad.norm()))
                after = loss()
            if not float(after) < float(first.detach()):
                raise Broken(
                    f"a small step along the gradient takes its loss from {float(first.detach()):.6f} to {float(after):.6f}"
                )
        finally:
            with torch.no_grad():
                for name, p in tower.named_parameters():
                    p.copy_(before[name])


def precision(critic: Critic, batch: Batch) -> None:
    agent = agent_of(critic)
    exact = _real(batch, values(critic, batch))
    agent.bf16 = True
    try:
        low = _real(batch, values(critic, batch))
    finally:
        agent.bf16 = False
    if low.dtype != torch.float32 or not bool(low.isfinite().all()):
        raise Broken(f"under bf16 its values are {low.dtype}: {numbers(low)}; expected finite float32")
    spread = max(1.0, float(exact.abs().max()))
    apart = float((low - exact).abs().mean())  # a random network may turn a rounding into more at one place
    if apart > BFLOAT16 * spread:
        raise Broken(f"under bf16 its values are off by {apart:.3f} in the mean: {numbers(low)} in place of {numbers(exact)}")


def determinism(critic: Critic, batch: Batch) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(batch.seed)
        first = values(critic, batch)
        torch.manual_seed(batch.seed + 1)
        same("V", first, values(critic, batch), "called again")


def built(critic: Critic, case: None) -> None:
    """Two builds from the same seed are the same; the actor is not changed by one."""
    actor = agent_of(critic).actor
    before = [p.detach().clone() for p in actor.parameters()]
    made = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            torch.manual_seed(3)
            made.append([p.detach().clone() for p in critic.build(actor, BOUNDS).parameters()])
    if not all(torch.equal(a, b) for a, b in zip(*made, strict=True)):
        raise Broken("two builds from one seed differ")
    if not all(torch.equal(a, b) for a, b in zip(before, actor.parameters(), strict=True)):
        raise Broken("building it changes the actor's weights")


CRITIC = [
    Property("form", "finite values [B, T + 1], within the rewards' bounds where its output is bounded", form, 0.25),
    Property("future", "V_t does not depend on tokens from t on, nor on other responses", future),
    Property("padding", "neither padding before prompts nor after responses matters", padding, 0.5),
    Property("order", "the order of the responses does not matter", order, 0.25),
    Property("split", "each response alone in a micro-batch gets the same", split, 0.5),
    Property("gradient", "no gradient of its values reaches the actor", gradient, cases=0),
    Property("learns", "a step along the gradient of its loss lowers it", learns, cases=0),
    Property("precision", "bf16 agrees with float32", precision, 0.25),
    Property("determinism", "the same tokens give the same values", determinism, 0.25),
    Property("built", "one seed makes one critic, and making it leaves the actor alone", built, cases=0),
    Property(
        "noise",
        "whatever stands at masked positions changes nothing",
        lambda critic, case: None,
        excused=lambda critic: "a critic reads tokens and has no mask; `padding` says the same of what is no token",
    ),
    Property(
        "length",
        "1 to 16,384 tokens in O(B*T) memory",
        lambda critic, case: None,
        excused=lambda critic: "the actor's padding mask alone is [S, S]; `cct plan` says what a length costs",
    ),
]


def show(critic: Critic, batch: Batch) -> str:
    ids, seen, _ = batch.tokens()
    return python(input_ids=ids, attention_mask=seen, responses=batch.responses)
