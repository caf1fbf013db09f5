"""What `dtrcompile.plan` says of a step on a GPU that need not be there, and what that takes.

For each case, in a process of its own with empty caches: the seconds and the memory of planning,
the peaks, the overhead, and what the caching allocator would reserve.  Where the GPU is there
(``--compare``), the same step is then compiled and run on it: what the report promises and what the
allocator says have to be what was told, and that is the status.

    python -m bench.elsewhere --out rows.jsonl
    python -m bench.elsewhere --device H100-80GB --compare --out rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dtrcompile
from bench.measure import cause_of, format_table, machine, say, write_json_line
from bench.zoo import SCALES, ZOO, LanguageModelLoss
from dtrcompile.backend import dtr
from dtrcompile.passes.errors import InfeasibleBudgetError, format_bytes
from dtrcompile.passes.target.devices import target_of

QUICK = ("vit",)
USUAL = ("gpt2", "llama-7b", "llama-70b", "unet", "vit")
BUDGET = "60%"

Built = tuple[nn.Module, tuple[Any, ...]]


def _llama(**sizes: int) -> Callable[[str, str], Built]:
    """Llama 2 of these sizes, on one sequence of 4,096 tokens; the library's defaults are those of
    7B."""

    def build(_scale: str, device: str) -> Built:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(use_cache=False, **sizes)
        with torch.device(device):
            tokens = torch.zeros(1, 4096, dtype=torch.int64)
            model = LlamaForCausalLM(config)
        return LanguageModelLoss(model, "ForCausalLM"), (tokens, tokens.clone())

    return build


def _of_zoo(name: str) -> Callable[[str, str], Built]:
    return lambda scale, device: ZOO[name].build(scale, device=device)


CASES: dict[str, Callable[[str, str], Built]] = {
    **{name: _of_zoo(name) for name in ZOO},
    "llama-7b": _llama(),
    "llama-70b": _llama(
        num_hidden_layers=80,
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
}


def told(name: str, scale: str, device: str) -> dict[str, Any]:
    """What is said of a case."""
    module, inputs = CASES[name](scale, "meta")
    optimizer = torch.optim.AdamW(module.parameters())
    start = time.perf_counter()
    forecast = dtrcompile.plan(
        module,
        *inputs,
        budget=BUDGET,
        device=device,
        autocast=torch.bfloat16,
        optimizer=optimizer,
        reserve=0,
    )
    seconds = time.perf_counter() - start
    peaks = (resource.getrusage(who).ru_maxrss for who in _PROCESSES)
    return {
        **json.loads(forecast.to_json()),
        "seconds": seconds,
        "memory_bytes": sum(peaks) << 10,
        "n_parameters": sum(p.numel() for p in module.parameters()),
    }


# This one, and the one that lowers backward beside it.
_PROCESSES = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def held(name: str, scale: str) -> dict[str, Any]:
    """What a few steps of a case come to on the GPU that is here."""
    module, inputs = CASES[name](scale, "cuda")
    optimizer = torch.optim.AdamW(module.parameters())
    compiled = torch.compile(
        module, backend=dtr, options={"budget": BUDGET, "optimizer": optimizer, "reserve": 0}
    )
    try:
        for _ in range(3):
            with torch.autocast("cuda", torch.bfloat16):
                loss = compiled(*inputs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
            torch.cuda.reset_peak_memory_stats()
    except Exception as error:
        refusal = cause_of(error)
        if not isinstance(refusal, InfeasibleBudgetError):
            raise
        return {"fits": False, "peak_bytes": refusal.minimum_bytes}
    with torch.autocast("cuda", torch.bfloat16):
        loss = compiled(*inputs)
    loss.backward()
    observed_bytes = torch.cuda.max_memory_allocated()
    (report,) = dtrcompile.reports()
    return {
        "fits": True,
        "peak_bytes": report.promised_peak_bytes,
        "baseline_peak_bytes": report.baseline_peak_bytes,
        "observed_bytes": observed_bytes,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def row_of(name: str, scale: str, device: str, *, compares: bool) -> dict[str, Any]:
    """The row of one case, each half in a process of its own."""
    row: dict[str, Any] = {
        "bench": "elsewhere",
        "case": name,
        "scale": scale,
        "budget": BUDGET,
        "told": _in_process("told", name, scale, device),
        "machine": machine(torch.device("cpu")),
    }
    if compares:
        row["held"] = found = _in_process("held", name, scale, device)
        row["is_equal"] = is_as_told(row["told"], found)
    return row


def is_as_told(told: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether what the device's own report says is what was said without the device."""
    keys = ("fits", "peak_bytes", "baseline_peak_bytes")
    return all(told[key] == found[key] for key in keys if key in found)


def _in_process(what: str, name: str, scale: str, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.elsewhere", "--half", what]
        command += ["--cases", name, "--scale", scale, "--device", device]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A table of the rows."""
    header = ("case", "peak", "unbudgeted", "overhead", "reserved", "planned in", "with", "there")
    cells = []
    for row in rows:
        said = row["told"]
        cells.append(
            (
                row["case"],
                format_bytes(said["peak_bytes"]) if said["fits"] else "refused",
                format_bytes(said["baseline_peak_bytes"]),
                f"{said['overhead']:.3f}",
                format_bytes(said["reserved_bytes"] or 0),
                f"{said['seconds']:.0f} s",
                format_bytes(said["memory_bytes"]),
                {None: "-", True: "equal", False: "DIFFERS"}[row.get("is_equal")],
            )
        )
    print(format_table(header, cells))


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", help=f"comma-separated, of: {', '.join(CASES)}")
    parser.add_argument("--scale", choices=SCALES, help="default: cuda")
    parser.add_argument("--device", default="H100-80GB")
    parser.add_argument("--compare", action="store_true", help="run the steps on the GPU here")
    parser.add_argument("--quick", action="store_true", help="one case, small")
    parser.add_argument("--half", choices=("told", "held"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args(argv)
    usual = QUICK if args.quick else USUAL
    cases = args.cases.split(",") if args.cases else list(usual)
    scale = args.scale or ("quick" if args.quick else "cuda")
    if args.half:
        (case,) = cases
        found = told(case, scale, args.device) if args.half == "told" else held(case, scale)
        print(json.dumps(found))
        return 0
    if args.compare:
        wanted = target_of(args.device).name
        here = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        if here != wanted:
            say(f"--compare needs {wanted}; here is {here}")
            return 2
    rows = []
    for name in cases:
        row = row_of(name, scale, args.device, compares=args.compare)
        say(f"{name}: {row['told']['seconds']:.0f} s")
        write_json_line(args.out, row)
        rows.append(row)
    show(rows)
    return 0 if all(row.get("is_equal", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
