"""How the page of `Explanation.save` and its snapshot behave in a browser, at 20,000 operators.

    python -m bench.browser --viewer online --out rows.jsonl

The page: its bytes, the seconds until everything on it is drawn, and the milliseconds that each way
to use it takes, from the event to the next painted frame.  The snapshot: whether PyTorch's viewer
opens it, in the page that ``torch.cuda._memory_viz`` makes, and the peak that it shows, once for
the 20,000 operators and once for a model that is compiled.

Needs Playwright (``pip install playwright``) and a Chromium on the path.  The viewer is left out
unless ``--viewer`` says where its files are: ``online``, as the page has it (``MemoryViz.js`` of
PyTorch's repository, D3 of a registry), or a folder with ``MemoryViz.js`` and ``d3.min.js``.  Exits
with 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import dtrcompile
from bench.measure import format_table, machine, say, write_json_line
from dtrcompile.explain.build import explain
from dtrcompile.explain.explanation import Explanation
from dtrcompile.passes.errors import format_bytes
from dtrcompile.passes.planning.planners import keep_all, make_planner
from dtrcompile.passes.program.replay import replay
from dtrcompile.passes.program.tighten import tighten
from workloads.explained import schedule_of, sources_of
from workloads.models import MODELS
from workloads.synthetic import transformer

MOST_PAGE_BYTES = 5_000_000
MOST_LOAD_S = 2.0
MOST_INTERACTION_MS = 100.0

_LAYERS, _QUICK_LAYERS = 910, 10  # 20,020 and 220 operators
_BUDGET_SHARE = 0.6
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_TIMEOUT_MS = 120_000
_ONLINE = "online"

# A frame begins after the handlers have run; what waits behind it runs when the frame was painted.
_TIMED = """
async ([act, argument]) => {
  await new Promise(requestAnimationFrame);
  const start = performance.now();
  (new Function("argument", act))(argument);
  await new Promise(requestAnimationFrame);
  await new Promise(resolve => setTimeout(resolve));
  return [performance.now() - start, performance.now()];
}
"""
_HOVER = """
const [id, share] = argument;
const canvas = document.getElementById(id), box = canvas.getBoundingClientRect();
canvas.dispatchEvent(new MouseEvent("mousemove", {
  bubbles: true, clientX: box.left + 80 + share * (box.width - 90), clientY: box.top + 20}));
"""
_SET = """
const [id, value, event] = argument, control = document.getElementById(id);
control.value = value;
control.dispatchEvent(new Event(event, {bubbles: true}));
"""
_CLICK = "document.querySelectorAll(argument[0])[argument[1]].click()"
_HOVERED = 20  # places in each chart

# Hovers over every tensor that is drawn; the text beneath says what was in use then.
_VIEWER_PEAK = r"""
() => {
  let most = 0;
  for (const polygon of document.querySelectorAll("polygon")) {
    polygon.dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
    const text = [...document.querySelectorAll("pre")].at(-1).textContent;
    const said = /Total memory used after allocation: \S+ \((\d+) bytes\)/.exec(text);
    if (said) most = Math.max(most, Number(said[1]));
  }
  return most;
}
"""

# Draws all tensors, not only the largest.
_VIEWER_DETAIL = """
() => {
  const detail = document.querySelector("input[type=range]");
  detail.value = detail.max;
  detail.dispatchEvent(new Event("change"));
}
"""


def explanation_of_chain(layers: int) -> Explanation:
    """Of a synthetic transformer, its plan and what compiled code would do by that plan."""
    program = transformer(layers)
    default = tighten(program, keep_all(program))
    budget = int(_BUDGET_SHARE * replay(program, default)[1].peak_bytes)
    plan = make_planner("dtr").plan(program, budget)
    trace = schedule_of(program, plan)
    title = f"{len(program.operators):,} operators"
    return Explanation(explain(program, plan, default, sources_of(program), trace, title=title))


def explanation_of_model() -> tuple[Explanation, int]:
    """Of a small GPT that is compiled, and the peak that its report promises."""
    module, inputs = MODELS["gpt_demo"].build(quick=True)
    compiled = torch.compile(module, backend="dtr", options={"budget": "60%"})
    compiled(*inputs).backward()
    (report,) = dtrcompile.reports()
    return report.explain(), report.promised_peak_bytes


def interactions() -> Iterable[tuple[str, str, Sequence[Any]]]:
    """Name, JavaScript and its argument, of each way to use the page."""
    for chart in ("planned", "scheduled"):
        for i in range(_HOVERED):
            yield f"hover over the {chart} chart", _HOVER, (chart, i / _HOVERED)
    for value in ("module1", "module2", "module3", "category"):
        yield "color by module or category", _SET, ("grouping", value, "change")
    for value in ("g", "gelu", "gelu.1", "blocks.7 recomputed", ""):
        yield "search", _SET, ("search", value, "input")
    for value in ("recomputed", "kept", ""):
        yield "choose a fate", _SET, ("fate", value, "change")
    for column in range(6):
        yield "sort the tensors", _CLICK, ("#tensors th", column)
        yield "sort the modules", _CLICK, ("#modules th", column)
    for row in (0, 10):
        yield "choose a tensor", _CLICK, ("#tensors tbody tr", row)


@contextlib.contextmanager
def new_page(browser: Any) -> Iterator[Any]:
    """A page that is closed in the end.

    Raises:
        RuntimeError: if a script on it has failed.
    """
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    if errors:
        raise RuntimeError(f"a script of the page failed: {errors}")


def page_row(browser: Any, path: Path) -> dict[str, Any]:
    """Opens the page and uses it."""
    slowest_ms: dict[str, float] = {}
    with new_page(browser) as page:
        page.goto(path.as_uri())
        page.wait_for_function("document.querySelector('#modules tbody tr')", timeout=_TIMEOUT_MS)
        _, since_opened_ms = page.evaluate(_TIMED, ["", 0])
        load_s = since_opened_ms / 1e3
        for name, act, argument in interactions():
            taken_ms, _ = page.evaluate(_TIMED, [act, list(argument)])
            slowest_ms[name] = max(taken_ms, slowest_ms.get(name, 0.0))
        hovered = page.inner_text("#hover")
    if "holds" not in hovered:
        raise RuntimeError(f"the page does not say what is live: {hovered}")
    return {
        "page_bytes": path.stat().st_size,
        "load_s": load_s,
        "slowest_ms": slowest_ms,
        "holds": path.stat().st_size < MOST_PAGE_BYTES
        and load_s < MOST_LOAD_S
        and max(slowest_ms.values()) < MOST_INTERACTION_MS,
    }


def module_of_d3(viewer: Path) -> str:
    """D3 as a module with the names that the viewer uses."""
    text = (viewer / "MemoryViz.js").read_text(encoding="utf-8")
    names = set(re.findall(r"\bd3\.(\w+)", text))
    for imported in re.findall(r"import \{(.*?)\} from .*d3", text):
        names.update(re.findall(r"\w+", imported))
    exports = "".join(f"export const {name} = globalThis.d3.{name};\n" for name in sorted(names))
    return f"{(viewer / 'd3.min.js').read_text(encoding='utf-8')}\n{exports}"


def serve(route: Any, viewer: Path) -> None:
    """Answers what the viewer's page asks for with files of a folder."""
    is_viewer = route.request.url.endswith("MemoryViz.js")
    text = (viewer / "MemoryViz.js").read_text("utf-8") if is_viewer else module_of_d3(viewer)
    headers = {"Access-Control-Allow-Origin": "*"}
    route.fulfill(body=text, content_type="text/javascript", headers=headers)


