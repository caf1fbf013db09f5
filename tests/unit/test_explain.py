"""Explanations: what is said of a plan, and the forms in which it is written."""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import pickle
import pickletools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dtrcompile.cli import main
from dtrcompile.explain.build import explain
from dtrcompile.explain.explained import Explained, Fate, ScheduledBuffer
from dtrcompile.explain.explanation import Explanation
from dtrcompile.explain.perfetto import live_bytes
from dtrcompile.passes.errors import OptionError, ProgramError
from dtrcompile.passes.inductor.schedule_trace import Cause, Event, ScheduleTrace
from dtrcompile.passes.planning.planners import make_planner
from dtrcompile.passes.planning.planners.base import keep_all
from dtrcompile.passes.program.host_link import HostLink
from dtrcompile.passes.program.plan import Compute, Plan
from dtrcompile.passes.program.program import Phase, Program, StorageKind
from dtrcompile.passes.program.replay import replay
from dtrcompile.passes.program.sources import Frame, Sources
from dtrcompile.passes.program.tighten import tighten
from workloads.explained import schedule_of, sources_of
from workloads.synthetic import training_chain


@pytest.fixture(scope="module")
def program() -> Program:
    return training_chain(8)


@pytest.fixture(scope="module")
def plan(program: Program) -> Plan:
    default = tighten(program, keep_all(program))
    budget = replay(program, default)[1].peak_bytes * 6 // 10
    plan = make_planner("dtr").plan(program, budget)
    assert replay(program, plan)[1].recomputed
    return plan


@pytest.fixture(scope="module")
def found(program: Program, plan: Plan) -> Explained:
    default = tighten(program, keep_all(program))
    trace = schedule_of(program, plan)
    facts = {"budget": "60%"}
    return explain(program, plan, default, sources_of(program), trace, title="g", facts=facts)


def test_fates_are_those_of_the_plan(program: Program, plan: Plan, found: Explained) -> None:
    _, stats = replay(program, plan)
    runs = {o: n + 1 for o, n in stats.recomputed.items()}
    assert [o.runs for o in found.operators] == [runs.get(o.id, 1) for o in program.operators]
    recomputed = {
        program.tensors[t].storage for o in stats.recomputed for t in program.operators[o].outputs
    }
    assert {i for i, t in enumerate(found.tensors) if t.fate is Fate.RECOMPUTED} == recomputed
    kept = [t for t in found.tensors if t.fate is Fate.KEPT]
    assert kept
    again = [t for t in found.tensors if t.fate is Fate.RECOMPUTED and t.category == "saved"]
    assert sum(t.size_bytes for t in [*kept, *again]) == stats.saved_bytes
    assert all(t.recompute_ns > 0 for t in kept)
    assert sum(a.kept_bytes for a in found.modules) == stats.saved_bytes
    assert sum(a.recompute_ns for a in found.modules) == stats.cost_ns - stats.baseline_cost_ns
    assert sum(a.saved_bytes for a in found.modules) > 0


def test_a_tensor_that_is_copied_to_the_host_and_back(program: Program) -> None:
    default = tighten(program, keep_all(program))
    budget = replay(program, default)[1].peak_bytes * 6 // 10
    plan = make_planner("offload", host_link=HostLink(math.inf)).plan(program, budget)
    found = explain(program, plan, default, sources_of(program))
    copied = [t for t in found.tensors if t.fate is Fate.OFFLOADED]
    assert sum(t.size_bytes for t in copied) == replay(program, plan)[1].offloaded_bytes > 0
    for tensor in copied:
        first, second = tensor.stays
        assert f"over {second.first - first.last - 1} runs" in tensor.why
    assert f"Copied to the host and back: {len(copied)} tensors" in str(Explanation(found))


