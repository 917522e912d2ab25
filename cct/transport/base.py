"""The Transport and Gate axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from cct.handover import HandoverError, check, read_only
from cct.registry import Component, Registry, children, described
from cct.rollout import Credit, RatioScope
from cct.statistic import Statistic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from cct.rollout import Rollout


class _Reader(Component):
    """The common base of transports and gates."""

    @property
    def statistics(self) -> dict[str, Statistic]:
        """What the behaviour forward measures for it, by its name in `rollout.stats`: by default the statistics among its
        knobs, and what its children ask for."""
        found: dict[str, Statistic] = {}
        for _, part in children(self):
            found |= {part.name: part} if isinstance(part, Statistic) else getattr(part, "statistics", {})
        return found

    @property
    def needs(self) -> frozenset[str]:
        """What another part of the recipe must provide: by default what its children and its statistics need."""
        return super().needs.union(*(what.needs for what in self.statistics.values()))


class Transport(_Reader):
    """Carries a rollout's rewards back along its tokens."""

    reads_policy: ClassVar[bool] = True
    """Whether it reads what the trainer's forward says of the sampled tokens: log-probabilities, statistics, values. Where
    nothing does and the only step is on policy, that forward is left out."""

    def __call__(self, rollout: Rollout) -> Credit:
        """Advantages [B, T] (and value targets [B, T] where it has a use for a critic)."""
        raise NotImplementedError

    def checked(self, rollout: Rollout) -> Credit:
        """The credit, for whoever reads it. An episode of several rows gets it as if it were one row.

        Raises HandoverError where it is none, holds NaN or infinity at a trainable token or a gate outside [0, 1], or where the
        rollout was changed in place.
        """
        from .functional import join

        rollout, split = join(rollout)
        with read_only(self, _fields(rollout)):
            credit = self(rollout)
        if not isinstance(credit, Credit):
            raise HandoverError(
                self, f"{{part}} returned {described(credit)}{{where}}; expected Credit(advantages [B, T] float)"
            )
        check(self, credit.advantages, rollout.mask, output="advantages")
        if credit.value_targets is not None:
            check(self, credit.value_targets, rollout.mask, output="value_targets")
        if credit.gate is not None:
            check(self, credit.gate, rollout.mask, output="gate", within=(0.0, 1.0))
        if split is None:
            return credit
        return Credit(*(None if x is None else split(x) for x in vars(credit).values()))  # type: ignore[arg-type]

    @property
    def grain(self) -> Literal["token", "sequence"]:
        """token: advantages differ along a response. sequence: one number per response, on each of its tokens."""
        return "token"

    @property
    def whitens(self) -> Literal["token", "sequence"] | None:
        """The unit over which advantages are shifted and scaled in the batch; None if they are not."""
        return None

    @property
    def engine_ratio(self) -> RatioScope:
        """The ratios of trainer to engine that a token's advantage already contains: its own, those of later tokens."""
        return frozenset()

    @property
    def least_responses(self) -> int:
        """Minimum number of responses per prompt; with fewer, every advantage would be 0, and the recipe is refused."""
        return 2 if "groups" in self.needs else 1

    @property
    def branches(self) -> int:
        """Continuations to sample from each token that `starts` marks, for `rollout.branch_values`; 0 for none."""
        return 0

    def starts(self, rollout: Rollout, text_of: Callable[[int], str]) -> Tensor:
        """[B, T] bool, tokens before which responses are continued anew, where `branches`.

        Asked before the trainer's forward: of the policy it knows `rollout.rollout_logprobs` only. text_of decodes a token.
        """
        raise NotImplementedError

    def expected(self, past: tuple[float, float] | None) -> float:
        """Where it needs `history`: the value of a prompt, by what `remembered` gave last of it; None of a new one."""
        raise NotImplementedError

    def remembered(self, past: tuple[float, float] | None, scores: Sequence[float]) -> tuple[float, float]:
        """Where it needs `history`: what is known of a prompt after an iteration in which its responses had these scores."""
        raise NotImplementedError


class Gate(_Reader):
    """A per-token discount in [0, 1], computed from what the rollout knows before each token."""

    def __call__(self, rollout: Rollout) -> Tensor:
        """[B, T]; entries at masked positions do not matter."""
        raise NotImplementedError

    def discounts(self, rollout: Rollout) -> Tensor:
        """What the gate gives, for whoever reads it.

        Raises HandoverError where that is no float tensor [B, T], where it holds NaN or leaves [0, 1] at a trainable token, or
        where the rollout was changed in place.
        """
        with read_only(self, _fields(rollout)):
            found = self(rollout)
        check(self, found, rollout.mask, within=(0.0, 1.0))
        return found


def _fields(rollout: Rollout) -> dict[str, Any]:
    return {f"rollout.{name}": value for name, value in vars(rollout).items()}


transports: Registry[Transport] = Registry("transport", Transport)
gates: Registry[Gate] = Registry("gate", Gate)


class Wrapper(Transport):
    """A transport that changes another one's advantages token by token."""

    of: Annotated[Transport, transports]
    """The transport whose advantages are amplified."""

    @property
    def whitens(self) -> Literal["token", "sequence"] | None:
        return self.of.whitens

    @property
    def engine_ratio(self) -> RatioScope:
        return self.of.engine_ratio

    @property
    def least_responses(self) -> int:
        return self.of.least_responses

    @property
    def branches(self) -> int:
        return self.of.branches

    def starts(self, rollout: Rollout, text_of: Callable[[int], str]) -> Tensor:
        return self.of.starts(rollout, text_of)

    def expected(self, past: tuple[float, float] | None) -> float:
        return self.of.expected(past)

    def remembered(self, past: tuple[float, float] | None, scores: Sequence[float]) -> tuple[float, float]:
        return self.of.remembered(past, scores)
