"""`docs/layout.md` is what the code is: which modules there are, and which may import which."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
PASSES = "dtrcompile.passes."


def layers() -> dict[str, tuple[int, bool]]:
    """Folder or module of ``passes`` -> its line, counted from below, and whether torch may be."""
    (block,) = re.findall(r"```layers\n(.*?)```", LAYOUT, re.DOTALL)
    lines = block.strip().splitlines()[::-1]
    return {line.split()[0]: (i, "(no torch)" not in line) for i, line in enumerate(lines)}


LAYERS = layers()


def rooms() -> dict[str, int]:
    """Folder or module of ``dtrcompile`` -> its line, counted from below."""
    (block,) = re.findall(r"```rooms\n(.*?)```", LAYOUT, re.DOTALL)
    return {line.split()[0]: i for i, line in enumerate(block.strip().splitlines()[::-1])}


ROOMS = rooms()


def listed_modules() -> set[str]:
    """Paths of the modules of ``dtrcompile`` in the tree at the top of the page."""
    (block,) = re.findall(r"```\ndtrcompile/.*?\n(.*?)```", LAYOUT, re.DOTALL)
    found, folder = set(), ""
    for indent, name in re.findall(r"^( +)(\w+(?:/|\.py)) ", block, re.MULTILINE):
        if name.endswith("/"):
            folder = name
        else:
            found.add(name if len(indent) == 2 else folder + name)
    return found


def modules() -> dict[str, Path]:
    """All of the package, by their names."""
    found = {}
    for folder, package in ((ROOT / "passes", "dtrcompile.passes"), (ROOT / "dtrcompile", "")):
        for path in folder.rglob("*.py"):
            relative = path.relative_to(folder if package else ROOT)
            if not package and relative.parts[1] == "passes":
                continue
            name = ".".join((*([package] if package else []), *relative.with_suffix("").parts))
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


@cache
def imports_of(name: str) -> frozenset[str]:
    """What a module imports, wherever it does: modules of the package, or the names of others."""

    def found() -> Iterator[str]:
        for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in MODULES else node.module

    return frozenset(found())


def imports_when_loaded(name: str) -> set[str]:
    """Without those of functions and for annotations."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(MODULES[name].read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                inner if (inner := f"{node.module}.{alias.name}") in MODULES else node.module
                for alias in node.names
            }
        waiting += ast.iter_child_nodes(node)
    return found


def folders() -> dict[str, set[str]]:
    """Top-level folder, or one of its own -> the folders it may import from."""
    (block,) = re.findall(r"```folders\n(.*?)```", LAYOUT, re.DOTALL)
    return {line.split()[0]: set(line.split()[1:]) for line in block.strip().splitlines()}


FOLDERS = folders()


def layer(name: str) -> int | None:
    """Of a module of ``passes``; None for others."""
    head, found, rest = name.partition(PASSES)
    return LAYERS[rest.split(".")[0]][0] if found and not head else None


def room(name: str) -> str:
    """Of a module of the package."""
    return name.split(".")[1] if "." in name else "__init__"


OWN = sorted(m for m in MODULES if room(m) != "passes")


def test_every_room_has_a_line() -> None:
    top = {p.stem for p in (ROOT / "dtrcompile").iterdir() if p.suffix == ".py" or p.is_dir()}
    assert top - {"__pycache__"} == ROOMS.keys()


def test_every_module_beside_the_passes_is_listed() -> None:
    found = {MODULES[m].relative_to(ROOT / "dtrcompile").as_posix() for m in OWN}
    assert listed_modules() == {path for path in found if not path.endswith("__init__.py")}


@pytest.mark.parametrize("name", OWN)
def test_no_room_imports_from_a_line_above(name: str) -> None:
    for imported in imports_of(name) & MODULES.keys():
        assert ROOMS[room(imported)] <= ROOMS[room(name)], f"{name} imports {imported}, from above"


def test_no_modules_beside_the_passes_need_one_another_in_a_circle() -> None:
    """Not even inside of functions, or for annotations alone."""
    refuse_circles(OWN, imports_of, OWN)


def test_a_circle_is_found() -> None:
    imports = {"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"b"})}
    with pytest.raises(AssertionError, match="b imports c imports b"):
        refuse_circles(["a"], imports.__getitem__, imports.keys())


def test_every_folder_has_a_line() -> None:
    top = {p.stem for p in (ROOT / "passes").iterdir() if p.suffix == ".py" or p.is_dir()}
    assert top - {"__init__", "__pycache__"} == LAYERS.keys()


def test_every_module_is_listed() -> None:
    listed = set(re.findall(r"^\| `(?!workloads/)(\w+/\w+)/?` \|", LAYOUT, re.MULTILINE))
    found = {
        f"{path.parent.name}/{path.stem}"
        for path in (ROOT / "passes").glob("*/*.py")
        if path.stem != "__init__"
    }
    assert listed == found | {"planning/planners"}


@pytest.mark.parametrize("name", sorted(m for m in MODULES if m.startswith(PASSES)))
def test_nothing_is_imported_from_above(name: str) -> None:
    own = layer(name)
    assert own is not None
    for imported in imports_of(name):
        if not imported.startswith("dtrcompile"):
            continue
        assert imported.startswith(PASSES), f"{name} imports {imported}, outside of the passes"
        its = layer(imported)
        assert its is not None and its <= own, f"{name} imports {imported}, from above"


@pytest.mark.parametrize(
    "name", sorted(m for m in MODULES if m.startswith(PASSES) and not LAYERS[m.split(".")[2]][1])
)
def test_torch_is_not_imported_at_any_remove(name: str) -> None:
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        module = waiting.pop()
        for imported in imports_of(module) - seen:
            assert imported.split(".")[0] != "torch", f"{module} imports {imported}"
            seen.add(imported)
            if imported in MODULES:
                waiting.append(imported)


def test_every_folder_with_modules_has_a_line() -> None:
    found = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("[!.]*/**/*.py")}
    assert found - {"build", "dist"} == {folder for folder in FOLDERS if "/" not in folder}


def test_what_is_shared_is_listed() -> None:
    listed = set(re.findall(r"^\| `workloads/(\w+)` \|", LAYOUT, re.MULTILINE))
    assert listed == {path.stem for path in (ROOT / "workloads").glob("[!_]*.py")}


@pytest.mark.parametrize("folder", FOLDERS)
def test_tests_and_benchmarks_share_what_is_in_workloads_only(folder: str) -> None:
    inner = [ROOT / f for f in FOLDERS if f.startswith(f"{folder}/")]
    tops = {f for f in FOLDERS if "/" not in f}
    paths = [
        path
        for path in (ROOT / folder).rglob("*.py")
        if not any(path.is_relative_to(other) for other in inner)
    ]
    assert paths
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path} has a relative import"
                names = [node.module or ""]
            imported = {name.split(".")[0] for name in names} & tops
            assert imported <= FOLDERS[folder], f"{path.relative_to(ROOT)} imports {imported}"


def refuse_circles(
    names: Iterable[str],
    imports: Callable[[str], Collection[str]],
    modules: Collection[str] = MODULES.keys(),
) -> None:
    """Fails if following imports from any of these modules leads back to where it has been."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " imports ".join([*path[path.index(name) :], name])
        if name in done:
            return
        for imported in sorted(set(imports(name)) & set(modules)):
            if imported != name:
                visit(imported, (*path, name))
        done.add(name)

    for name in names:
        visit(name, ())


def test_no_modules_import_one_another_in_a_circle() -> None:
    """When they are loaded: a circle then depends on who is imported first."""
    refuse_circles(MODULES, imports_when_loaded)
