"""The Transport and Gate axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from cct.registry import Component, Registry

if TYPE_CHECKING:
    from torch import Tensor

    from cct.rollout import Concentration, Credit, Rollout


class Transport(Component):
    """Carries a rollout's rewards back along its tokens."""

    def __call__(self, rollout: Rollout) -> Credit:
        """Advantages [B, T] (and value targets [B, T] where it has a use for a critic)."""
        raise NotImplementedError

    @property
    def grain(self) -> Literal["token", "sequence"]:
        """token: advantages differ along a response. sequence: one number per response, on each of its tokens."""
        return "token"

    @property
    def whitens(self) -> Literal["token", "sequence"] | None:
        """What each counts once where advantages are shifted and scaled over the batch; None where they are not."""
        return None

    @property
    def statistics(self) -> dict[str, Concentration]:
        """Attention statistics to take in the forward, by their name in `rollout.stats`."""
        return {}


class Gate(Component):
    """A per-token discount in [0, 1], computed from what the rollout knows before each token."""

    def __call__(self, rollout: Rollout) -> Tensor:
        """[B, T]; entries at masked positions do not matter."""
        raise NotImplementedError

    @property
    def statistics(self) -> dict[str, Concentration]:
        """As `Transport.statistics`."""
        return {}


transports: Registry[Transport] = Registry("transport", Transport)
gates: Registry[Gate] = Registry("gate", Gate)
