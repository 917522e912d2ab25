"""Responses token by token, coloured by the credit of transports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .svg import number

FULL = 0.95  # share of the signed numbers that are coloured by size; the few beyond would leave the others pale
MOST_TOKENS = 600  # of a response, so that a page about long ones stays light

QUANTITIES = {
    "advantage": "what the policy is trained on, as the transport gave it",
    "delta": "TD error r + g V' \N{MINUS SIGN} V under the transport's discount g",
    "gate": "discount per token",
    "value": "the critic's value before the token",
}
SIGNED = ("advantage", "delta")
SYMBOLS = {"advantage": "A", "delta": "δ", "gate": "g", "value": "V"}


@dataclass(frozen=True)
class Pane:
    """One response under one transport. Panes of one scale are coloured alike."""

    heading: str
    response: dict[str, Any]
    transport: str
    scale: str
    """Whose numbers are of one kind: a transport in an iteration, where they may have been whitened together."""

    def values(self, name: str) -> list[float | None] | None:
        return self.response["value"] if name == "value" else self.response["credit"][self.transport][name]

    def quantity(self, name: str) -> list[float | None] | None:
        """Of the tokens that are shown."""
        found = self.values(name)
        return found if found is None else found[:MOST_TOKENS]


def token_view(blocks: Sequence[tuple[str, Sequence[Pane]]], name: str) -> str:
    """HTML of (heading, HTML itself; panes side by side). Radio buttons choose the quantity, without a script. name: unique.

    Signed quantities are coloured up to the size that all but the largest few keep below, and these as well in full; others
    from least to greatest.
    """
    there = [q for q in QUANTITIES if any(_numbers(pane, q) for _, panes in blocks for pane in panes)]
    every = [pane for _, panes in blocks for pane in panes]
    scales = {
        key: {q: _scale(q, [pane for pane in every if pane.scale == key]) for q in there} for key in {p.scale for p in every}
    }
    choices = "".join(
        f'<input class="choice" type="radio" name="{name}" id="{name}-{q}"{" checked" if q == there[0] else ""}>'
        f'<label for="{name}-{q}">{SYMBOLS[q]} {escape("TD error" if q == "delta" else q)}</label>'
        for q in there
    )
    rules = "".join(
        f"#{name}-{q}:checked~.view .t{{background:var(--{q[0]})}}#{name}-{q}:checked~.view .scale.{q}{{display:flex}}"
        f"#{name}-{q}:checked~.view .mean.{q}{{display:block}}"
        for q in there
    )
    shown = "".join(
        f'<div class="response">{f"<h3>{heading}</h3>" if heading else ""}<div class="panes">'
        + "".join(_pane(pane, scales[pane.scale]) for pane in panes)
        + "</div></div>"
        for heading, panes in blocks
    )
    told = "".join(f'<p class="scale note {q}">{escape(QUANTITIES[q])}</p>' for q in there)
    view = f'<div class="view">{told}{shown}</div>'
    return f'<style>{rules}</style><div role="group" aria-label="colour tokens by">{choices}{view}</div>'


def _numbers(pane: Pane, quantity: str) -> list[float]:
    trained = pane.response["trained"]
    return [x for x, counts in zip(pane.quantity(quantity) or [], trained, strict=False) if x is not None and counts]


def _scale(quantity: str, panes: Sequence[Pane]) -> tuple[float, float]:
    """What is coloured least and most."""
    numbers = sorted(x for pane in panes for x in _numbers(pane, quantity))
    if not numbers:
        return 0.0, 0.0
    if quantity in SIGNED:
        sizes = sorted(map(abs, numbers))
        size = sizes[math.ceil(FULL * (len(sizes) - 1))]
        return -size, size
    return numbers[0], numbers[-1]


def _pane(pane: Pane, scales: dict[str, tuple[float, float]]) -> str:
    legend = "".join(
        f'<div class="scale {q}"><span>{number(low)}</span><i class="{"diverging" if q in SIGNED else "sequential"}"></i>'
        f"<span>{number(high)}</span></div>"
        if pane.quantity(q) is not None
        else f'<div class="scale {q}">this transport has none</div>'
        for q, (low, high) in scales.items()
    )
    tokens = pane.response["tokens"]
    quantities = {q: pane.quantity(q) for q in scales}
    spans = []
    for t, (text, trained) in enumerate(zip(tokens[:MOST_TOKENS], pane.response["trained"], strict=False)):
        at = {q: values[t] for q, values in quantities.items() if values is not None and values[t] is not None}
        told = "  ".join(f"{SYMBOLS[q]} {number(x)}" for q, x in at.items()) if trained else "not trained on"
        style = ";".join(f"--{q[0]}:{_colour(q, x, scales[q])}" for q, x in at.items() if x is not None) if trained else ""
        title = escape(f"token {t}: {text!r}  {told}", quote=True)
        shown = escape(text.replace("\n", "⏎\n")) or "∅"
        spans.append(f'<span class="t{"" if trained else " m"}" style="{style}" title="{title}">{shown}</span>')
    more = f' <span class="prompt">… {len(tokens) - MOST_TOKENS} more tokens</span>' if len(tokens) > MOST_TOKENS else ""
    prompt = f'<span class="prompt">{escape(pane.response["prompt"])}</span>'
    if "turn" in pane.response:
        text = f'<p class="text-of">{prompt}</p>{_conversation(pane, spans, scales)}<p class="text-of">{more}</p>'
    else:
        text = f'<p class="text-of">{prompt}{"".join(spans)}{more}</p>'
    return f'<div class="pane"><h4>{escape(pane.heading)}</h4>{legend}{text}</div>'


def _conversation(pane: Pane, spans: Sequence[str], scales: dict[str, tuple[float, float]]) -> str:
    """The policy's turns as blocks, what it observed between them, and where what it had read was rewritten."""
    response, found, begin = pane.response, [], 0
    turns, forks = response["turn"], {fork["token"]: fork for fork in response["forks"]}
    for end in range(1, len(spans) + 1):
        if end < len(spans) and turns[end] == turns[begin] and end not in forks:
            continue
        if begin in forks:
            again = f"history rewritten, {forks[begin]['read_again']:,} tokens read again; from where it differs:"
            found.append(f'<p class="text-of observed"><b class="again">{again}</b>{escape(forks[begin]["text"])}</p>')
        if turns[begin] < 0:
            read = escape("".join(response["tokens"][begin:end]).replace("\n", "⏎\n"))
            found.append(f'<p class="text-of observed"><b>observed</b>{read}</p>')
        else:
            said, beside = "".join(spans[begin:end]), _beside(pane, turns[begin], scales)
            found.append(f'<div class="turn"><div class="beside">{beside}</div><p class="text-of">{said}</p></div>')
        begin = end
    return "".join(found)


