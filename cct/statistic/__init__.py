"""Statistics: one number per response token, measured in the actor's forward. Gates, transports and metrics read them."""

from . import attention, token  # noqa: F401  (registration)
from .attention import Anchor, Concentration, OutcomeAttention, Preplan
from .base import LayerStatistic, Statistic, statistics
from .forward import Attention, Forward
from .token import Collision, HiddenChange, TokenEntropy, TokenLogprob

__all__ = [
    "Anchor",
    "Attention",
    "Collision",
    "Concentration",
    "Forward",
    "HiddenChange",
    "LayerStatistic",
    "OutcomeAttention",
    "Preplan",
    "Statistic",
    "TokenEntropy",
    "TokenLogprob",
    "statistics",
]
