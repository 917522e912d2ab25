"""Properties of critics, on a random model of two layers: values [B, T + 1], read through the same forward as in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from cct.agent.agent import Agent
from cct.critic import Critic
from cct.policy.base import policies
from cct.registry import Component
from cct.rollout import Rollout

from .base import Broken, Malformed, Property, hypothesis
from .cases import NOISE, Case, noisy, numbers, python, rows_of, same
from .watch import NoHalf, alone, later

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

    def altered(self) -> tuple[int, int, Callable[[Tensor], None]] | None:
        """A row, a place t in its response, and a function that changes the row's tokens from t on; None if it has none."""
        row = self.pick % len(self.responses)
        if not self.responses[row]:
            return None
        t = self.pick % self.responses[row]

        def change(tokens: Tensor) -> None:
            tokens[row, t : self.responses[row]] = 15 - tokens[row, t : self.responses[row]]

        return row, t, change


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


@cache
def random_actor() -> Any:
    """A model of two layers, far from the start of training, where attention is uniform."""
    scratch = policies["scratch"].model_validate(
        {"hidden_size": 32, "intermediate_size": 40, "layers": 2, "heads": 4, "kv_heads": 2, "alphabet": "0123456789"}
    )
    actor = scratch.load(alphabet="", seed=0)[0].eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in actor.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return actor


_BUILT: dict[tuple[type[Critic], str], Agent] = {}


def agent_of(critic: Critic) -> Agent:
    """A random actor with this critic, whose weights are random too where it starts from zeros."""
    key = type(critic), critic.model_dump_json()
    if key not in _BUILT:
        actor, generator = random_actor(), torch.Generator().manual_seed(1)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
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
        raise Malformed(f"it raised {type(error).__name__}: {error}") from error
    if found is None or found.shape != (len(rows), width + 1):
        raise Malformed(f"its values are {None if found is None else tuple(found.shape)}; expected {(len(rows), width + 1)}")
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
    if (altered := batch.altered()) is None:
        return
    row, t, change = altered
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


def _taught(critic: Critic, agent: Agent) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    """Values [2, 5] of two responses, and the loss against targets, as the trainer asks for them."""
    ids, seen, width = Batch((3, 2), (5, 4), 0, 0).tokens()
    trace = agent(ids, seen, width, with_critic=True).trace
    assert trace is not None and agent.critic is not None
    tower = agent.critic

    def loss(target: Tensor) -> Tensor:
        found = tower.head.loss(agent.values(trace, width)[0][:, :-1], target)
        if found.shape != target.shape:
            raise Broken(f"its loss is {tuple(found.shape)}; expected one number for each target, {tuple(target.shape)}")
        return found

    return lambda: agent.values(trace, width)[1][:, :-1], loss


def learns(critic: Critic, case: None) -> None:
    """A step along the gradient of its loss lowers it, and takes values towards their targets from either side."""
    with _gradients(critic) as agent:
        assert agent.critic is not None
        tower: nn.Module = agent.critic
        before = {name: p.detach().clone() for name, p in tower.named_parameters()}
        values, loss = _taught(critic, agent)
        for target in (torch.full((2, 5), BOUNDS[1]), torch.full((2, 5), BOUNDS[0])):
            agent.zero_grad(set_to_none=True)
            try:
                first, apart = loss(target).mean(), (values() - target).abs().mean()
                if not first.requires_grad:
                    raise Broken("its loss has no gradient by its own weights, so it cannot learn")
                first.backward()
                with torch.no_grad():
                    for p in tower.parameters():
                        if p.grad is not None:
                            p.sub_(1e-3 * p.grad / (1 + p.grad.norm()))
                    after, left = loss(target).mean(), (values() - target).abs().mean()
                for what, x, y in (("its loss", first, after), ("the distance of its values to their target", apart, left)):
                    if not y.item() < x.item():
                        raise Broken(
                            f"a small step along the gradient towards {float(target[0, 0]):g} takes {what} from {x.item():.6f} "
                            f"to {y.item():.6f}"
                        )
            finally:
                with torch.no_grad():
                    for name, p in tower.named_parameters():
                        p.copy_(before[name])


