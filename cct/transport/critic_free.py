"""What critic-free transports share: groups of responses to one prompt, and the conventions of other frameworks.

`like` sets the conventions of a public framework: numbers, not code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from cct.rollout import Credit, Rollout

from .base import Transport

if TYPE_CHECKING:
    from torch import Tensor


# The frameworks' conventions were last read at verl 1dda039 (2026-08-22), TRL f2cd577 (1.10.0.dev0, 2026-07-24), OpenRLHF
# 3c3be62 (0.11.0, 2026-08-13) and NeMo RL 7ea279a (2026-08-22); the file and function stand beside each `presets`.


class CriticFree(Transport):
    """A transport of rewards and groups alone, with `like`."""

    reads_policy = False
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    """Framework -> the knobs that are its conventions."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        like = data.get("like") if isinstance(data, dict) else None
        return {**cls.presets[like], **data} if isinstance(like, str) and like in cls.presets else data

    @model_validator(mode="after")
    def _agree(self) -> CriticFree:
        like = getattr(self, "like", None)
        for knob, value in self.presets.get(like or "", {}).items():
            if (found := getattr(self, knob)) != value:
                raise ValueError(f"`like: {like}` means {knob}: {value}, and {knob} is {found}; leave out one of the two")
        return self

    def default_of(self, knob: str) -> Any:
        return self.presets.get(getattr(self, "like", None) or "", {}).get(knob, super().default_of(knob))


def of_a_deviation(used: bool) -> dict[str, str]:
    return {} if used else dict.fromkeys(("eps", "ddof"), "with std: false nothing is divided by a deviation")


class Group(CriticFree):
    """One number per response, from the scores of its group, on each of its tokens."""

    single: Literal["zero", "raw"] = "zero"
    """Advantage of a response that is alone in its group because the others were dropped. zero: 0. raw: its score."""

    @property
    def waives(self) -> dict[str, str]:
        return {} if self.single == "zero" else {"equal": "single: raw keeps the score of a response alone in its group"}

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"groups"})

    @property
    def grain(self) -> Literal["token", "sequence"]:
        return "sequence"

    def _outcome(self, rollout: Rollout, **kinds: Any) -> Tensor:
        """`group_advantage`, [B], of the given kinds and this component's own knobs."""
        from .functional import group_advantage

        knobs = {name: getattr(self, name) for name in ("single", "eps", "ddof") if name in type(self).model_fields}
        return group_advantage(rollout.scores, rollout.groups, valid=rollout.valid, **knobs, **kinds)


def on_every_token(outcome: Tensor, rollout: Rollout) -> Credit:
    return Credit(outcome.unsqueeze(1) * rollout.mask)
