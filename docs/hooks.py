"""Of mkdocs: a page's links to repository files outside docs/ work on GitHub; on the site they become plain text."""

import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return markdown if "/" in page.file.src_uri else re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)
