"""What differs between two releases of PyTorch in the functions that dtrcompile builds on.

    python -m bench.releases [--quick] [FOLDER [FOLDER]]
    python -m bench.releases .cache/venv-2.15.0 .cache/venv-2.16.0

Each FOLDER is a virtual environment or a ``site-packages``; left out, it is that of the torch which
runs this.  Printed are the differences between the sources of all functions that are replaced,
wrapped or followed step by step, annotations and comments aside; nothing is imported.
``docs/releases.md`` says what was found so.  ``--quick`` looks only whether they are all there.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
from pathlib import Path

import torch

# Replaced or wrapped while a graph is lowered (the modules of `passes.inductor`).
REPLACED = (
    "_inductor/choices.py:InductorChoices.can_fuse_horizontal",
    "_inductor/choices.py:InductorChoices.can_fuse_vertical",
    "_inductor/codegen/cpp.py:CppScheduling.ready_to_flush",
    "_inductor/codegen/wrapper.py:AllocateLine.should_reuse_buffer",
    "_inductor/graph.py:GraphLowering.compile_to_module",
    "_inductor/graph.py:GraphLowering.decide_layout_opt",
    "_inductor/graph.py:GraphLowering.find_nodes_prefer_channels_last",
    "_inductor/graph.py:GraphLowering.run_node",
    "_inductor/loop_body.py:LoopBody.bounds",
    "_inductor/pattern_matcher.py:is_match",
    "_inductor/scheduler.py:SchedulerNode.codegen",
    "_inductor/scheduler.py:SchedulerNode.recompute_size_and_body",
    "_inductor/sizevars.py,_inductor/codegen/cpp.py:stride_at_vec_range",  # (moved in 2.13)
)
# Done again, or relied on to be done so (inductor, schedule, emit, backend).
FOLLOWED = (
    "_dynamo/cache_size.py:exceeds_recompile_limit",
    "_dynamo/convert_frame.py:_compile",
    "_dynamo/utils.py:get_hook_for_recompile_user_context",
    "_functorch/_aot_autograd/graph_compile.py:collect_fw_donated_buffer_idxs",
    "_functorch/partitioners.py:_extract_fwd_bwd_modules",
    "_functorch/partitioners.py:min_cut_rematerialization_partition",
    "_inductor/codegen/wrapper.py:AllocateLine.plan",
    "_inductor/codegen/wrapper.py:FreeIfNotReusedLine.plan",
    "_inductor/codegen/wrapper.py:PythonWrapperCodegen.memory_plan_reuse",
    "_inductor/codegen/wrapper.py:PythonWrapperCodegen.write_header",
    "_inductor/compile_fx.py:_InProcessFxCompile.codegen_and_compile",
    "_inductor/compile_fx.py:compile_fx",
    "_inductor/compile_fx.py:compile_fx_backward",
    "_inductor/compile_fx.py:compile_fx_forward",
    "_inductor/compile_fx.py:get_input_idxs_to_check",
    "_inductor/compile_fx.py:partition_fn",
    "_inductor/custom_graph_pass.py:CustomPartitionerFn",
    "_inductor/fx_passes/post_grad.py:post_grad_passes",
    "_inductor/graph.py:GraphLowering._compile_to_module_lines",
    "_inductor/scheduler.py:Scheduler._init",
    "_inductor/utils.py:count_tangents",
)


def packages_of(folder: Path) -> Path:
    """The ``site-packages`` of a virtual environment, or the folder itself."""
    found = sorted(folder.glob("lib/python*/site-packages"))
    return found[0] if found else folder


def source_of(packages: Path, name: str) -> list[str]:
    """The lines of a function or class, such as ``_inductor/graph.py:GraphLowering.run_node``.

    Without comments, docstrings and annotations, which releases change often and freely; empty if
    the release has no such thing in any of the files.
    """
    files, _, qualified = name.partition(":")
    for path in (packages / "torch" / file for file in files.split(",")):
        if path.exists():
            found: ast.AST | None = ast.parse(path.read_text(encoding="utf-8"))
            for part in qualified.split("."):
                found = found and _definition(found, part)
            if found is not None:
                return ast.unparse(_Plain().visit(found)).splitlines()
    return []


def _definition(scope: ast.AST, name: str) -> ast.AST | None:
    for child in ast.walk(scope):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)) and child.name == name:
            return child
    return None


class _Plain(ast.NodeTransformer):
    """Drops docstrings and annotations."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if node.value is None or not node.simple:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only look whether all are there")
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    arguments = parser.parse_args(argv)
    here = Path(torch.__file__).parents[1]
    first, second, *more = [*map(packages_of, arguments.folders), here, here]
    if len(more) > 2:
        parser.error("at most two folders can be compared")
    missing = differing = 0
    for name in (*REPLACED, *FOLLOWED):
        before, after = source_of(first, name), source_of(second, name)
        if not (before and after):
            missing += 1
            print(f"{name}: there is none in {second if before else first}")
        elif before != after:
            differing += 1
            if not arguments.quick:
                print(f"=== {name}")
                difference = difflib.unified_diff(before, after, n=3, lineterm="")
                print("\n".join(list(difference)[2:]))
    print(f"{differing} differ, {missing} are missing, of {len(REPLACED) + len(FOLLOWED)}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