def test_what_is_live_is_what_the_referee_counts(
    program: Program, plan: Plan, found: Explained
) -> None:
    timeline, stats = replay(program, plan)
    held = live_bytes(found)
    during = [
        n
        for n, step in zip(timeline.during_bytes, plan.steps, strict=True)
        if isinstance(step, Compute)
    ]
    workspaces = [max(0, found.operators[o].workspace_bytes) for o in found.runs]
    totals = [sum(column) for column in zip(*held.values(), strict=True)]
    assert [t + w for t, w in zip(totals, workspaces, strict=True)] == during
    assert found.planned_peak_bytes == stats.peak_bytes == max(during)
    assert during[found.peak_run] == stats.peak_bytes
    at_peak = sum(t.size_bytes for t in found.tensors if t.is_at_peak)
    assert at_peak + workspaces[found.peak_run] == stats.peak_bytes


def test_buffers_are_known_by_their_tensors(program: Program, found: Explained) -> None:
    computed = [b for b in found.buffers if b.cause == Cause.STORAGE.value]
    assert len(computed) >= len(program.operators)
    for buffer in computed:
        assert buffer.tensor is not None
        assert found.tensors[buffer.tensor].operator == buffer.operator
    constants = [b for b in found.buffers if b.cause != Cause.STORAGE.value]
    assert {program.storages[b.tensor].name for b in constants if b.tensor is not None} == {
        s.name for s in program.storages if s.is_constant and s.kind is not StorageKind.TANGENT
    }
    assert sum(b.size_bytes for b in found.at_peak) == found.peak_bytes


def test_text_names_tensors_modules_and_lines(found: Explained) -> None:
    text = Explanation(found).text(rows=4)
    assert text.startswith("g\n  budget  60%\n")
    for part in (
        "At the peak, the compiled code holds",
        "Freed and computed again",
        "Kept from forward to backward",
        "What each module keeps and pays",
        "model.py:1",
        "blocks.0",
        "more",
    ):
        assert part in text
    alone = Explanation(replace(found, buffers=(), moments=0, peak_moment=-1))
    assert "At the peak, the plan holds" in str(alone)


