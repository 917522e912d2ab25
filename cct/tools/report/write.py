"""Choose the page and where it is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cct.system.files import write_text

from .read import ReportError
from .runs import runs_report
from .study import is_study, study_report


def write_report(sources: Sequence[Path], output: Path | None = None) -> list[Path]:
    """Write the page and the Markdown beside it; returns both paths. Without `output`: report.html in the first source.

    Raises ReportError where a source is neither a run nor a study.
    """
    studies = [source for source in sources if is_study(source)]
    if studies and len(sources) > 1:
        raise ReportError(f"{studies[0]}: a study cannot share a page with other sources; name it alone")
    try:
        report = study_report(sources[0]) if studies else runs_report(sources)
    except KeyError as error:
        raise ReportError(
            f"{', '.join(map(str, sources))}: a file lacks {error}, so another version of cct wrote it; remove tokens.json and "
            "fidelity.json, and write them again"
        ) from error
    page = output or sources[0] / "report.html"
    if page.suffix != ".html":
        raise ReportError(f"{page}: the page is HTML; its name must end in .html")
    beside = page.with_suffix(".md")
    write_text(page, report.html())
    write_text(beside, report.markdown())
    return [page, beside]
