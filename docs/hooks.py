"""What mkdocs does beside its own: pages from outside docs/, and links that lead out of it."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Page of the site → file of the checkout."""
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside docs/."""
    for page, name in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links between pages of the checkout lead to pages of the site. Of a link to a file that has no
    page, its text stays."""
    here = OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    pages = {name: uri for uri, name in OUTSIDE.items()}

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        to = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        if not (ROOT / to).exists():
            return match[0]  # mkdocs says that it leads nowhere
        uri = pages.get(to, to.removeprefix("docs/"))
        uri += "/README.md" if (ROOT / to).is_dir() else ""
        if files.get_file_from_path(uri) is None:
            return text
        return f"[{text}]({posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or '.')}{anchor})"

    return LINK.sub(link, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Undo what mkdocstrings makes of numpydoc's array-like, which it takes for a difference."""
    return re.sub(r"(?:<a [^>]*>)?array(?:</a>)? - like", "array-like", html)
