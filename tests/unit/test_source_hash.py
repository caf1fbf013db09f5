"""The hash that keeps compiled code of another version from being served covers every module."""

from __future__ import annotations

import configparser
from pathlib import Path

from dtrcompile.passes.source_hash import hash_of_folder, python_files

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
    seen = {hash_of_folder(package)}
    for folder in folders:
        (folder / "module.py").write_text("x = 2\n", encoding="utf-8")
        seen.add(hash_of_folder(package))
        (folder / "added.py").write_text("", encoding="utf-8")
        seen.add(hash_of_folder(package))
    assert len(seen) == 1 + 2 * len(folders)
    (package / "notes.txt").write_text("not code", encoding="utf-8")
    assert hash_of_folder(package) in seen
