"""Models that nobody tuned for: do budgets hold, and are gradients right?

The models are those of three libraries, `transformers`, `timm` and `diffusers`: a small one of each
architecture, with random weights, so that nothing is downloaded.  `bench.architectures` says how a
model is trained and judged: three steps at ``"min"`` and three at half of the unbudgeted peak, on
the executor that counts bytes.  `bench.hub_models` has the models that are not of `transformers`.

Each architecture runs in a process of its own, which is ended after ``--limit`` seconds; an
architecture that takes longer has a row that says so.  A row also has the seconds of the three
steps, compilation included, with the budget and with ``backend="aot_eager"``.

    python -m bench.hub --out rows.jsonl         # what the file already holds is not run again
    python -m bench.hub --libraries timm --names resnet,swin_transformer
    python -m bench.hub --rows rows.jsonl bench/results/architectures-cpu.jsonl

The last line prints the table of docs/benchmarks.md, from rows of this script and of
`bench.architectures`.  Exits with 1 if a gradient is wrong, if a promise or a prediction does not
hold, or if a model does not compile although Dynamo compiles it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.architectures import (
    BUDGETS,
    STEPS,
    Trainable,
    eager,
    is_ours,
    judged,
    prepare,
    steps,
    table,
)
from bench.hub_models import LIBRARIES
from bench.measure import machine, say, write_json_line
from workloads.training import relative_error

LIMIT_S = 300
SMALLEST = {"transformers": "llama", "timm": "convmixer", "diffusers": "t2i_adapter"}

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Member:
    """An architecture, and where it is to be found."""

    library: str
    family: str
    name: str

    @property
    def architecture(self) -> Trainable:
        """How it is built and called."""
        return LIBRARIES[self.library][self.family][self.name]


def members(libraries: Iterable[str]) -> list[Member]:
    """All architectures of some libraries, in the order of the summary."""
    return [
        Member(library, family, name)
        for library in libraries
        for family, architectures in LIBRARIES[library].items()
        for name in architectures
    ]


def member_of(row: Mapping[str, Any]) -> Member:
    """What a row is about; those of `bench.architectures` are about `transformers`."""
    library, name = row.get("library", "transformers"), row["name"]
    for family, architectures in LIBRARIES[library].items():
        if name in architectures:
            return Member(library, family, name)
    return Member(library, row.get("family", "others"), name)


def read(paths: Iterable[Path]) -> list[Row]:
    """The rows of some files; a file that does not exist has none."""
    lines = (
        line
        for path in paths
        if path.exists()
        for line in path.read_text(encoding="utf-8").splitlines()
    )
    return [json.loads(line) for line in lines]


def remaining(wanted: Iterable[Member], rows: Iterable[Mapping[str, Any]]) -> list[Member]:
    """Those that no row is about."""
    done = {member_of(row) for row in rows}
    return [member for member in wanted if member not in done]


def plain_s(architecture: Trainable) -> float | None:
    """Seconds of the steps with ``backend="aot_eager"``; None if it does not compile the model."""
    torch._dynamo.reset()
    module = architecture.build(dropout=True)
    compiled = torch.compile(module, backend="aot_eager")
    begun = time.perf_counter()
    try:
        steps(architecture, module, compiled, count=STEPS, traced=False)
    except Exception:  # where this backend fails and ours does not, there is nothing to compare
        return None
    return round(time.perf_counter() - begun, 1)


def float32_error(architecture: Any) -> float | None:
    """How far eager PyTorch's own float32 gradients are off, where a model runs in float64."""
    if architecture.dtype != torch.float64:
        return None
    coarse = dataclasses.replace(architecture, dtype=torch.float32)
    return relative_error(eager(coarse), eager(architecture))


def work(member: Member, budgets: Sequence[str], path: Path) -> None:
    """Runs one architecture and writes its rows into a file, each as soon as it is there."""
    architecture = member.architecture
    for row in judged(architecture, budgets, compiler="eager"):
        write_json_line(path, row)
    added = {"aot_eager_seconds": plain_s(architecture)}
    error = float32_error(architecture)
    if error is not None:
        added["eager_float32_error"] = error
    write_json_line(path, added)


