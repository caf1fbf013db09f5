"""The rows of `bench.rivals`: one method at one setting; tables, summaries and pictures of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What the promise may be off, as a share of the unbudgeted peak, before it is counted.
PROMISE_TOLERANCE = 0.02
_MIB = 2**20

HEADER = (
    "model",
    "method",
    "setting",
    "status",
    "peak MiB",
    "reserved",
    "budget",
    "promised",
    "step ms",
    "x compile",
    "first step s",
    "planning s",
    "gradient error",
)


@dataclass
class Row:
    """One model trained one step by one method at one setting.

    Attributes:
        method: one of `bench.rivals.METHODS`.
        setting: of the method: its budget; "" where there is none.
        status: "ok", "refused" (`InfeasibleBudgetError`), "out of memory" or "failed".
        reason: of a status that is not "ok", in one line.
        process: a name of the process that measured it; "" in rows from before there was one.
        peak_bytes: parameters, buffers and inputs plus the most that the allocator handed out
            above what was live when the step began.
        reserved_bytes: on CUDA, the most that the allocator held, fragments included, in the same
            count.
        requested_bytes: on CUDA, the most that the allocator was asked for, before it rounds; what
            is there beside the step is in it.
        beside_bytes: on CUDA, what was live beside the step and is not in its peak: cuBLAS's
            workspaces, constants of compiled graphs.
        budget_bytes, promised_bytes, baseline_bytes, overhead, recomputed_runs, graphs: of dtr's
            reports; of several graphs, the highest peak, and the sum of the runs.
        minimum_bytes: what a refusal named.
        step_s: median of steps that took turns with those of all other methods.
        first_step_s: the first step, in which everything is compiled.
        planning_s, lowering_s: the parts of it that dtr's reports name.
        gradient_error: ||g - r|| / ||r|| over all parameters as one vector, r from eager in
            float64, or with dropout from the unbudgeted compile from the same seed.
    """

    model: str
    method: str
    setting: str = ""
    status: str = "ok"
    reason: str = ""
    scale: str = ""
    dtype: str = ""
    process: str = ""
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    requested_bytes: int | None = None
    beside_bytes: int | None = None
    static_bytes: int | None = None
    budget_bytes: int | None = None
    promised_bytes: int | None = None
    baseline_bytes: int | None = None
    minimum_bytes: int | None = None
    overhead: float | None = None
    recomputed_runs: int | None = None
    graphs: int | None = None
    step_s: float | None = None
    first_step_s: float | None = None
    planning_s: float | None = None
    lowering_s: float | None = None
    gradient_error: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What no two rows of a run share."""
        return (self.model, self.method, self.setting)

    @property
    def is_measured(self) -> bool:
        """Whether it trained."""
        return self.status == "ok" and self.peak_bytes is not None

    def cells(self, compile_step_s: float | None) -> tuple[str, ...]:
        """The row of the printed table."""
        ratio = None if not self.step_s or not compile_step_s else self.step_s / compile_step_s
        return (
            self.model,
            self.method,
            self.setting,
            self.status,
            _mib(self.peak_bytes),
            _mib(self.reserved_bytes),
            _mib(self.budget_bytes),
            _mib(self.promised_bytes),
            _number(None if self.step_s is None else 1e3 * self.step_s, ".1f"),
            _number(ratio, ".2f"),
            _number(self.first_step_s, ".1f"),
            _number(self.planning_s, ".1f"),
            _number(self.gradient_error, ".1e"),
        )

    def to_json(self) -> dict[str, Any]:
        """Only what JSON can say: a value that is not finite becomes its name."""
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Row:
        """The inverse of `to_json`; keys of other benchmarks are left out."""
        known = {f.name: record[f.name] for f in fields(Row) if f.name in record}
        if isinstance(known.get("gradient_error"), str):
            known["gradient_error"] = float(known["gradient_error"])
        return Row(**known)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of `bench.rivals --out`; of equal ones the last.

    Steps are compared with each other, so a model's have to be of one process on one machine, that
    of its ``compile`` row: times of another are left out.
    """
    found: dict[tuple[str, str, str], tuple[Row, object]] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if record.get("bench") == "rivals":
                row = Row.from_json(record)
                found[row.key] = row, (row.process, record.get("machine"))
    for row, origin in found.values():
        _, of_compile = found.get((row.model, "compile", ""), (row, origin))
        if origin != of_compile:
            row.step_s = row.first_step_s = None
    return [row for row, _ in found.values()]


def _mib(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / _MIB:.1f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The cells of all rows."""
    plain = {row.model: row.step_s for row in rows if row.method == "compile"}
    return [row.cells(plain.get(row.model)) for row in rows]


