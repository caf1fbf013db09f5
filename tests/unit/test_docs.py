"""What the docs say of the code, compared with the code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import dtrcompile
from dtrcompile.options import Options
from dtrcompile.passes import errors
from dtrcompile.passes.planning.heuristics import HEURISTICS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted((ROOT / "docs").rglob("*.md")) + sorted(ROOT.glob("*.md"))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_readme_names_the_two_commands() -> None:
    readme, makefile = read("README.md"), read("Makefile")
    for command in ("demo", "test"):
        assert f"make {command}" in readme
        assert f"\n{command}:" in makefile


def test_the_readme_has_a_row_for_every_option_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `([a-z]\w*)` \| (.+?) \|", read("README.md"), flags=re.MULTILINE))
    assert set(rows) == {f.name for f in fields(Options)}
    for name in ("planner", "cost_model", "compiler"):
        assert rows[name] == f'`"{getattr(Options(), name)}"`'
    assert rows["verify"] == f"`{Options().verify}`"


def test_the_table_of_heuristics_is_that_of_the_code() -> None:
    expected = "".join(
        f"| `{name}` | {heuristic.formula} | {heuristic.source} |\n"
        for name, heuristic in HEURISTICS.items()
    )
    text = read("docs/extending.md")
    table = text.split("<!-- heuristics -->\n")[1].split("<!-- end -->")[0]
    assert table.split("|---|---|---|\n")[1] == expected


def test_every_error_is_described() -> None:
    described = re.findall(r"^## (.+)$", read("docs/errors.md"), flags=re.MULTILINE)
    named = {name for heading in described for name in heading.split(", ")}
    family = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, dtrcompile.DTRError)
    }
    assert family - {"DTRError"} <= named


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_examples_are_python(path: Path) -> None:
    for example in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
        compile(example.replace("    ...\n", ""), path.name, "exec")


def test_every_example_has_a_row() -> None:
    text = read("docs/examples/README.md")
    rows = re.findall(r"^(?:\| )?\[(\w+\.(?:py|ipynb))\]", text, flags=re.MULTILINE)
    examples = {p.name for p in (ROOT / "docs/examples").iterdir() if p.suffix in (".py", ".ipynb")}
    assert sorted(rows) == sorted(examples)


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {dtrcompile.__version__}\n" in read("CITATION.cff")
