"""The hash that keeps compiled code of another version from being served covers every module."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

from dtrcompile.passes.source_hash import hash_of_folders, python_files

ROOT = Path(__file__).resolve().parents[2]


def test_every_module_of_every_package_is_hashed() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    package = ROOT / "dtrcompile"
    hashed = set(python_files(package))
    for name in config["options"]["packages"].split():
        folder = package.joinpath(*name.split(".")[1:])
        modules = set(folder.glob("*.py"))
        assert modules, name
        assert modules <= hashed, name
    links = {path for path in package.iterdir() if path.is_symlink()}
    for folder in (package, *links):
        assert {folder / p.relative_to(folder) for p in folder.rglob("*.py")} <= hashed


def test_a_change_in_any_folder_changes_the_hash(tmp_path: Path) -> None:
    package, linked = tmp_path / "package", tmp_path / "linked"
    folders = [package, package / "steps", package / "steps" / "inner", linked, linked / "inner"]
    for folder in folders:
        folder.mkdir()
        (folder / "module.py").write_text("x = 1\n", encoding="utf-8")
    (package / "passes").symlink_to(linked, target_is_directory=True)
    seen = {hash_of_folders(package)}
    for folder in folders:
        (folder / "module.py").write_text("x = 2\n", encoding="utf-8")
        seen.add(hash_of_folders(package))
        (folder / "added.py").write_text("", encoding="utf-8")
        seen.add(hash_of_folders(package))
    assert len(seen) == 1 + 2 * len(folders)
    (package / "notes.txt").write_text("not code", encoding="utf-8")
    assert hash_of_folders(package) in seen


def test_the_passes_are_hashed_where_a_checkout_has_no_links(tmp_path: Path) -> None:
    """As pip installs such a checkout: the package and the passes each from a folder of its own."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(
        ROOT / "dtrcompile",
        tmp_path / "dtrcompile",
        symlinks=True,
        ignore=lambda folder, names: {*ignored(folder, names), *({"passes"} & set(names))},
    )
    elsewhere = tmp_path / "elsewhere" / "passes"
    shutil.copytree(ROOT / "passes", elsewhere, ignore=ignored)
    script = f"""
import importlib.util, sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "dtrcompile.passes":
            return importlib.util.spec_from_file_location(
                name,
                {str(elsewhere / "__init__.py")!r},
                submodule_search_locations=[{str(elsewhere)!r}],
            )

sys.meta_path.insert(0, Finder)
sys.path.insert(0, {str(tmp_path)!r})
from dtrcompile.source_hash import package_hash
print(package_hash())
"""

    def seen() -> str:
        return subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    before = seen()
    with (elsewhere / "nodes.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert seen() != before
