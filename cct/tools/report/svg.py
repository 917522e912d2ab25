"""Charts as inline SVG: a few marks, drawn by hand so that the page needs no library and takes its colours from the page.

Every chart is a <figure>: caption, legend, picture. Colours are classes (`c0` to `c7`) that the style sheet defines for light
and for dark; the same series is also told apart by its dashes. Numbers of a mark stand in its <title>, which browsers show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 380, 244
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 24, 40
COLOURS = 8
BAND = 0.2  # opacity of one band, or of two
MOST_POINTS = 300  # of a line whose points say their numbers, so that the page of a long run stays light
DASHES = ("", "6 3", "2 3", "8 3 2 3")  # one more each time the colours begin again


@dataclass(frozen=True)
class Series:
    """A line, and a band where low and high are given. NaN breaks the line."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    points: bool = False
    """Mark each point, for what is not measured at every step."""
    colour: int = 0
    """The same for what is the same in several charts."""


@dataclass(frozen=True)
class Interval:
    """A row of a forest plot."""

    label: str
    value: float
    low: float
    high: float
    note: str = ""


def number(x: float | None) -> str:
    """A number as people read it: three significant digits, separators from a thousand on, a true minus."""
    if x is None or math.isnan(x):
        return "\N{EN DASH}"
    if math.isinf(x):
        return "∞" if x > 0 else "\N{MINUS SIGN}∞"
    text = f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"
    return text.replace("-", "\N{MINUS SIGN}")