def noise(critic: Critic, case: None) -> None:
    """The trainer leaves out the losses at masked positions; what the target is there reaches no other loss or gradient."""
    with _gradients(critic) as agent:
        assert agent.critic is not None
        _, loss = _taught(critic, agent)
        mask = torch.ones(2, 5, dtype=torch.bool)
        mask[0, 2:4] = mask[1, 0] = False
        found = []
        for value in (0.5, 2.0, -0.5):
            agent.zero_grad(set_to_none=True)
            kept = loss(torch.full((2, 5), 1.0).where(mask, value)).masked_fill(~mask, 0.0)
            kept.sum().backward()
            slopes = [p.grad.flatten() for p in agent.critic.parameters() if p.grad is not None]
            found.append((value, kept, torch.cat([torch.zeros(1), *slopes])))
        for value, kept, slope in found[1:]:
            when = f"with targets of {value:g} instead of {found[0][0]:g} where the mask is off"
            same("the loss of other tokens", found[0][1], kept, when, ROUNDING)
            same("the gradient", found[0][2], slope, when, ROUNDING)


def baseline(critic: Critic, case: None) -> None:
    """What it puts instead of its values, for the transport, is as a critic's values are."""
    for seed in range(3):
        rollout = Case(
            ((False,) * 4, (False, True, False, True), (False, False, True, True), (True,) * 4),
            ((0.0, 0.0, 0.0, 1.0),) * 4, (0, 0, 0, 1), (True, False, False, False), seed, False, 0,
        ).rollout()  # fmt: skip
        given = (1.0 - rollout.mask.cumsum(1) * 0.1).masked_fill(~rollout.mask, 0.0)

        def put(of: Rollout, given: Tensor = given) -> dict[str, Tensor]:
            try:
                changed = critic.baseline(of, given, BOUNDS)
            except Exception as error:
                raise Broken(f"baseline raised {type(error).__name__}: {error}") from error
            found = of if changed is None else changed
            assert found.values is not None and found.bootstrap is not None
            return {"values": found.values.masked_fill(~found.mask, 0.0), "bootstrap": found.bootstrap}

        expected = put(rollout)
        if expected["values"].shape != rollout.mask.shape or not all(bool(x.isfinite().all()) for x in expected.values()):
            raise Broken(
                f"its baseline is {numbers(expected['values'])}, {numbers(expected['bootstrap'])}; expected finite [B, T], [B]"
            )
        if bool(expected["bootstrap"][~rollout.truncated].ne(0).any()):
            raise Broken(f"after responses that ended by themselves its baseline is {numbers(expected['bootstrap'])}, not 0")
        for value in NOISE:
            for name, x in put(noisy(rollout, value)).items():
                same(name, expected[name], x, f"with {value} at masked positions", ROUNDING)
        turned = torch.arange(len(rollout.mask)).flip(0)
        for name, x in put(rows_of(rollout, turned), given.flip(0)).items():
            same(name, expected[name], x.flip(0), "with the responses in reverse order", ROUNDING)


def precision(critic: Critic, batch: Batch) -> None:
    agent = agent_of(critic)
    with NoHalf():
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
        raise Broken(f"under bf16 its values are off by {apart:.3f} in the mean: {numbers(low)} instead of {numbers(exact)}")


def determinism(critic: Critic, batch: Batch) -> None:
    first = None
    for when in ("", "called again", "called again, a day later"):
        with alone(len(when)), later() if "later" in when else nullcontext():
            found = values(critic, batch)
        first = found if first is None else first
        same("V", first, found, when)
        values(critic, replace(batch, seed=batch.seed + 1))


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
    Property("determinism", "the same tokens give the same values", determinism, 0.25),
    Property("form", "finite values [B, T + 1], within the rewards' bounds if its output is bounded", form, 0.25),
    Property("future", "V_t does not depend on tokens from t on, nor on other responses", future),
    Property("padding", "neither padding before prompts nor after responses matters", padding, 0.5),
    Property("order", "the order of the responses does not matter", order, 0.25),
    Property("split", "each response alone in a micro-batch gets the same values", split, 0.5),
    Property("gradient", "no gradient of its values reaches the actor", gradient, cases=0),
    Property("learns", "a step along its loss's gradient lowers the loss and moves values towards targets", learns, cases=0),
    Property("precision", "bf16 agrees with float32; with bf16 off, nothing is computed below float32", precision, 0.25),
    Property("built", "a seed determines the critic, and building it does not change the actor", built, cases=0),
    Property("noise", "targets at masked positions change no other loss or gradient", noise, cases=0),
    Property(
        "baseline",
        "its baseline is finite, independent of row order and of masked positions",
        baseline,
        cases=0,
        excused=lambda critic: "it changes none" if type(critic).baseline is Critic.baseline else "",
    ),
    Property(
        "length",
        "1 to 16,384 tokens in O(B*T) memory",
        lambda critic, case: None,
        excused=lambda critic: "the actor's padding mask alone is [S, S]; `cct plan` shows the cost of a length",
    ),
]


def show(operator: Component, batch: Batch) -> str:
    ids, seen, _ = batch.tokens()
    return python(input_ids=ids, attention_mask=seen, responses=batch.responses)
