"""The Statistic axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from cct.registry import Component, Registry

if TYPE_CHECKING:
    from torch import Tensor

    from .forward import Forward


class Statistic(Component):
    """One detached number per response token, measured in the behaviour forward."""

    reads: ClassVar[frozenset[str]] = frozenset()
    """What the forward must leave behind: `attention` and `hidden_states` of its layers, the `distribution`."""
    knows: ClassVar[Literal["before", "token", "response"]] = "before"
    """What the number at t depends on: tokens before t; token t too; or later tokens. A gate reads the first kind as it is and
    the second one token later. The third is for transports that reweight advantages, and for metrics."""

    def measure(self, forward: Forward) -> Tensor:
        """[B, T] float for the response tokens; entries at padding do not matter."""
        raise NotImplementedError

    @property
    def needs(self) -> frozenset[str]:
        return self.reads

    @property
    def name(self) -> str:
        """Its name in `Rollout.stats`: its registered name and its knobs. Statistics of one name are measured once."""
        knobs = (_word(getattr(self, knob)) for knob in type(self).model_fields)
        return "/".join([self.use or type(self).__name__, *knobs])

    def layer_indices(self, n_layers: int) -> list[int]:
        """Indices in [0, n_layers) of the layers read; all of them unless a knob chooses."""
        return list(range(n_layers))

    def fits(self, n_layers: int, n_heads: int) -> None:
        """Raises ValueError where the model has no such layers or heads."""
        self.layer_indices(n_layers)


class LayerStatistic(Statistic):
    """A statistic that is averaged over layers."""

    layers: Literal["last_half", "last_quarter", "all"] | tuple[int, ...] = "last_half"
    """Layers averaged over; indices may be negative."""

    def layer_indices(self, n_layers: int) -> list[int]:
        """Raises ValueError where a layer does not exist."""
        if self.layers == "all":
            return list(range(n_layers))
        if self.layers == "last_half":
            return list(range(n_layers // 2, n_layers))
        if self.layers == "last_quarter":
            return list(range(n_layers - max(1, n_layers // 4), n_layers))
        bad = [i for i in self.layers if not -n_layers <= i < n_layers]
        if bad or not self.layers:
            raise ValueError(f"layers {list(self.layers)} do not fit a model of {n_layers} layers")
        return sorted({i % n_layers for i in self.layers})

    @property
    def layers_name(self) -> str:
        """The layers as part of a name in `Rollout.stats`."""
        return _word(self.layers)


def _word(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


statistics: Registry[Statistic] = Registry("statistic", Statistic)