@dataclass(frozen=True, slots=True)
class Summary:
    """What the rows of one model answer; None where a row that it takes is missing.

    Attributes:
        static_bytes: parameters, buffers and inputs, which no method can do without; gradients are
            not in it.
        dtr_bytes, memory_budget_bytes, blocks_bytes, selective_bytes: the smallest peak that
            trained.
        step_ratio: the fastest dtr step within the blocks' peak / the blocks' step.
        peak_ratio: the smallest dtr peak among those no slower than the blocks / the blocks' peak.
        error_ratio: the largest gradient error of dtr / that of the plain compile.
        promise_off: the largest |promised - measured| / baseline.
        promises, close_promises: dtr rows that trained, and those off by at most 2 %.
        broken: what no row may say, in words.
    """

    model: str
    static_bytes: int | None
    dtr_bytes: int | None
    memory_budget_bytes: int | None
    blocks_bytes: int | None
    selective_bytes: int | None
    step_ratio: float | None
    peak_ratio: float | None
    error_ratio: float | None
    promise_off: float | None
    promises: int
    close_promises: int
    broken: tuple[str, ...]

    def lines(self) -> list[str]:
        """In sentences."""
        peaks = (
            f"{self.model}: smallest peak that trains, MiB: dtr {_mib(self.dtr_bytes)},"
            f" activation_memory_budget {_mib(self.memory_budget_bytes)},"
            f" per-block checkpoints {_mib(self.blocks_bytes)},"
            f" selective {_mib(self.selective_bytes)};"
            f" parameters, buffers and inputs {_mib(self.static_bytes)}"
        )
        if self.dtr_bytes is not None and self.memory_budget_bytes is not None:
            peaks += f"; dtr / best budget {self.dtr_bytes / self.memory_budget_bytes:.2f}"
        return [
            peaks,
            f"  within the blocks' peak, dtr step / their step: {_number(self.step_ratio, '.3f')};"
            f" at most their step, dtr peak / their peak: {_number(self.peak_ratio, '.3f')};"
            f" gradient error / compile's: {_number(self.error_ratio, '.2f')}",
            f"  promises: {self.promises}, within 2 % of the baseline {self.close_promises},"
            f" worst off by {_number(self.promise_off, '.2%')},"
            f" broken {len(self.broken) or 'none'}",
            *(f"    {text}" for text in self.broken),
        ]


def summarize(rows: Iterable[Row]) -> list[Summary]:
    """One summary a model, in the order of the rows."""
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        by_model.setdefault(row.model, []).append(row)
    return [_summary(model, of) for model, of in by_model.items()]


