"""What is installed: the import name, the entry points, the contents of the wheel."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dtrcompile

ROOT = Path(__file__).resolve().parents[2]


def _run_python(code: str, *, path: str = "", folder: Path = ROOT) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path or os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.fixture(scope="module")
def config() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def test_the_version_stands_in_one_place(config: configparser.ConfigParser) -> None:
    assert config["metadata"]["version"] == "attr: dtrcompile.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", dtrcompile.__version__)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {dtrcompile.__version__}" in changelog


def test_every_exported_name_exists() -> None:
    assert sorted(dtrcompile.__all__) == dtrcompile.__all__
    for name in dtrcompile.__all__:
        assert getattr(dtrcompile, name) is not None


def test_torch_is_not_imported_before_a_graph_is() -> None:
    _run_python(
        "import sys, dtrcompile, dtrcompile.cli, dtrcompile.passes.planning.planners\n"
        "dtrcompile.Options.parse({'budget': '40%', 'planner': 'auto'})\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )


def test_every_directory_with_modules_is_listed(config: configparser.ConfigParser) -> None:
    listed = set(config["options"]["packages"].split())
    found = {"dtrcompile"}
    for folder, name in (
        (ROOT / "dtrcompile", "dtrcompile"),
        (ROOT / "passes", "dtrcompile.passes"),
    ):
        for init in folder.rglob("__init__.py"):
            relative = init.parent.relative_to(folder)
            if relative.parts[:1] != ("passes",):
                found.add(".".join((name, *relative.parts)))
    assert found == listed


def test_the_link_to_the_passes_is_relative() -> None:
    link = ROOT / "dtrcompile" / "passes"
    assert link.is_symlink()
    assert os.readlink(link) == os.path.join("..", "passes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    setuptools = pytest.importorskip("setuptools", reason="builds a wheel without a network")
    if int(setuptools.__version__.split(".")[0]) < 71:
        pytest.importorskip("wheel")
    # A copy, so that nothing is left in the checkout.
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("dtrcompile", "passes"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys\nfrom setuptools import build_meta\nbuild_meta.build_wheel(sys.argv[1])",
            str(out),
        ],
        cwd=source,
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_beside_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"dtrcompile", f"dtrcompile-{dtrcompile.__version__}.dist-info"}
    expected = {
        f"dtrcompile/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / "passes").rglob("*.py")
    }
    expected |= {"dtrcompile/py.typed", "dtrcompile/backend.py", "dtrcompile/demo/run.py"}
    assert expected <= names
    assert not [
        name for name in names if name.startswith(("tests/", "bench/", "workloads/", "passes/"))
    ]


def test_the_wheel_names_the_backend_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
    entry_points = configparser.ConfigParser()
    entry_points.read_string(archive.read(name).decode())
    assert dict(entry_points["torch_dynamo_backends"]) == {"dtr": "dtrcompile.backend:dtr"}
    assert dict(entry_points["console_scripts"]) == {"dtrcompile": "dtrcompile.cli:main"}


@pytest.mark.slow
def test_from_the_wheel_the_backend_is_listed_and_no_module_is_called_passes(
    wheel: Path, tmp_path: Path
) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    here = [str(tmp_path), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    output = _run_python(
        "import torch._dynamo, importlib.util\n"
        "print('dtr' in torch._dynamo.list_backends())\n"
        "from torch._dynamo.backends.registry import lookup_backend\n"
        "print(lookup_backend('dtr').__module__)\n"
        "import dtrcompile; print(dtrcompile.__file__)\n"
        "print(importlib.util.find_spec('passes') is None)\n",
        path=os.pathsep.join(here),
        folder=tmp_path,
    ).splitlines()
    assert output[:2] == ["True", "dtrcompile.backend"]
    assert output[2].startswith(str(tmp_path))
    assert output[3] == "True"