def ticks(low: float, high: float, count: int = 4) -> dict[float, str]:
    """About so many round numbers within [low, high], with enough digits to be told apart."""
    if not high > low:
        return {low: number(low)}
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    places = [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    if max(map(abs, places)) < 1e-4:
        return {x: f"{x:.1e}".replace("-", "\N{MINUS SIGN}") if x else "0" for x in places}
    digits = next(d for d in range(12) if abs(round(step, d) - step) < 1e-6 * step)
    return {round(x, 12): f"{x:,.{digits}f}".replace("-", "\N{MINUS SIGN}") for x in places}


def figure(caption: str, body: str, legend: Mapping[str, int] | None = None, note: str = "") -> str:
    """A <figure>; caption, legend (name -> colour) and note are text, the body is HTML."""
    keys = "".join(
        f'<span class="key"><i class="swatch c{colour % COLOURS}"></i>{escape(name)}</span>'
        for name, colour in (legend or {}).items()
    )
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    above = f'<div class="legend">{keys}</div>' if keys else ""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{above}{body}{below}</figure>"


def lines(
    caption: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    least_span: float = 0.0,
    zero: bool = False,
    shade_to: float | None = None,
    note: str = "",
) -> str:
    """A line chart.

    x_range, y_range: where an axis is fixed. least_span: of the y axis otherwise, or noise would fill it. zero: draw the line
    y = 0. shade_to: grey from the left up to this x.
    """
    xs = [x for one in series for x in one.x]
    values = [y for one in series for part in (one.y, one.low or (), one.high or ()) for y in part if math.isfinite(y)]
    if not xs or not values:
        return figure(caption, '<p class="note">no data</p>')
    low, high = y_range or _widened(min(values), max(values), least_span)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    first, last = x_range or (min(xs), max(xs))
    frame = _Frame((first, last), (low, high))
    parts = [frame.axes(x_label, y_label, whole_x=all(float(x).is_integer() for x in xs))]
    if shade_to is not None and shade_to > first:
        at = f'x="{frame.x(first):.1f}" y="{TOP}" width="{frame.x(shade_to) - frame.x(first):.1f}" height="{frame.height}"'
        parts.insert(0, f'<rect class="shade" {at}/>')
    if zero:
        parts.append(f'<path class="zero" d="M{LEFT} {frame.y(0):.1f}H{WIDTH - RIGHT}"/>')
    opacity = BAND * min(1.0, 2 / len(series))  # many bands over each other are still seen through
    for one in series:  # under every line
        if one.low is not None and one.high is not None:
            ends = zip(one.x, one.low, one.high, strict=True)
            band = [(x, a, b) for x, a, b in ends if math.isfinite(a) and math.isfinite(b)]
            there = "L".join(f"{frame.x(x):.1f} {frame.y(b):.1f}" for x, _, b in band)
            back = "L".join(f"{frame.x(x):.1f} {frame.y(a):.1f}" for x, a, _ in reversed(band))
            drawn = f'<path class="band c{one.colour % COLOURS}" style="opacity:{opacity:.3f}" d="M{there}L{back}Z"/>'
            parts.append(drawn if band else "")
    for one in series:
        colour, dash = f"c{one.colour % COLOURS}", DASHES[one.colour // COLOURS % len(DASHES)]
        parts.append(f'<path class="line {colour}" stroke-dasharray="{dash}" d="{_path(frame, one)}"/>')
        kind, radius = ("point", 2.5) if one.points or len(one.x) == 1 else ("touch", 5)
        for x, y in zip(one.x, one.y, strict=True) if len(one.x) <= MOST_POINTS else ():
            if math.isfinite(y):
                what = escape(f"{one.name}: {number(y)} at {x_label} {number(x)}")
                at = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{radius}"'
                parts.append(f'<circle class="{kind} {colour}" {at}><title>{what}</title></circle>')
    legend = {one.name: one.colour for one in series} if len(series) > 1 or series[0].colour else {}
    return figure(caption, _svg(caption, parts), legend, note)


def stacked(caption: str, x: Sequence[float], parts_of: Mapping[str, Sequence[float]], *, x_label: str, y_label: str) -> str:
    """Bars over x, each the sum of its parts. A part that is 0 throughout keeps its colour for a chart where it is not."""
    totals = [sum(values) for values in zip(*parts_of.values(), strict=True)]
    if not totals or max(totals) <= 0:
        return figure(caption, '<p class="note">no data</p>')
    frame = _Frame((min(x) - 0.5, max(x) + 0.5), (0.0, max(totals) * 1.05))
    drawn = [frame.axes(x_label, y_label, whole_x=True)]
    width = max(1.0, (frame.x(1) - frame.x(0)) * 0.8)
    below = [0.0] * len(x)
    for index, (name, values) in enumerate(parts_of.items()):
        for place, value in enumerate(values if any(values) else ()):
            top, foot = frame.y(below[place] + value), frame.y(below[place])
            below[place] += value
            what = escape(f"{name}: {number(value)} {y_label} at {x_label} {number(x[place])}")
            size = f'width="{width:.1f}" height="{max(0.0, foot - top):.1f}"'
            at = f'x="{frame.x(x[place]) - width / 2:.1f}" y="{top:.1f}"'
            drawn.append(f'<rect class="bar c{index % COLOURS}" {at} {size}><title>{what}</title></rect>')
    legend = {name: index for index, (name, values) in enumerate(parts_of.items()) if any(values)}
    return figure(caption, _svg(caption, drawn), legend)


def forest(caption: str, rows: Sequence[Interval], *, x_label: str, at: float = 0.0, note: str = "") -> str:
    """Intervals below each other, and the line that says no effect. Ends that are NaN or infinite run out of the picture."""
    rows = [row for row in rows if math.isfinite(row.value)]
    if not rows:
        return figure(caption, '<p class="note">no data</p>')
    ends = [x for row in rows for x in (row.value, row.low, row.high) if math.isfinite(x)] + [at]
    low, high = _widened(min(ends), max(ends))
    left = min(440.0, max(90.0, 6.8 * max(len(row.label) for row in rows) + 20))  # room for the names
    width, right, height = left + 510, 160, 28 * len(rows) + BOTTOM + 10

    def place(x: float) -> float:
        return left + (min(max(x, low), high) - low) / (high - low) * (width - left - right)

    foot, middle = height - BOTTOM, (left + width - right) / 2
    parts = []
    for tick, told in ticks(low, high, 5).items():
        parts.append(f'<path class="grid" d="M{place(tick):.1f} 6V{foot}"/>')
        parts.append(_text(place(tick), foot + 15, told, anchor="middle"))
    parts.append(f'<path class="zero" d="M{place(at):.1f} 6V{foot}"/>')
    parts.append(_text(middle, height - 6, x_label, "label", "middle"))
    for index, row in enumerate(rows):
        y = 6 + 28 * index + 14
        from_, to = (end if math.isfinite(end) else edge for end, edge in ((row.low, low), (row.high, high)))
        known = math.isfinite(row.low) or math.isfinite(row.high)
        clear = known and (row.low > at or row.high < at)
        shown = f"{number(row.value)} [{number(row.low)}, {number(row.high)}]" if known else number(row.value)
        parts.append(_text(left - 10, y + 4, row.label, "name", "end"))
        parts.append(f'<path class="whisker" d="M{place(from_):.1f} {y}H{place(to):.1f}"/>' if known else "")
        parts.append(f'<circle class="{"clear" if clear else "unclear"}" cx="{place(row.value):.1f}" cy="{y}" r="5"/>')
        parts.append(_text(width - right + 10, y + 4, shown + row.note))
    return figure(caption, _svg(caption, parts, width, height, "wide"), note=note)


def slopes(caption: str, pairs: Sequence[tuple[Interval, Interval]], *, y_label: str, note: str = "") -> str:
    """Lines from left to right, one for each pair, with the intervals of their ends.

    Where they are not parallel, the step to the right means something else on one line than on the other.
    """
    ends = [x for pair in pairs for one in pair for x in (one.value, one.low, one.high) if math.isfinite(x)]
    if not ends:
        return figure(caption, '<p class="note">no data</p>')
    frame = _Frame((-0.6, 1.6), _widened(min(ends), max(ends)))
    parts = [frame.y_axis(y_label)]
    heights = [_apart([frame.y(pair[side].value) for pair in pairs]) for side in (0, 1)]  # of the labels
    for index, pair in enumerate(pairs):
        shift = (index - (len(pairs) - 1) / 2) * 0.04  # so that intervals at one place do not cover each other
        places = [frame.x(x + shift) for x in (0, 1)]
        points = list(zip(places, pair, strict=True))
        drawn = "L".join(f"{x:.1f} {frame.y(one.value):.1f}" for x, one in points if math.isfinite(one.value))
        parts.append(f'<path class="line c{index}" d="M{drawn}"/>' if drawn else "")
        for (x, one), anchor, away, at in zip(points, ("end", "start"), (-8, 8), heights, strict=True):
            if not math.isfinite(one.value):
                continue
            if math.isfinite(one.low) and math.isfinite(one.high):
                parts.append(f'<path class="line c{index}" d="M{x:.1f} {frame.y(one.low):.1f}V{frame.y(one.high):.1f}"/>')
            parts.append(f'<circle class="point c{index}" cx="{x:.1f}" cy="{frame.y(one.value):.1f}" r="4"/>')
            parts.append(_text(x + away, at[index] + 4, one.label, "name", anchor))
    return figure(caption, _svg(caption, parts, height=HEIGHT - BOTTOM + TOP), note=note)


def _apart(heights: Sequence[float], least: float = 13.0) -> list[float]:
    """The same heights in the same order, moved until none is closer than `least` to the next; NaN stays."""
    order = sorted((i for i, y in enumerate(heights) if math.isfinite(y)), key=lambda i: heights[i])
    moved = list(heights)
    for count, (before, index) in enumerate(pairwise(order), 1):
        short = max(0.0, moved[before] + least - moved[index])
        moved[index] += short / 2
        for earlier in order[:count]:
            moved[earlier] -= short / 2
    return moved


def heat_map(
    caption: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    shown: Sequence[Sequence[str]],
    *,
    low: float,
    high: float,
    note: str = "",
) -> str:
    """A table of coloured cells, as HTML so that it can be read aloud. low, high: ends of the colours; NaN has none."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = []
    for name, numbers, texts in zip(rows, values, shown, strict=True):
        cells = []
        for value, text in zip(numbers, texts, strict=True):
            share = 0.0 if math.isnan(value) else (min(max(value, low), high) - low) / ((high - low) or 1.0)
            style = "" if math.isnan(value) else f' style="--heat:{100 * share:.0f}%"'
            cells.append(f'<td class="heat"{style}>{escape(text)}</td>')
        body.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    table = f'<div class="scroll"><table class="heatmap"><tr><td></td>{head}</tr>{"".join(body)}</table></div>'
    return figure(caption, table, note=note)


@dataclass(frozen=True)
class _Frame:
    """From data to picture."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]

    @property
    def height(self) -> int:
        return HEIGHT - TOP - BOTTOM

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (value - low) / ((high - low) or 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return TOP + (high - min(max(value, low), high)) / ((high - low) or 1.0) * self.height

    def axes(self, x_label: str, y_label: str, *, whole_x: bool) -> str:
        foot, parts = HEIGHT - BOTTOM, [self.y_axis(y_label)]
        for tick, told in ticks(*self.x_range, 5).items():
            if not whole_x or tick.is_integer():
                parts.append(_text(self.x(tick), foot + 16, number(tick) if whole_x else told, anchor="middle"))
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "label", "middle"))
        return "".join(parts)

    def y_axis(self, label: str) -> str:
        parts = []
        for tick, told in ticks(*self.y_range).items():
            y = self.y(tick)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(_text(LEFT - 6, y + 4, told, anchor="end"))
        return "".join([*parts, _text(0, 10, label, "label")])


def _text(x: float, y: float, text: str, kind: str = "tick", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _path(frame: _Frame, one: Series) -> str:
    pieces, pen = [], "M"
    for x, y in zip(one.x, one.y, strict=True):
        if math.isfinite(y):
            pieces.append(f"{pen}{frame.x(x):.1f} {frame.y(y):.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(pieces)


def _widened(low: float, high: float, least: float = 0.0) -> tuple[float, float]:
    """A little room beyond the data, and `least` in all; some, where all are the same. What is never negative stays so."""
    room = max((high - low) * 0.06, (least - (high - low)) / 2) or abs(high) * 0.1 or 0.5
    return max(low - room, 0.0) if low >= 0 else low - room, high + room


def _svg(title: str, parts: Sequence[str], width: float = WIDTH, height: float = HEIGHT, kind: str = "chart") -> str:
    return (
        f'<svg class="{kind}" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title, quote=True)}" '
        f'style="max-width:{1.35 * width if kind == "chart" else width:.0f}px" xmlns="http://www.w3.org/2000/svg">'
        f"{''.join(parts)}</svg>"
    )