def _beside(pane: Pane, turn: int, scales: dict[str, tuple[float, float]]) -> str:
    """What stands beside a turn: its number, the mean of each quantity over its trainable tokens, and its reward."""
    response = pane.response
    places = [t for t, of in enumerate(response["turn"]) if of == turn and response["trained"][t]]
    means = []
    for q, scale in scales.items():
        values = pane.values(q)
        there = [] if values is None else [x for t in places if (x := values[t]) is not None]
        if there:
            mean = sum(there) / len(there)
            colour = f"background:{_colour(q, mean, scale)}"
            means.append(f'<span class="mean {q}" style="{colour}">mean {SYMBOLS[q]} {number(mean)}</span>')
    given = response["turns"][turn]
    facts = [f"reward {number(given['reward'])}", *(f"{escape(name)} {number(x)}" for name, x in given["rewards"].items())]
    facts += [] if places else ["not trained on"]
    return "".join(means) + "".join(f"<span>{fact}</span>" for fact in facts) + f"<b>turn {turn + 1}</b>"


def _colour(quantity: str, x: float, scale: tuple[float, float]) -> str:
    low, high = scale
    if quantity in SIGNED:
        share = min(1.0, abs(x) / high) if high else 0.0
        return f"rgb(var(--{'pos' if x > 0 else 'neg'})/{0.8 * share:.2f})"
    share = (x - low) / (high - low) if high > low else 0.0
    return f"rgb(var(--seq)/{0.75 * share:.2f})"
