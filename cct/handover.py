"""What one part hands to another is checked once, where it is handed over, and the part that gave it is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cct.registry import Component, Knobs, descendants, described

if TYPE_CHECKING:
    from torch import Tensor

# A number may lie so far outside a range: sums and products of numbers within it do, by rounding.
ROUNDING = 1e-6


class HandoverError(ValueError):
    """A part gave what it must not, or changed what it was given.

    text: the message, with `{part}` and `{where}` in the place of the part's name and of the iteration.
    """

    def __init__(self, part: Component | str, text: str):
        self.part, self.text = part, text
        super().__init__(self.message())

    def message(self, recipe: Knobs | None = None, iteration: int | None = None) -> str:
        """The message; with the place of a nested part in the recipe, `gate 'mine' (transport.gate)`, and the iteration."""
        name = self.part if isinstance(self.part, str) else _named(self.part)
        parts = () if recipe is None else descendants(recipe)
        place = next((place for place, part in parts if part is self.part), None)
        name = f"{name} ({place})" if place and "." in place else name
        where = "" if iteration is None else f" in iteration {iteration}"
        return self.text.replace("{part}", name).replace("{where}", where)


def _named(part: Component) -> str:
    return f"{part.axis or 'part'} '{part.use or type(part).__name__}'"


def check(
    part: Component | str, found: Any, mask: Tensor, *, output: str = "", within: tuple[float, float] | None = None
) -> None:
    """A part's output: a float tensor of the mask's shape, finite where the mask is True, and within a range if one is given.

    output: what it is, `advantages`, where a part gives several. Raises HandoverError naming the part. Waits for a GPU once.
    """
    import torch

    called = f" as {output}" if output else ""
    if not isinstance(found, torch.Tensor) or found.shape != mask.shape or not found.is_floating_point():
        raise HandoverError(
            part, f"{{part}} returned {described(found)}{called}{{where}}; expected a float tensor of shape {tuple(mask.shape)}"
        )
    wrong = ~found.isfinite()
    if within is not None:
        wrong |= (found < within[0] - ROUNDING) | (found > within[1] + ROUNDING)
    wrong &= mask
    if not bool(wrong.any()):
        return
    if not bool((found.isfinite() | ~mask).all()):
        raise HandoverError(
            part, f"NaN or infinity from {{part}}{called.replace(' as ', ' (') + ')' if called else ''}{{where}}"
        )
    assert within is not None
    number = found[wrong][0].item()
    raise HandoverError(
        part,
        f"{{part}} returned {number:g}{called}{{where}}; expected numbers in [{within[0]:g}, {within[1]:g}] at every token",
    )


@contextmanager
def read_only(part: Component | str, given: Mapping[str, Any], *, contents: bool = False) -> Iterator[None]:
    """Raises HandoverError naming the part where it changes in place what it was given: tensors, and dicts of them.

    Tensors count their changes, which costs nothing to look at. contents: compare the numbers too, for changes that go behind
    that count (by `.data`, by numpy), at the price of a copy.
    """
    before = {name: (value, _mark(value, contents)) for name, value in _flat(given)}
    yield
    after = dict(_flat(given))
    for name in {**before, **after}:
        if name not in before or name not in after or not _same(*before[name], after[name]):
            raise HandoverError(part, f"{{part}} changed {name} in place{{where}}; it must work on a copy")


def _flat(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}[{key!r}]", inner) for key, inner in value.items())
        else:
            yield name, value


def _mark(value: Any, contents: bool) -> tuple[int, Tensor | None] | None:
    """How often a tensor was changed, and its bits."""
    import torch

    if not isinstance(value, torch.Tensor):
        return None
    return value._version, _bits(value).clone() if contents else None


def _bits(x: Tensor) -> Tensor:
    import torch

    return x.detach().contiguous().view(-1).view(torch.uint8)


def _same(value: Any, mark: tuple[int, Tensor | None] | None, now: Any) -> bool:
    import torch

    if mark is None:
        return value is now or (isinstance(value, int | float | tuple) and value == now)
    if value is not now or value._version != mark[0]:
        return False
    return mark[1] is None or torch.equal(_bits(value), mark[1])
