"""The page around a report's sections, its style, and tables in HTML and Markdown from the same cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .style import STYLE


@dataclass(frozen=True)
class Table:
    """Cells as text; columns of numbers stand to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1
    """Leading columns that are text; the others are numbers."""

    def html(self) -> str:
        kind = lambda index: ' class="n"' if index >= self.texts else ""  # noqa: E731
        head = "".join(f'<th scope="col"{kind(i)}>{escape(column)}</th>' for i, column in enumerate(self.columns))
        body = "".join(
            "<tr>" + "".join(f"<td{kind(i)}>{escape(cell)}</td>" for i, cell in enumerate(row)) + "</tr>" for row in self.rows
        )
        return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

    def markdown(self) -> str:
        line = lambda cells: "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"  # noqa: E731
        rule = "|" + "|".join("---" if i < self.texts else "---:" for i in range(len(self.columns))) + "|"
        return "\n".join([line(self.columns), rule, *(line(row) for row in self.rows)]) + "\n"


@dataclass(frozen=True)
class Section:
    """A part of the page; its HTML is finished, its title is text."""

    title: str
    html: str


@dataclass(frozen=True)
class Report:
    """A page and the tables that stand beside it in Markdown."""

    title: str
    lead: str
    """HTML."""
    sections: Sequence[Section]
    tables: dict[str, Table]

    def html(self) -> str:
        links = "".join(f'<a href="#s{i}">{escape(section.title)}</a>' for i, section in enumerate(self.sections))
        body = "".join(
            f'<section aria-labelledby="s{i}"><h2 id="s{i}">{escape(section.title)}</h2>{section.html}</section>'
            for i, section in enumerate(self.sections)
        )
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style></head>"
            f"<body><header><h1>{escape(self.title)}</h1>{self.lead}<nav>{links}</nav></header><main>{body}</main></body></html>\n"
        )

    def markdown(self) -> str:
        return f"# {self.title}\n\n" + "\n".join(f"## {name}\n\n{table.markdown()}" for name, table in self.tables.items())


def facts(pairs: dict[str, str]) -> str:
    """Short facts in a row."""
    inner = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs.items())
    return f'<dl class="facts">{inner}</dl>'
