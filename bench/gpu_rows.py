"""The rows of `bench.gpu`: a file that a later run goes on with, and what each part comes to.

A row is one line of JSON: its part, its settings and its name, which together no two rows of a
machine share, what was found, and the machine.  A row counts as measured if the device, the
releases of torch and CUDA, the source of the package and all settings are the same.
"""

from __future__ import annotations

import json
import math
import platform
import re
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.elsewhere import is_as_told
from bench.measure import write_json_line
from dtrcompile.source_hash import package_hash

SMALLEST = "smallest"
"""In place of a rival: the smallest peaks are compared, not times at an equal one."""
PARTS = ("promise", "tests", "rivals", "largest", "compile", "costs")
"""In the order of their worth."""

ROOT = Path(__file__).resolve().parents[1]
# What a row is valid for; the rest of a machine's description is for the reader.
_SAME = ("device", "torch", "cuda", "source")
# Plain torch.compile's error, times this, is what a gradient may be off; below the floor, two runs
# of the same code in float32 differ as much.
ERROR_RATIO, ERROR_FLOOR = 1.5, 1e-6


def machine(device: str) -> dict[str, Any]:
    """What rows are measured on.

    Args:
        device: the name of the GPU, or what stands in its place.
    """
    return {
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "source": package_hash(),
        "commit": _told_by("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "driver": _told_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _told_by(*command: str) -> str:
    """The first line that a command prints; empty where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.partition("\n")[0] if done.returncode == 0 else ""


@dataclass(frozen=True)
class Row:
    """One thing that was measured.

    Attributes:
        settings: what the rows of one process share: model, dtype, the allocator's settings.
        name: of the row among those of its process, such as a budget.
        found: what was measured; its ``"status"`` is "ok", "refused", "out of memory", "failed",
            "crashed", "stuck" or "skipped", and ``"reason"`` says why.
    """

    part: str
    settings: Mapping[str, Any]
    name: str
    found: Mapping[str, Any]
    machine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        return str(self.found.get("status", "ok"))

    @property
    def title(self) -> str:
        """Names the row in a line that is read by people."""
        simple = [str(v) for v in self.settings.values() if not isinstance(v, Mapping)]
        return " ".join([*simple, self.name])

    def identity(self) -> str:
        """What no two rows share."""
        rest = json.dumps([self.part, self.settings, self.name], sort_keys=True)
        return identity_of_machine(self.machine) + rest


def identity_of_machine(machine: Mapping[str, Any]) -> str:
    """What rows share that are valid for one another, and judged together."""
    return json.dumps({name: machine.get(name) for name in _SAME}, sort_keys=True)


class RowFile:
    """Rows on disk, each written as soon as it is known.

    Args:
        path: a file of JSON lines, which need not exist.
        machine: what new rows are measured on.
    """

    def __init__(self, path: Path, machine: Mapping[str, Any]) -> None:
        self.path, self.machine = path, dict(machine)
        self._lock = threading.Lock()
        self._rows = {row.identity(): row for row in read(path)}

    def add(self, row: Row) -> None:
        """Keep a row of this machine; one of the same settings and name is replaced."""
        row = Row(row.part, row.settings, row.name, row.found, self.machine)
        record = {
            "bench": "gpu",
            "part": row.part,
            "settings": row.settings,
            "name": row.name,
            "found": row.found,
            "machine": row.machine,
        }
        with self._lock:
            self._rows[row.identity()] = row
            write_json_line(self.path, _plain(record))

    def rows(self, part: str) -> list[Row]:
        """Those of a part that are valid for this machine."""
        with self._lock:
            found = list(self._rows.values())
        own = identity_of_machine(self.machine)
        return [
            row for row in found if row.part == part and identity_of_machine(row.machine) == own
        ]

    def names(self, part: str, settings: Mapping[str, Any], *, retry: bool = False) -> set[str]:
        """The names of the rows that need not be measured again.

        Args:
            retry: rows that failed, crashed or got stuck are to be measured again.
        """
        return {
            row.name
            for row in self.rows(part)
            if row.settings == settings
            and row.found.get("is_final", True)
            and not (retry and row.status in _BROKEN)
        }


_BROKEN = ("failed", "crashed", "stuck")


def read(path: Path) -> list[Row]:
    """The rows of a file, without what a killed process left of a line; none if there is none."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("bench") == "gpu":
            names = ("part", "settings", "name", "found", "machine")
            rows.append(Row(*(record[name] for name in names)))
    return rows


def file_name(device: str) -> str:
    """Of the rows of a device, such as ``gpu-nvidia-h100-80gb-hbm3.jsonl``."""
    return f"gpu-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.jsonl"


def _plain(value: Any) -> Any:
    """Only what JSON can say: a number that is not finite becomes its name."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# --- verdicts -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What a part comes to.

    Attributes:
        text: one line.
        broken: what may not be, one line each.
    """

    text: str
    broken: tuple[str, ...] = ()


def verdict(part: str, rows: Sequence[Row]) -> Verdict:
    """What the rows of a part say."""
    if not rows:
        return Verdict("nothing was measured")
    return _VERDICTS[part](rows)


def _promise(rows: Sequence[Row]) -> Verdict:
    """Whether every step stayed within its budget and its promise, with the right gradients."""
    ours = [row for row in rows if row.found.get("method") == "dtr"]
    broken = _broken(rows, ("dtr", "process", "forecast"))
    if not ours:
        planned = [row for row in rows if row.found.get("method") == "forecast"]
        text = f"{len(planned)} steps planned for a GPU that is not used"
        return Verdict(text, (*broken, *_over(planned)))
    trained = [row for row in ours if row.status == "ok"]
    over = _over(trained)
    ratios = [ratio for row in trained if (ratio := _error_ratio(row, rows)) is not None]
    told = _told_pairs(rows)
    differing = [row for row, forecast in told if not _is_as_told(row, forecast)]
    text = (
        f"{len(trained) - len(over)} of {len(trained)} steps within their budgets,"
        f" {len(ours) - len(trained)} not trained,"
        f" promise minus measured {_slacks(trained)},"
        f" gradient error at most {max(ratios, default=math.nan):.2f} x torch.compile's,"
        f" {len(told) - len(differing)} of {len(told)} as told without the device"
    )
    broken += over
    broken += [f"{row.title}: {off}" for row in trained if (off := _off(row, rows))]
    broken += [f"{row.title}: not as it was told without the device" for row in differing]
    return Verdict(text, tuple(broken))


def _slacks(rows: Sequence[Row]) -> str:
    """By how much of its peak a step held less than was promised, by the allocator's settings."""
    shares: dict[str, list[float]] = {}
    for row in rows:
        promised, peak = row.found.get("promised_bytes"), row.found.get("peak_bytes")
        if promised is not None and peak is not None:
            of = shares.setdefault(str(row.settings.get("allocator", "")), [])
            of.append((promised - peak) / peak)
    said = [f"{_span(of, '{:.2%}'.format)} {name}".rstrip() for name, of in shares.items()]
    return " and ".join(said) or "unknown"


def _over(rows: Iterable[Row]) -> list[str]:
    """Steps that hold more than their budget, or at the minimum than was promised."""
    found = []
    for row in rows:
        limit, peak = row.found.get("budget_bytes"), row.found.get("peak_bytes")
        if limit is None:
            limit = row.found.get("promised_bytes")
        if limit is not None and peak is not None and peak > limit:
            found.append(f"{row.title}: {peak - limit} bytes over {limit}")
    return found


def _broken(rows: Iterable[Row], methods: Iterable[str]) -> list[str]:
    """What did not run and should have."""
    return [
        f"{row.title}: {row.status}: {row.found.get('reason', '')}"
        for row in rows
        if row.status in _BROKEN and row.found.get("method", "process") in methods
    ]


def _of_same(row: Row, rows: Iterable[Row], method: str) -> Row | None:
    """The row of another method with the same settings."""
    for other in rows:
        if other.settings == row.settings and other.found.get("method") == method:
            return other
    return None


def _error_ratio(row: Row, rows: Iterable[Row]) -> float | None:
    """The gradient's error over plain torch.compile's; 0 where nobody could tell it from that."""
    plain = _of_same(row, rows, "compile")
    error = row.found.get("gradient_error")
    if plain is None or error is None or plain.found.get("gradient_error") is None:
        return None
    ours, theirs = float(error), float(plain.found["gradient_error"])
    if ours <= ERROR_FLOOR:
        return 0.0
    return ours / theirs if theirs else math.inf


def _off(row: Row, rows: Iterable[Row]) -> str:
    ratio = _error_ratio(row, rows)
    # (An error that is no number is not at most anything.)
    if ratio is None or ratio <= ERROR_RATIO:
        return ""
    return f"gradient error {ratio:.2f} x torch.compile's"


def _told_pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Rows of dtr, each with what was told of it without the device."""
    told = {
        (json.dumps(row.settings, sort_keys=True), row.found["setting"]): row
        for row in rows
        if row.found.get("method") == "forecast" and row.status in ("ok", "refused")
    }
    pairs = []
    for row in rows:
        if row.found.get("method") == "dtr" and row.status in ("ok", "refused"):
            settings = json.dumps(row.settings, sort_keys=True)
            forecast = told.get((settings, row.found["setting"]))
            if forecast is not None:
                pairs.append((row, forecast))
    return pairs


def _is_as_told(row: Row, forecast: Row) -> bool:
    if row.status == "refused":
        found = {"fits": False, "peak_bytes": row.found["minimum_bytes"]}
    else:
        found = {
            "fits": True,
            "peak_bytes": row.found["promised_bytes"],
            "baseline_peak_bytes": row.found["baseline_bytes"],
        }
    return is_as_told(forecast.found["told"], found)


def _tests(rows: Sequence[Row]) -> Verdict:
    counts = dict.fromkeys(("ok", "failed", "crashed", "stuck", "skipped"), 0)
    tests = [row for row in rows if row.found.get("method") == "test"]
    for row in tests:
        counts[row.status] += 1
    reasons = {row.found["reason"] for row in rows if row.status == "skipped"}
    text = ", ".join(f"{n} {status}" for status, n in counts.items() if n) or "none ran"
    said = f" ({'; '.join(sorted(reasons))})" if reasons else ""
    return Verdict(text + said, tuple(_broken(rows, ("test", "process"))))


def _rivals(rows: Sequence[Row]) -> Verdict:
    """Our step over a rival's, at that one's peak or below, and our smallest peak over theirs."""
    ratios: dict[str, list[float]] = {}
    smallest: list[float] = []
    ours = [row for row in rows if row.found.get("method") == "dtr"]
    for row in ours:
        rival = str(row.settings["rival"])
        is_smallest = rival == SMALLEST
        other = _of_same(row, rows, "memory_budget" if is_smallest else rival.split()[0])
        if other is None:
            continue
        measure = "peak_bytes" if is_smallest else "step_s"
        mine, theirs = row.found.get(measure), other.found.get(measure)
        if mine and theirs:
            setting = str(row.found["setting"])
            found = smallest if is_smallest else ratios.setdefault(setting, [])
            found.append(mine / theirs)
    said = [f"{setting} {_span(of, '{:.3f}'.format)}" for setting, of in ratios.items()]
    text = "our step over theirs, with the peak: " + (", ".join(said) or "none was timed")
    if smallest:
        text += f"; our smallest peak over theirs {_span(smallest, '{:.3f}'.format)}"
    return Verdict(text, (*_broken(rows, ("dtr",)), *_over(r for r in ours if r.status == "ok")))


def _largest(rows: Sequence[Row]) -> Verdict:
    """Batches of ours over those of plain torch.compile and of checkpointed blocks."""
    sizes: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if row.status == "ok":
            sizes.setdefault(row.name, {})[str(row.settings["method"])] = row.found
    said = []
    for size, methods in sizes.items():
        cells = [
            f"{method} {found['batch']} at {found['samples_per_s']:.1f} samples/s"
            for method, found in methods.items()
        ]
        said.append(f"{size}: {', '.join(cells)}")
    broken = [text for row in rows if row.settings["method"] == "dtr" for text in _failure(row)]
    return Verdict("; ".join(said) or "none trained", tuple(broken))


def _failure(row: Row) -> list[str]:
    return _broken([row], (str(row.found.get("method", "process")),))


def _compile(rows: Sequence[Row]) -> Verdict:
    """First steps over those of plain torch.compile, with the same caches."""
    first = {
        (row.settings["model"], row.name, row.settings["budget"]): row.found["first_step_s"]
        for row in rows
        if row.status == "ok"
    }
    ratios: dict[str, list[float]] = {}
    for (model, process, budget), seconds in first.items():
        plain = first.get((model, process, "plain"))
        if budget != "plain" and plain:
            ratios.setdefault(process, []).append(seconds / plain)
    said = [f"{process} {_span(of, '{:.2f}'.format)}" for process, of in ratios.items()]
    text = "first step over torch.compile's: " + (", ".join(said) or "none was timed")
    return Verdict(text, tuple(text for row in rows for text in _failure(row)))


def _costs(rows: Sequence[Row]) -> Verdict:
    """How well the roofline sorts operators, and which it misjudges most."""
    priced = [row for row in rows if row.status == "ok"]
    modelled = [float(row.found["modelled_ns"]) for row in priced]
    measured = [float(row.found["measured_ns"]) for row in priced]
    ratios = [ours / theirs for ours, theirs in zip(modelled, measured, strict=True)]
    usual = statistics.median(ratios) if ratios else math.nan
    off = [(ratio / usual, row.name) for ratio, row in zip(ratios, priced, strict=True)]
    off.sort(key=lambda pair: abs(math.log(pair[0])), reverse=True)
    worst = [f"{name} {ratio:.2f}" for ratio, name in off[:3]]
    text = (
        f"rank correlation {rank_correlation(modelled, measured):.3f} over {len(priced)} operators;"
        f" modelled over measured, as a share of the median {usual:.2f}, is worst for"
        f" {', '.join(worst)}"
    )
    return Verdict(text, tuple(text for row in rows for text in _failure(row)))


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: Pearson's of the ranks; equal values share the mean of theirs."""
    if len(a) < 2:
        return math.nan
    ranks = torch.tensor([_ranks(a), _ranks(b)], dtype=torch.float64)
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values
    ]


def _span(values: Sequence[Any], text_of: Callable[[Any], str]) -> str:
    if not values:
        return "unknown"
    low, high = text_of(min(values)), text_of(max(values))
    return low if low == high else f"{low} to {high}"


_VERDICTS: Mapping[str, Callable[[Sequence[Row]], Verdict]] = {
    "promise": _promise,
    "tests": _tests,
    "rivals": _rivals,
    "largest": _largest,
    "compile": _compile,
    "costs": _costs,
}