def _summary(model: str, rows: Sequence[Row]) -> Summary:
    def measured(method: str) -> list[Row]:
        return [row for row in rows if row.method == method and row.is_measured]

    def smallest(of: Sequence[Row]) -> int | None:
        return min((row.peak_bytes for row in of if row.peak_bytes is not None), default=None)

    ours, blocks = measured("dtr"), measured("blocks")
    step_ratio = peak_ratio = None
    if blocks:
        step_ratio, peak_ratio = _against(ours, blocks[0])
    plain = measured("compile")
    offs = [off for row in ours if (off := _promise_off(row)) is not None]
    return Summary(
        model,
        next((row.static_bytes for row in rows if row.static_bytes is not None), None),
        smallest(ours),
        smallest(measured("memory_budget")),
        smallest(blocks),
        smallest(measured("selective")),
        step_ratio,
        peak_ratio,
        _error_ratio(ours, plain[0]) if plain else None,
        max(offs, default=None),
        len(offs),
        sum(off <= PROMISE_TOLERANCE for off in offs),
        tuple(filter(None, (_broken(row) for row in rows if row.method == "dtr"))),
    )


def _against(ours: Sequence[Row], blocks: Row) -> tuple[float | None, float | None]:
    """Our best step within the other's peak, and our smallest peak at most as slow: ratios."""
    assert blocks.peak_bytes is not None
    peak_bytes, step_s = blocks.peak_bytes, blocks.step_s
    if step_s is None:
        return None, None
    points = [(row.peak_bytes or 0, row.step_s) for row in ours if row.step_s is not None]
    fastest = min((s for size, s in points if size <= peak_bytes), default=None)
    smallest = min((size for size, s in points if s <= step_s), default=None)
    return (
        None if fastest is None else fastest / step_s,
        None if smallest is None else smallest / peak_bytes,
    )


def _error_ratio(ours: Sequence[Row], plain: Row) -> float | None:
    errors = [row.gradient_error for row in ours if row.gradient_error is not None]
    if not errors or not plain.gradient_error:
        return None
    return max(errors) / plain.gradient_error


def _promise_off(row: Row) -> float | None:
    if row.promised_bytes is None or row.peak_bytes is None or not row.baseline_bytes:
        return None
    return abs(row.promised_bytes - row.peak_bytes) / row.baseline_bytes


def _broken(row: Row) -> str:
    """Why the row breaks dtr's contract; empty if it does not."""
    name = f"dtr at {row.setting}"
    if row.status == "failed":
        return f"{name}: {row.reason}"
    if row.status == "refused":
        return f"{name}: refused" if row.setting == "min" or row.minimum_bytes is None else ""
    limit = row.promised_bytes if row.budget_bytes is None else row.budget_bytes
    if row.status == "ok" and row.peak_bytes is not None and limit is not None:
        over = row.peak_bytes - limit
        if over > 0:
            return f"{name}: {over} bytes over {limit}"
    return ""


# --- pictures -----------------------------------------------------------------------------------

_MARKS: dict[str, tuple[str, str]] = {
    "eager": ("eager", "x"),
    "compile": ("torch.compile", "D"),
    "memory_budget": ("activation_memory_budget", "s"),
    "blocks": ("per-block checkpoints", "^"),
    "selective": ("selective checkpoints", "v"),
    "torchtitan": ("torchtitan's selective mode", "<"),
    "auto_chunker": ("auto_chunker", ">"),
    "dtr": ("dtr", "o"),
}


def draw(model: str, rows: Iterable[Row]) -> Figure:
    """Step time against peak, one curve a method; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    of_model = [r for r in rows if r.model == model and r.is_measured and r.step_s is not None]
    for method, (label, mark) in _MARKS.items():
        points = sorted(
            ((r.peak_bytes or 0) / _MIB, 1e3 * (r.step_s or 0.0))
            for r in of_model
            if r.method == method
        )
        if points:
            axes.plot(*zip(*points, strict=True), marker=mark, label=label, linewidth=1)
    axes.set_xlabel("peak of a step (MiB)")
    axes.set_ylabel("time of a step (ms)")
    axes.set_title(model)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def draw_all(folder: Path, rows: Sequence[Row], save: Callable[[Figure, Path], None]) -> None:
    """One picture a model into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for model in dict.fromkeys(row.model for row in rows):
        save(draw(model, rows), folder / f"rivals-{model}.png")
