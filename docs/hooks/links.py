"""Links of the site: pages are written as files of the repository, and the site holds docs/ only.

The first page is README.md. A file outside docs/ that a page links to (a card, an example, a source
file) becomes a file of the site, under repository/.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
FIRST = "README.md"
OUTSIDE = "repository/"
_LINK = re.compile(r"(\]\()([^)#\s]+)")
_CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def repository_path(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    if uri == "index.md":
        return FIRST
    return uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else f"docs/{uri}"


def site_path(path: str) -> str:
    """Return the path in the site of a file of the repository."""
    if path == FIRST:
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE + path


def targets(text: str, path: str) -> Iterator[str]:
    """Yield the repository's files that a page at `path` links to."""
    for part in _CODE.split(text)[::2]:
        for _, target in _LINK.findall(part):
            if "://" not in target and not target.startswith("mailto:"):
                yield posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def rewritten(text: str, path: str) -> str:
    """Return a page with the links that hold in the site."""
    here = posixpath.dirname(site_path(path))

    def link(found: re.Match[str]) -> str:
        target = found[2]
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        return found[1] + posixpath.relpath(site_path(file), here or ".")

    parts = _CODE.split(text)
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md as the first page, and all files outside docs/ that pages link to."""
    first = ROOT / FIRST
    files.append(File.generated(config, "index.md", abs_src_path=str(first)))
    waiting = [FIRST, *(repository_path(page.src_uri) for page in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        for target in targets((ROOT / path).read_text(encoding="utf-8"), path):
            if target in seen or target.startswith("docs/") or not (ROOT / target).is_file():
                continue
            seen.add(target)
            uri = site_path(target)
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page."""
    return rewritten(markdown, repository_path(page.file.src_uri))