def run(member: Member, budgets: Sequence[str], limit_s: float) -> Iterator[Row]:
    """The rows of one architecture, which runs in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        process = multiprocessing.get_context("fork").Process(
            target=work, args=(member, budgets, path)
        )
        process.start()
        process.join(limit_s)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        yield from gathered(
            read([path]), budgets, exitcode=process.exitcode, late_s=limit_s if late else None
        )


def gathered(
    found: Sequence[Row], budgets: Sequence[str], *, exitcode: int | None, late_s: float | None
) -> Iterator[Row]:
    """The rows that a process left, and one about the budget at which it ended too early.

    Args:
        found: what it wrote: a row for each budget, then what all of them are given.
        exitcode: with which it ended.
        late_s: seconds after which it was ended, or None.
    """
    rows = [row for row in found if "budget" in row]
    added = {key: value for row in found if "budget" not in row for key, value in row.items()}
    yield from (row | added for row in rows)
    stopped = any("error" in row for row in rows)
    if len(rows) < len(budgets) and not stopped:
        unfinished = {"budget": budgets[len(rows)], "compiler": "eager"}
        if late_s is not None:
            yield unfinished | {"error": f"took longer than {late_s:.0f} s", "timed_out": True}
        else:
            yield unfinished | {"error": f"its process ended with status {exitcode}"}


def is_timed_out(row: Mapping[str, Any]) -> bool:
    """Whether the architecture took longer than it was given."""
    return bool(row.get("timed_out"))


def is_failure(row: Mapping[str, Any]) -> bool:
    """Whether a row is about something that is ours and wrong."""
    return is_ours(row) and not is_timed_out(row)


def errors_of(row: Mapping[str, Any]) -> list[float]:
    """The gradient errors of a row."""
    keys = ("error_of_eager", "error_of_unbudgeted")
    return [float(row[key]) for key in keys if key in row]


def line(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The counts of one family, in the order of the table."""
    by_member: dict[Member, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_member.setdefault(member_of(row), []).append(row)
    trained = [
        mine for mine in by_member.values() if not any("error" in row or row["bad"] for row in mine)
    ]
    half = [row for mine in trained for row in mine if row["budget"] == "50%"]
    kept = [row for row in half if row["trained_at"] == "50%"]
    several = [mine for mine in trained if any(row["graphs"] > 1 for row in mine)]
    errors = [error for row in rows for error in errors_of(row)]
    return (
        str(len(by_member)),
        str(len(trained)),
        str(len(several)),
        str(len(kept)),
        str(len(half) - len(kept)),
        str(sum(any(row.get("dynamo_fails") for row in mine) for mine in by_member.values())),
        str(sum(any(is_timed_out(row) for row in mine) for mine in by_member.values())),
        str(sum(any(is_failure(row) for row in mine) for mine in by_member.values())),
        f"{max(errors):.0e}" if errors else "",
    )


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of docs/benchmarks.md, one line a family, and what did not train."""
    header = (
        "library",
        "family",
        "models",
        "trained",
        "several graphs",
        "50 % kept",
        "refused, kept as named",
        "Dynamo cannot",
        "out of time",
        "wrong",
        "gradient error",
    )
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for library, families in LIBRARIES.items():
        for family in families:
            mine = [row for row in rows if belongs(row, library, family)]
            if mine:
                lines.append(f"| {' | '.join((library, family, *line(mine)))} |")
    if rows:
        lines.append(f"| {' | '.join(('all', '', *line(rows)))} |")
    lines += ["", *remarks(rows)]
    return "\n".join(lines)


def belongs(row: Mapping[str, Any], library: str, family: str) -> bool:
    """Whether a row is about an architecture of a family."""
    member = member_of(row)
    return (member.library, member.family) == (library, family)


def remarks(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Seconds, models in float64, and what did not train, in words."""
    timed = [row for row in rows if row.get("aot_eager_seconds") and "seconds" in row]
    for budget in sorted({row["budget"] for row in timed}):
        mine = [row for row in timed if row["budget"] == budget]
        seconds = statistics.median(row["seconds"] for row in mine)
        plain = statistics.median(row["aot_eager_seconds"] for row in mine)
        yield (
            f"{budget}: three steps of {len(mine)} models took {seconds:.1f} s (median), and"
            f" {plain:.1f} s with aot_eager"
        )
    coarse = {
        member_of(row): row["eager_float32_error"] for row in rows if "eager_float32_error" in row
    }
    if coarse:
        yield (
            f"in float64: {len(coarse)} models, whose float32 gradients in eager PyTorch are off by"
            f" {min(coarse.values()):.0e} to {max(coarse.values()):.0e}"
        )
    for row in rows:
        member = member_of(row)
        for text in wrong(row):
            yield f"{member.library}, {member.name} at {row['budget']}: {text}"


def wrong(row: Mapping[str, Any]) -> list[str]:
    """What does not hold, or why the model did not train."""
    return [*row.get("bad", ()), *([row["error"]] if "error" in row else ())]


def chosen(
    wanted: Sequence[Member], names: str | None, *, quick: bool
) -> tuple[list[Member], set[str]]:
    """Those of ``--names``, in this order, or of ``--quick``; and the names that are unknown."""
    if names is None:
        if not quick:
            return list(wanted), set()
        return [member for member in wanted if SMALLEST[member.library] == member.name], set()
    asked = list(dict.fromkeys(names.split(",")))
    found = [member for name in asked for member in wanted if member.name == name]
    return found, set(asked) - {member.name for member in found}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--libraries", help=f"comma-separated, by default {','.join(LIBRARIES)}")
    parser.add_argument("--names", help="comma-separated; all by default")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for each")
    parser.add_argument("--quick", action="store_true", help="a small one of each, at 50 %%")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file, and go on there")
    parser.add_argument("--rows", type=Path, nargs="+", help="only print what is in these files")
    arguments = parser.parse_args(argv)
    if arguments.rows:
        measured_before = read(arguments.rows)
        print(summary(measured_before))
        missing = [member.name for member in remaining(members(LIBRARIES), measured_before)]
        if missing:
            print(f"not run: {len(missing)} models: {', '.join(missing)}")
        return int(any(map(is_failure, measured_before)))
    libraries = arguments.libraries.split(",") if arguments.libraries else list(LIBRARIES)
    for library in libraries:
        if library not in LIBRARIES:
            parser.error(f"unknown library {library!r}; there are: {', '.join(LIBRARIES)}")
    there = [library for library in libraries if importlib.util.find_spec(library) is not None]
    for library in libraries:
        if library not in there:
            print(f"skipped: {library} is not installed")
    wanted, unknown = chosen(members(there), arguments.names, quick=arguments.quick)
    if unknown:
        parser.error(f"unknown architectures: {', '.join(sorted(unknown))}")
    if arguments.out:
        wanted = remaining(wanted, read([arguments.out]))
    prepare()
    budgets = BUDGETS[-1:] if arguments.quick else BUDGETS
    description = machine(torch.device("cpu"))
    rows: list[Row] = []
    for member in wanted:
        begun = time.perf_counter()
        say(f"{member.library}, {member.name}")
        version = importlib.import_module(member.library).__version__
        row = {
            "bench": "hub",
            "library": member.library,
            "version": version,
            "family": member.family,
            "name": member.name,
            "machine": description,
        }
        for judgement in run(member, budgets, arguments.limit):
            rows.append(row | judgement)
            say("; ".join([f"  {judgement['budget']}", *wrong(judgement)]))
            write_json_line(arguments.out, rows[-1])
        say(f"  {time.perf_counter() - begun:.0f} s")
    print(table(rows))
    print(summary(rows))
    return int(any(map(is_failure, rows)))


if __name__ == "__main__":
    sys.exit(main())
