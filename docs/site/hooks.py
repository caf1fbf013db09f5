"""What MkDocs is told beside ``mkdocs.yml``: documents that are written for a checkout, as a site.

The documents are read in two places: in a checkout, where a link may lead to any file, and as a
site, which has only what is in ``docs/``.  So the documents of the root folder and the scripts and
notebooks of ``docs/examples`` become pages of the site, links to them lead to these pages, and a
link to any other file of the repository becomes the file's path.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# Documents of the root folder -> pages.  ("README.md" would be the site's first page.)
ROOT_PAGES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
# A line of a numbered item: its first one, or one that goes on.
_ITEM = re.compile(r"\d+\. | {3}\S")
_FENCE = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are not files of ``docs/``."""
    for name, page in ROOT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=for_site(text, name)))
    for example in sorted((ROOT / "docs/examples").iterdir()):
        if example.suffix not in _EXAMPLES:
            continue
        page = _EXAMPLES[example.suffix](example)
        files.append(File.generated(config, f"examples/{example.stem}.md", content=page))
        source = files.get_file_from_path(f"examples/{example.name}")
        if source is not None:
            files.remove(source)
    return files


def _page_of_script(path: Path) -> str:
    return f"# {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"


def _page_of_notebook(path: Path) -> str:
    """The cells of a notebook, and what they printed when it was run for the repository."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(for_site(source, f"docs/examples/{path.name}"))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            text = output["text"] if "text" in output else output["data"]["text/plain"]
            parts.append(f"```text\n{''.join(text).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


_EXAMPLES = {".py": _page_of_script, ".ipynb": _page_of_notebook}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite what is a file of ``docs/``; other pages have been rewritten when they were made."""
    if page.file.generated_by is not None:
        return markdown
    return for_site(markdown, f"docs/{page.file.src_uri}")


def for_site(text: str, path: str) -> str:
    """The document at ``path`` of the repository, as a page of the site."""
    parts = _FENCE.split(text)
    # Every second part is a block of code.  One that stands between the lines of a numbered item
    # belongs to the item, which would end there otherwise.
    for i in range(1, len(parts), 2):
        before, after = parts[i - 1].rstrip(), parts[i + 1].lstrip("\n")
        if _ITEM.match(before.rpartition("\n\n")[2]) and _ITEM.match(after):
            parts[i] = re.sub(r"^(?=.)", "    ", parts[i], flags=re.MULTILINE)
    for i in range(0, len(parts), 2):
        parts[i] = _LINK.sub(lambda link: _linked(link, path), _indented(parts[i]))
    return "".join(parts)


def _indented(text: str) -> str:
    """What belongs to a numbered item is indented by three spaces there, and by four in MkDocs."""
    return re.sub(r"^(?=   [^ ]|   {2,}[^ ])(?!    {1,}[-*] )", " ", text, flags=re.MULTILINE)


def _linked(link: re.Match[str], path: str) -> str:
    label, target = link[1], link[2]
    file, _, anchor = target.partition("#")
    if "://" in target or not file:
        return link[0]
    # Where the page is, and where the link leads, from the root of the repository.
    folder = posixpath.dirname(path)
    found = posixpath.normpath(posixpath.join(folder, file))
    page = _page_of(found)
    if page is None:
        return label if "`" in label or label == found else f"{label} (`{found}`)"
    here = posixpath.dirname(ROOT_PAGES.get(path, path.removeprefix("docs/")))
    there = posixpath.relpath(page, here or ".")
    return f"[{label}]({there}{'#' + anchor if anchor else ''})"


def _page_of(path: str) -> str | None:
    """Of the file at ``path`` of the repository, in the site; None if the site does not have it."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if not path.startswith("docs/"):
        return None
    inside = path.removeprefix("docs/")
    stem, suffix = posixpath.splitext(inside)
    if posixpath.dirname(inside) == "examples" and suffix in _EXAMPLES:
        return f"{stem}.md"
    return f"{inside}/README.md" if (ROOT / path).is_dir() else inside