def viewer_peak_bytes(browser: Any, snapshot: bytes, path: Path, viewer: str) -> int:
    """What PyTorch's viewer says was in use at most."""
    from torch.cuda import _memory_viz

    path.write_text(_memory_viz.trace_plot(pickle.loads(snapshot)), encoding="utf-8")
    with new_page(browser) as page:
        if viewer != _ONLINE:
            page.route(re.compile("^https?://"), lambda route: serve(route, Path(viewer)))
        page.goto(path.as_uri())
        page.wait_for_selector("polygon", state="attached", timeout=_TIMEOUT_MS)
        page.evaluate(_VIEWER_DETAIL)
        return int(page.evaluate(_VIEWER_PEAK))


def snapshot_row(
    browser: Any, explanation: Explanation, promised_bytes: int, folder: Path, viewer: str
) -> dict[str, Any]:
    """Opens the snapshot in the viewer."""
    snapshot = explanation.to_snapshot()
    shown_bytes = viewer_peak_bytes(browser, snapshot, folder / "viewer.html", viewer)
    return {
        "snapshot_bytes": len(snapshot),
        "promised_peak_bytes": promised_bytes,
        "shown_peak_bytes": shown_bytes,
        "holds": shown_bytes == promised_bytes,
    }


def rows_of(quick: bool, viewer: str | None) -> Iterable[dict[str, Any]]:
    """The page; then, in the viewer, the snapshot of the same and that of a compiled model."""
    from playwright.sync_api import sync_playwright

    large = explanation_of_chain(_QUICK_LAYERS if quick else _LAYERS)
    with (
        tempfile.TemporaryDirectory() as name,
        sync_playwright() as playwright,
        playwright.chromium.launch(
            executable_path=browser_path(), args=["--no-sandbox"]
        ) as browser,
    ):
        folder = Path(name)
        common = {"bench": "browser", "browser": browser.version}
        large.save(folder / "page.html")
        title = large.data.title
        yield {**common, "what": "page", "of": title, **page_row(browser, folder / "page.html")}
        if viewer is None:
            say("the viewer is skipped: --viewer does not say where its files are")
            return
        small, promised_bytes = explanation_of_model()
        for explanation, peak_bytes, of in (
            (large, large.data.peak_bytes, title),
            (small, promised_bytes, "gpt_demo, compiled"),
        ):
            shown = snapshot_row(browser, explanation, peak_bytes, folder, viewer)
            yield {**common, "what": "snapshot", "of": of, **shown}


def browser_path() -> str | None:
    """Of a Chromium on this machine."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """What was found, and the bounds."""
    lines = []
    for row in rows:
        if row["what"] == "page":
            slowest = max(row["slowest_ms"], key=row["slowest_ms"].get)
            measured = f"{row['page_bytes'] / 1e6:.2f} MB, drawn in {row['load_s']:.2f} s, slowest:"
            measured += f" {slowest}, {row['slowest_ms'][slowest]:.0f} ms"
        else:
            measured = f"{format_bytes(row['shown_peak_bytes'])} shown of"
            measured += f" {format_bytes(row['promised_peak_bytes'])} promised"
        lines.append((f"{row['what']} of {row['of']}", "yes" if row["holds"] else "NO", measured))
    print(format_table(("what", "holds", "measured"), lines))


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--viewer", help="online, or a folder with MemoryViz.js and d3.min.js")
    parser.add_argument("--quick", action="store_true", help="a small program")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("playwright") is None or browser_path() is None:
        say("skipped: Playwright (pip install playwright) or Chromium is not installed")
        return 0
    rows = []
    for row in rows_of(args.quick, args.viewer):
        row["machine"] = machine(torch.device("cpu"))
        write_json_line(args.out, row)
        rows.append(row)
    show(rows)
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
