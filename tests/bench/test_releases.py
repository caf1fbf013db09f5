"""What `bench.releases` compares is there, and what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import releases


@pytest.mark.parametrize("name", [*releases.REPLACED, *releases.FOLLOWED])
def test_what_is_replaced_or_followed_is_there(name: str) -> None:
    assert releases.source_of(Path(torch.__file__).parents[1], name)


def test_differences_between_releases_are_printed_without_what_does_not_matter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = (
        "def is_match(v):\n    return bool(v)\n",
        'def is_match(v: object) -> bool:\n    """Said."""\n    # Why.\n    return bool(v)\n',
        "def is_match(v):\n    return v is not None\n",
    )
    folders = []
    for number, source in enumerate(sources):
        packages = tmp_path / str(number) / "lib" / "python3.11" / "site-packages"
        (packages / "torch" / "_inductor").mkdir(parents=True)
        (packages / "torch" / "_inductor" / "pattern_matcher.py").write_text(source)
        folders.append(str(tmp_path / str(number)))
    releases.main(folders[:2])
    assert "=== " not in capsys.readouterr().out
    releases.main(folders[1:])
    output = capsys.readouterr().out
    assert "=== _inductor/pattern_matcher.py:is_match" in output
    assert "+    return v is not None" in output
    assert "1 differ" in output
