"""The documentation as a site: what users ask is one click away, and its pages say what is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtrcompile

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

# A question -> the page and the heading that answer it.
QUESTIONS = {
    "What happens at evaluation?": ("evaluation-and-shapes.md", "What happens at evaluation?"),
    "What happens with the last, shorter batch?": (
        "evaluation-and-shapes.md",
        "What happens with the last batch?",
    ),
    "How do I know that the whole model is inside the budget?": (
        "what-counts.md",
        "How do I know that the whole model is inside the budget?",
    ),
    "Does `reserve` include the gradients?": (
        "choosing-a-budget.md",
        "Does `reserve` include the gradients?",
    ),
    "What is the sum for a model of 7 billion parameters with Adam on 24 GB?": (
        "choosing-a-budget.md",
        "A model of 7 billion parameters with Adam on 24 GB",
    ),
    "How is a custom operator declared pure?": ("outside.md", "Custom operators"),
    "Do I pay compile time in each process and rank?": (
        "compile-time.md",
        "Do I pay compile time in each process and rank?",
    ),
    "What if CUDA is out of memory outside of the step?": (
        "what-counts.md",
        "What if CUDA is out of memory outside of the step?",
    ),
}


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def anchor(heading: str) -> str:
    """Of a heading, as GitHub and the site have it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def headings(name: str) -> dict[str, str]:
    """Those of a page -> what stands below each, up to the next one."""
    parts = re.split(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", read(name), flags=re.DOTALL), flags=re.M
    )
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_one_click_from_the_first_page(question: str) -> None:
    page, heading = QUESTIONS[question]
    (row,) = [line for line in read("index.md").splitlines() if line.startswith(f"| {question} |")]
    assert f"]({page}#{anchor(heading)})" in row
    assert len(headings(page)[heading].split()) > 40


def test_the_words_that_answer_are_there() -> None:
    assert "pure=True" in read("outside.md").split("## Custom operators")[1]
    sums = headings("choosing-a-budget.md")["A model of 7 billion parameters with Adam on 24 GB"]
    assert "do not fit" in sums
    assert headings("choosing-a-budget.md")["Does `reserve` include the gradients?"].strip()[
        :3
    ] == ("No,")


def test_the_first_page_has_the_figures_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [
        line for line in readme.splitlines() if line.startswith(("| none |", "| 40 %", "| min |"))
    ]
    assert len(rows) == 3
    for row in rows:
        assert row in read("index.md")


def test_the_reference_has_every_public_name_once() -> None:
    named = re.findall(r"^::: dtrcompile\.(\w+)$", read("reference.md"), flags=re.MULTILINE)
    assert sorted(named) == sorted(dtrcompile.__all__)


def strings() -> Iterator[str]:
    """The texts of the package: of an f-string, what is fixed, with an ellipsis for the rest."""
    for folder in ("dtrcompile", "passes"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
                elif isinstance(node, ast.JoinedStr):
                    parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                    yield "".join(map(str, parts))


def test_the_messages_of_the_table_are_those_of_the_package() -> None:
    ours, _ = read("troubleshooting.md").split("## Messages of others")
    messages = re.findall(r"^\| ((?:… )?`.+?) \| ", ours, flags=re.MULTILINE)
    assert len(messages) > 20
    known = list(strings())
    for message in messages:
        for words in re.findall(r"`([^`]+)`", message):
            assert any(words in text for text in known), f"no message says {words!r}"


def test_nothing_comes_from_another_host() -> None:
    """Fonts, scripts and styles: what a page needs to be shown."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "\n  font: false\n" in settings
    files = [*DOCS.rglob("*.js"), *DOCS.rglob("*.css"), ROOT / "mkdocs.yml"]
    for path in files:
        assert "//" not in re.sub(r"(?m)^\s*//.*|\s// .*|^#.*", "", path.read_text("utf-8")), path
    for page in DOCS.rglob("*.md"):
        assert not re.search(r"<(script|link|img|iframe)\b", page.read_text("utf-8")), page