def test_json_is_read_back_whole(found: Explained, tmp_path: Path) -> None:
    explanation = Explanation(found)
    text = explanation.to_json()
    assert Explanation.from_json(text) == explanation
    data = json.loads(text)
    assert data["tensors"][0].keys() >= {"name", "shape", "size_bytes", "fate", "why", "stays"}
    for broken in (text[: len(text) // 2], "{}", "[]", text.replace("explanation 1", "other 2")):
        with pytest.raises(ProgramError, match=r"explanation|format"):
            Explanation.from_json(broken)
    path = tmp_path / "graph0-explanation.json"
    explanation.save(path)
    assert path.read_text(encoding="utf-8") == text


def test_the_page_embeds_all_and_ends_where_it_should(found: Explained) -> None:
    page = Explanation(found).to_html()
    (data,) = re.findall(r'<script type="application/octet-stream" id="data">(.*?)</script>', page)
    columns = json.loads(gzip.decompress(base64.b64decode(data)))
    assert page.count("</script>") == 2
    assert columns["runs"] == list(found.runs)
    assert len(columns["tensors"]["name"]) == len(found.tensors)
    assert len(columns["buffers"]["name"]) == len(found.buffers)
    of_first = columns["tensors"]["module"][-1]
    assert columns["modules"][of_first] == found.tensors[-1].module
    assert any("</script>" in line for stack in columns["stacks"] for line in stack)
    assert not re.search(r"(src|href)=[\"']?https?:", page)


def test_perfetto_has_a_slice_for_each_run(found: Explained) -> None:
    events = json.loads(Explanation(found).to_perfetto())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    counters = [e for e in events if e["ph"] == "C"]
    assert [e["args"]["run"] for e in slices] == list(range(len(found.runs)))
    again = sum(e["cat"] == "computed again" for e in slices)
    assert again == sum(o.runs - 1 for o in found.operators) > 0
    assert len(counters) == len(found.runs)
    ends = [e["ts"] + e["dur"] for e in slices]
    assert [e["ts"] for e in slices[1:]] == pytest.approx(ends[:-1])


def test_a_line_is_named_from_where_its_reader_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here, elsewhere = str(tmp_path / "a" / "model.py"), "/elsewhere/model.py"
    installed = "/usr/lib/python3/site-packages/timm/models/vit.py"
    told = [str(Frame(file, 7, "forward")) for file in (here, elsewhere, installed)]
    assert told == ["a/model.py:7", "/elsewhere/model.py:7", "timm/models/vit.py:7"]


# What the unpickler of PyTorch's memory viewer knows of protocol 4.
_KNOWN_OPCODES = frozenset(
    [
        "PROTO",
        "FRAME",
        "EMPTY_DICT",
        "EMPTY_LIST",
        "EMPTY_TUPLE",
        "MEMOIZE",
        "MARK",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINGET",
        "LONG_BINGET",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
        "SETITEM",
        "SETITEMS",
        "APPEND",
        "APPENDS",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "NEWTRUE",
        "NEWFALSE",
        "NONE",
        "STOP",
    ]
)


@pytest.mark.parametrize("has_schedule", [True, False])
def test_the_snapshot_is_one_of_the_allocator(found: Explained, has_schedule: bool) -> None:
    if not has_schedule:
        found = replace(found, buffers=(), moments=0)
    data = Explanation(found).to_snapshot()
    opcodes = {op.name for op, _, _ in pickletools.genops(io.BytesIO(data))}
    assert opcodes <= _KNOWN_OPCODES
    snapshot = pickle.loads(data)
    (segment,), (trace,) = snapshot["segments"], snapshot["device_traces"]

    # Blocks tile their segment.
    at = segment["address"]
    for block in segment["blocks"]:
        assert block["address"] == at
        at += block["size"]
    assert at == segment["address"] + segment["total_size"]

    # Nothing overlaps; the most that is held is the peak; what is left is in the segment.
    held: dict[int, int] = {}
    peak = 0
    for event in trace:
        if event["action"] == "alloc":
            end = event["addr"] + event["size"]
            assert all(end <= a or a + n <= event["addr"] for a, n in held.items())
            held[event["addr"]] = event["size"]
            assert event["frames"]
        elif event["action"] == "free_requested":
            assert held.pop(event["addr"]) == event["size"]
        peak = max(peak, sum(held.values()))
    active = {b["address"]: b["size"] for b in segment["blocks"] if b["state"] != "inactive"}
    assert held == active
    assert segment["active_size"] == sum(active.values())
    workspace = (
        0 if has_schedule else max(0, found.operators[found.runs[found.peak_run]].workspace_bytes)
    )
    assert peak + workspace == (found.peak_bytes if has_schedule else found.planned_peak_bytes)
    assert "unknown" in {event["category"] for event in trace}


def test_pytorchs_own_reader_opens_the_snapshot(found: Explained) -> None:
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    snapshot = pickle.loads(Explanation(found).to_snapshot())
    (events,) = snapshot["device_traces"]
    assert f"{len(events)} entries" in viewer.trace(snapshot)
    assert viewer.segsum(snapshot)
    assert "MemoryViz" in viewer.trace_plot(snapshot)


def test_files_are_written_by_their_names(found: Explained, tmp_path: Path) -> None:
    explanation = Explanation(found)
    forms = {
        "a.txt": f"{explanation}\n",
        "a.json": explanation.to_json(),
        "a.html": explanation.to_html(),
        "a.perfetto.json": explanation.to_perfetto(),
    }
    for name, content in forms.items():
        explanation.save(tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8") == content
    explanation.save(tmp_path / "a.pickle")
    assert (tmp_path / "a.pickle").read_bytes() == explanation.to_snapshot()
    with pytest.raises(OptionError, match=r"\.html"):
        explanation.save(tmp_path / "a.pdf")
    with pytest.raises(IsADirectoryError):
        (tmp_path / "folder.html").mkdir()
        explanation.save(tmp_path / "folder.html")
    assert {p.name for p in tmp_path.iterdir()} == {*forms, "a.pickle", "folder.html"}


def test_the_command_reads_what_was_left(
    found: Explained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "graph0-explanation.json"
    Explanation(found).save(path)
    assert main(["explain", str(path), "--rows", "3"]) == 0
    assert capsys.readouterr().out == f"{Explanation(found).text(3)}\n"
    page = tmp_path / "page.html"
    assert main(["explain", str(path), "-o", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == Explanation(found).to_html()
    path.write_text("{", encoding="utf-8")
    for arguments in (
        [str(path)],
        [str(tmp_path)],
        [str(tmp_path / "missing.json")],
        [str(path), "-o", str(tmp_path / "a.pdf")],
    ):
        assert main(["explain", *arguments]) == 1
        assert capsys.readouterr().err.count("\n") == 1
    assert {p.name for p in tmp_path.iterdir()} == {path.name, page.name}


def test_a_buffer_that_no_tensor_is() -> None:
    """Of a library's workspace, for example."""
    program = training_chain(2)
    default = tighten(program, keep_all(program))
    trace = ScheduleTrace((Event(64, Cause.WORKSPACE, Phase.FORWARD, 0, 1, "buf0", operator=0),))
    found = explain(program, default, default, Sources((), ()), trace)
    assert found.buffers == (
        ScheduledBuffer("buf0", Cause.WORKSPACE.value, "temporaries", 64, 0, 0, 0, None),
    )
    assert found.operators[0].module == ""
    (events,) = pickle.loads(Explanation(found).to_snapshot())["device_traces"]
    assert events[0]["frames"][0]["filename"] == "buf0 (workspace)"


def test_what_differs_between_two_plans(program: Program, plan: Plan, found: Explained) -> None:
    default = tighten(program, keep_all(program))
    kept = explain(program, default, default, sources_of(program))
    text = Explanation(kept).compared_with(Explanation(found))
    recomputed = [t for t in found.tensors if t.fate is Fate.RECOMPUTED]
    assert recomputed
    for tensor in recomputed:
        before = next(t for t in kept.tensors if t.name == tensor.name)
        assert re.search(rf"{tensor.name} .*{before.fate.value} -> recomputed", text)
    assert f"Other things become of {len(recomputed)} tensors" in text
    computed = sum(isinstance(step, Compute) for step in plan.steps)
    (row,) = (line for line in text.splitlines() if line.startswith("operators run again"))
    assert row.split()[-2:] == ["0", str(computed - len(program.operators))]
    (row,) = (line for line in text.splitlines() if line.startswith("peak of the plan"))
    assert f"{found.planned_peak_bytes / kept.planned_peak_bytes - 1:+.1%}" in row
    same = Explanation(found).compared_with(Explanation(found))
    assert "The same becomes of every tensor." in same
    assert "modules keep" not in same


def test_what_only_one_of_two_programs_has(found: Explained) -> None:
    first, *others = found.tensors
    larger = replace(others[0], size_bytes=others[0].size_bytes + 4096)
    other = replace(found, tensors=(larger, *others[1:]))
    text = Explanation(found).compared_with(Explanation(other))
    assert "1 tensors, " in text and "are in the first alone" in text
    assert "1 tensors have another size" in text
    assert larger.name in text
    assert first.name not in text


def test_the_command_compares_two_files(
    found: Explained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "graph0-explanation.json"
    Explanation(found).save(path)
    assert main(["compare", str(path), str(path)]) == 0
    assert "The same becomes of every tensor." in capsys.readouterr().out
    assert main(["compare", str(path)]) == 1
    assert "two explanation files" in capsys.readouterr().err
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert main(["compare", str(path), str(broken)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", ["page.html", "trace.perfetto.json", "snapshot.pickle", "all.txt"])
def test_on_a_full_disk_nothing_is_half_written(
    found: Explained, tmp_path: Path, name: str
) -> None:
    """A limit on the size of files ends a write in the middle, as a full disk does."""
    source = tmp_path / "graph0-explanation.json"
    Explanation(found).save(source)
    script = (
        "import resource, sys\n"
        "from dtrcompile.cli import main\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-B", "-c", script, "explain", str(source)]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / name)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("dtrcompile: ") and done.stderr.count("\n") == 1
    assert "File too large" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
