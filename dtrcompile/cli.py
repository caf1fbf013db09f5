"""The command line: ``dtrcompile`` or ``python -m dtrcompile``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import dtrcompile
from dtrcompile.explain.explanation import Explanation
from dtrcompile.options import Budget, Options
from dtrcompile.passes.errors import (
    ChangedTorchError,
    DTRError,
    InfeasibleBudgetError,
    OptionError,
    PlanError,
    ProgramError,
    format_bytes,
)
from dtrcompile.passes.target.devices import TARGETS
from dtrcompile.whole_files import write_whole

if TYPE_CHECKING:
    from dtrcompile.forecast import Forecast, Sweep
    from dtrcompile.passes.program.host_link import HostLink
    from dtrcompile.passes.program.plan import Plan
    from dtrcompile.passes.program.program import Program

Read = TypeVar("Read")

_USER_MODEL = (
    "module:callable names a function without arguments that returns the model and what it is"
    " called with, such as `return model, x` or `return model, (x, labels)`. The module is looked"
    " for in the present folder too. The name of a configuration of transformers, such as"
    " transformers:GPT2Config, stands for its model, with labels, on --batch and --length. A model"
    " is traced and planned, and not run."
)
_PLAN = (
    f"{_USER_MODEL} A program file, which DTRCOMPILE_ARTIFACTS=FOLDER has each compilation write,"
    " is planned as it is, and its plan printed."
)
_EXPLAIN = (
    f"{_USER_MODEL} DTRCOMPILE_ARTIFACTS=FOLDER has each compilation write its explanation to a"
    " file, which is read again here."
)
_OPTIMIZER = "of torch.optim, such as AdamW: counted"
_HOST_LINK = "bandwidth to the host in 10⁹ bytes/s, each way, for planner offload"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns:
        The exit status: 0, 1 after an error of `DTRError`'s family (its message goes to stderr,
        without a traceback), 2 for a wrong command line.
    """
    parsed = _parser().parse_args(arguments)
    try:
        parsed.run(parsed)
    except DTRError as error:
        print(f"dtrcompile: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of a pipe went away; the interpreter must not try to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        named = error.filename is not None and error.strerror is not None
        message = f"{error.filename}: {error.strerror}" if named else str(error)
        print(f"dtrcompile: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dtrcompile: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dtrcompile", description="Train within a byte budget, with torch.compile."
    )
    parser.add_argument("--version", action="version", version=dtrcompile.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="versions and devices, for a bug report")
    info.add_argument("--json", action="store_true", help="print them as JSON")
    info.set_defaults(run=_info)

    patches = commands.add_parser(
        "patches", help="compare what is used and replaced in torch with what was read of it"
    )
    patches.add_argument("--hashes", action="store_true", help="print the hashes for the table")
    patches.set_defaults(run=_patches)

    demo = commands.add_parser(
        "demo", help="train a small GPT without a budget, at 40%% and at the minimum"
    )
    demo.add_argument("--steps", type=_positive, default=None, help="steps a run (default: 10)")
    demo.add_argument(
        "--budget",
        action="append",
        metavar="BUDGET",
        help="a budget to train at; may be repeated (default: 40%% and min)",
    )
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--small", action="store_true", help="a tiny model, for a smoke test")
    demo.add_argument("--output", type=Path, default=Path("demo-output"), metavar="FOLDER")
    demo.set_defaults(run=_demo)

    plan = commands.add_parser(
        "plan",
        help="what a training step holds and costs within a budget; nothing is run",
        description=_PLAN,
    )
    plan.add_argument("model", help="module:callable, or a program file")
    plan.add_argument(
        "--budget", help="such as 8GiB, 40%% or min; with --device all of its memory if left out"
    )
    plan.add_argument("--json", action="store_true", help="print the forecast as JSON")
    _add_elsewhere(plan)
    plan.add_argument("--planner", default="auto")
    plan.add_argument("--heuristic", default=None)
    plan.add_argument("--planning-s", type=float, default=None, help="of planner auto")
    plan.add_argument("--host-link", type=float, metavar="GB/S", help=_HOST_LINK)
    plan.add_argument("-o", "--output", type=Path, help="write the plan to this file")
    plan.add_argument("--optimizer", metavar="NAME", help=_OPTIMIZER)
    plan.set_defaults(run=_plan)

    sweep = commands.add_parser(
        "sweep",
        help="the same for many budgets: how much compute each costs",
        description=_USER_MODEL,
    )
    sweep.add_argument("model", help="module:callable")
    sweep.add_argument(
        "--budget",
        action="append",
        metavar="BUDGET",
        help="may be repeated (default: 90%%, 80%% … 20%% and min)",
    )
    sweep.add_argument("--json", action="store_true", help="print the points as JSON")
    _add_elsewhere(sweep)
    sweep.add_argument(
        "--stock",
        action="store_true",
        help="beside them, what PyTorch's own activation_memory_budget comes to",
    )
    sweep.add_argument("--plot", type=Path, metavar="FILE", help="draw overhead against peak")
    sweep.set_defaults(run=_sweep)

    largest = commands.add_parser(
        "largest",
        help="the largest batch, or length, that trains within a budget",
        description=_USER_MODEL,
    )
    largest.add_argument("model", help="module:callable")
    largest.add_argument(
        "--budget", help="in bytes, such as 8GiB; with --device all of its memory if left out"
    )
    largest.add_argument("--symbol", default="batch", help="batch, length or a dimension's number")
    largest.add_argument("--json", action="store_true", help="print the result as JSON")
    _add_elsewhere(largest)
    largest.add_argument("--optimizer", metavar="NAME", help=_OPTIMIZER)
    largest.set_defaults(run=_largest)

    explain = commands.add_parser(
        "explain",
        help="what a plan does with each tensor, and why",
        description=_EXPLAIN,
    )
    explain.add_argument("model", help="module:callable, or a graph*-explanation.json")
    explain.add_argument("--budget", help="of a module:callable, such as 8GiB, 40%% or min")
    _add_elsewhere(explain)
    explain.add_argument(
        "-o",
        "--output",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="write a .txt, .json, .html, .perfetto.json or .pickle (PyTorch's memory viewer);"
        " may be repeated",
    )
    explain.add_argument("--rows", type=_positive, default=15, help="of each table (default: 15)")
    explain.add_argument("--json", action="store_true", help="print the explanation as JSON")
    explain.set_defaults(run=_explain)

    compare = commands.add_parser(
        "compare",
        help="what differs between two plans: peaks, tensors, modules",
        description=f"{_EXPLAIN} A module:callable is compared at two budgets.",
    )
    compare.add_argument("first", help="a graph*-explanation.json, or a module:callable")
    compare.add_argument("second", nargs="?", help="another graph*-explanation.json")
    compare.add_argument(
        "--budget", action="append", default=[], help="of a module:callable; to be given twice"
    )
    compare.add_argument("--rows", type=_positive, default=15, help="of each table (default: 15)")
    _add_elsewhere(compare)
    compare.set_defaults(run=_compare)

    replay = commands.add_parser("replay", help="check a plan file and say what it needs")
    replay.add_argument("program", type=Path, help="a program file")
    replay.add_argument("plan", type=Path, help="a plan file")
    replay.add_argument("--host-link", type=float, metavar="GB/S", help=_HOST_LINK)
    replay.add_argument("--steps", action="store_true", help="print the bytes at every step")
    replay.add_argument("--json", action="store_true", help="print what it needs as JSON")
    replay.set_defaults(run=_replay)

    gap = commands.add_parser(
        "gap",
        help="where a plan and the compiler's schedule differ, operator by operator",
        description="DTRCOMPILE_ARTIFACTS=FOLDER has each compilation write the three files.",
    )
    gap.add_argument("program", type=Path, help="a program file")
    gap.add_argument("plan", type=Path, help="a plan file")
    gap.add_argument("schedule", type=Path, help="a schedule file")
    gap.add_argument("--most", type=_positive, default=20, help="steps to print (default: 20)")
    gap.set_defaults(run=_gap)
    return parser


def _add_elsewhere(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--device",
        metavar="GPU",
        help="plan for a GPU that need not be there, such as H100-80GB (info lists them)",
    )
    command.add_argument("--dtype", help="of parameters and inputs, such as bfloat16")
    command.add_argument("--autocast", metavar="DTYPE", help="of automatic mixed precision")
    command.add_argument("--batch", type=_positive, help="of a transformers config (default: 1)")
    command.add_argument(
        "--length", type=_positive, help="of a transformers config (default: at most 1024 tokens)"
    )


# What `_add_elsewhere` adds, which says nothing of a file.
_OF_A_MODEL = ("device", "dtype", "autocast", "batch", "length")


def _refuse_ignored(parsed: argparse.Namespace, names: Sequence[str], given: str) -> None:
    """Refuse arguments that would have no effect.

    Args:
        given: what the command was given, of which they say nothing.

    Raises:
        OptionError: if there is one.
    """
    present = [name for name in names if getattr(parsed, name) not in (None, False)]
    if present:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in present)
        raise OptionError(f"{flags}: {parsed.command} has no use for it with {given}.")


def _elsewhere(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `dtrcompile.plan` that `_add_elsewhere` stands for.

    Raises:
        OptionError: for a dtype that PyTorch does not have.
    """
    import torch

    found: dict[str, Any] = {"device": arguments.device}
    for name in ("dtype", "autocast"):
        text = getattr(arguments, name)
        dtype = None if text is None else getattr(torch, text, None)
        if text is not None and not isinstance(dtype, torch.dtype):
            raise OptionError(f"--{name} {text}: PyTorch has no such dtype; bfloat16 is one.")
        found[name] = dtype
    return found


def _patches(arguments: argparse.Namespace) -> None:
    from dtrcompile.passes.private_names import is_there, private_names
    from dtrcompile.passes.releases import TRY_VARIABLE

    # To look at a release that nobody has tried is what this command is for.
    os.environ.setdefault(TRY_VARIABLE, "1")
    names = private_names()
    gone = [f"{module}.{name}" for module, name in names if not is_there(module, name)]
    release = metadata.version("torch")
    print(f"torch {release}: {len(names)} private names, {len(gone)} of them gone")
    if gone:
        raise ChangedTorchError(gone, "gone from this PyTorch")
    from dtrcompile.passes.inductor.patches import PATCHES, State, source_hash, state_of

    states = {patch.target: state_of(patch) for patch in PATCHES}
    for patch in PATCHES:
        state = states[patch.target]
        has_source = arguments.hashes and state is not State.GONE
        more = source_hash(patch.original) if has_source else patch.why
        print(f"{state.value:8}  {patch.target:46}  {more}")
    changed = [target for target, state in states.items() if state is not State.SAME]
    if changed:
        raise ChangedTorchError(changed, "replaced in Inductor, and not as it was read")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _info(parsed: argparse.Namespace) -> None:
    found = _environment()
    if parsed.json:
        print(json.dumps(found))
        return
    print(f"dtrcompile {found['dtrcompile']}")
    print(f"python {found['python']} on {found['platform']}")
    for name in ("numpy", "torch"):
        print(f"{name} is not installed" if found[name] is None else f"{name} {found[name]}")
    if found["torch"] is None:
        return
    for index, device in enumerate(found["devices"]):
        print(f"cuda:{index} {device['name']}, {format_bytes(device['memory_bytes'])}")
    if not found["devices"]:
        print(f"no CUDA device; {found['cpu_threads']} CPU threads")
    print(f"devices to plan for: {', '.join(found['devices_to_plan_for'])}")


def _environment() -> dict[str, Any]:
    """Versions and devices; what is not installed is None."""
    found: dict[str, Any] = {
        "dtrcompile": dtrcompile.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in ("numpy", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if found["torch"] is None:
        return found
    import torch

    n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = map(torch.cuda.get_device_properties, range(n_devices))
    found["devices"] = [{"name": p.name, "memory_bytes": p.total_memory} for p in properties]
    found["cpu_threads"] = torch.get_num_threads()
    found["devices_to_plan_for"] = list(TARGETS)
    return found


def _demo(parsed: argparse.Namespace) -> None:
    # Before torch is loaded: its profiler announces itself on stderr otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        from dtrcompile.demo.run import DemoSettings, run_demo
    except ImportError as error:
        raise DTRError(
            f"the demo needs the module {error.name!r}. Install it with:"
            " pip install 'dtrcompile[demo]'"
        ) from error
    usual = DemoSettings()
    budgets = tuple(parsed.budget or usual.budgets)
    for budget in budgets:
        Budget.parse(budget, what="--budget")
    settings = DemoSettings(
        budgets=budgets,
        steps=parsed.steps or usual.steps,
        seed=parsed.seed,
        output=parsed.output,
    )
    run_demo(settings.small() if parsed.small else settings)


def _plan(parsed: argparse.Namespace) -> None:
    is_named_model = _is_named_model(parsed.model)
    if parsed.budget is None:
        if parsed.device is None:
            raise OptionError("plan needs --budget, such as 8GiB, 40% or min, or a --device.")
        parsed.budget = "auto"
    if not is_named_model:
        _refuse_ignored(parsed, (*_OF_A_MODEL, "optimizer", "json"), "a program file")
        _plan_program(parsed)
        return
    _refuse_ignored(parsed, ("output", "host_link"), "a module:callable")
    given: dict[str, Any] = {"planner": parsed.planner, "heuristic": parsed.heuristic}
    if parsed.planning_s is not None:
        given["planning_s"] = parsed.planning_s
    forecast = _forecast(parsed, optimizer_name=parsed.optimizer, **given)
    print(forecast.to_json() if parsed.json else forecast)


def _sweep(parsed: argparse.Namespace) -> None:
    from dtrcompile.forecast import SWEPT

    if parsed.plot is not None and Path(parsed.plot).is_dir():
        raise OptionError(f"--plot {parsed.plot} is a folder; name a file in it.")
    found = _swept(parsed, parsed.model, parsed.budget or SWEPT, stock=parsed.stock)
    print(found.to_json() if parsed.json else found)
    if parsed.plot is not None:
        found.plot(parsed.plot)


def _largest(parsed: argparse.Namespace) -> None:
    from dtrcompile.largest_size import largest
    from dtrcompile.user_model import user_model

    symbol = int(parsed.symbol) if parsed.symbol.isdecimal() else parsed.symbol
    if parsed.budget is None and parsed.device is None:
        raise OptionError(
            "largest needs --budget, such as 8GiB, or --device, all of whose memory it then takes."
        )
    asked = {**_elsewhere(parsed), "symbol": symbol, "budget": parsed.budget or "auto"}
    named = user_model(parsed.model, parsed.batch, parsed.length)
    if parsed.optimizer is not None:
        asked["optimizer"] = _optimizer(parsed.optimizer, named.model)
    found = largest(named.model, *named.inputs, **asked)
    print(found.to_json() if parsed.json else found)


def _explain(parsed: argparse.Namespace) -> None:
    for path in parsed.output:
        Explanation.check_name(path)
    if _is_named_model(parsed.model):
        if parsed.budget is None:
            raise OptionError("explain needs --budget for a module:callable, such as 40% or min.")
        explanation = _forecast(parsed).explain()
    else:
        path = Path(parsed.model)
        text = _read_text(path)
        _refuse_ignored(parsed, ("budget", *_OF_A_MODEL), "an explanation file")
        explanation = _parsed(path, text, Explanation.from_json)
    for path in parsed.output:
        explanation.save(path)
        print(f"wrote {path}", file=sys.stderr if parsed.json else sys.stdout)
    if parsed.json:
        print(explanation.to_json())
    elif not parsed.output:
        print(explanation.text(parsed.rows))


def _compare(parsed: argparse.Namespace) -> None:
    if _is_named_model(parsed.first):
        if parsed.second is not None or len(parsed.budget) != 2:
            raise OptionError(
                "compare needs --budget twice for a module:callable, such as --budget 60%"
                " --budget min."
            )
        swept = _swept(parsed, parsed.first, parsed.budget)
        first, second = (point.explain() for point in swept.points)
    else:
        if parsed.second is None or parsed.budget:
            raise OptionError(
                "compare needs two explanation files and no --budget, or a module:callable and"
                " --budget twice."
            )
        paths = [Path(parsed.first), Path(parsed.second)]
        texts = [_read_text(path) for path in paths]
        _refuse_ignored(parsed, _OF_A_MODEL, "an explanation file")
        first, second = (
            _parsed(path, text, Explanation.from_json)
            for path, text in zip(paths, texts, strict=True)
        )
    print(first.compared_with(second, parsed.rows))


def _swept(
    parsed: argparse.Namespace, name: str, budgets: Sequence[str], *, stock: bool = False
) -> Sweep:
    """Of the model that ``name`` stands for, at each budget."""
    from dtrcompile.forecast import sweep
    from dtrcompile.user_model import user_model

    for budget in budgets:
        Budget.parse(budget, what="--budget")
    named = user_model(name, parsed.batch, parsed.length)
    elsewhere = _elsewhere(parsed)
    return sweep(named.model, *named.inputs, budgets=budgets, stock=stock, **elsewhere)


def _forecast(
    parsed: argparse.Namespace, optimizer_name: str | None = None, **options: Any
) -> Forecast:
    """Of a model that is named.

    Args:
        optimizer_name: of a class of `torch.optim`, of whose default settings one is counted.

    Raises:
        InfeasibleBudgetError: if no plan fits.
    """
    from dtrcompile.forecast import plan
    from dtrcompile.user_model import user_model

    elsewhere = _elsewhere(parsed)
    Budget.parse(parsed.budget, what="--budget")
    named = user_model(parsed.model, parsed.batch, parsed.length)
    if optimizer_name is not None:
        options["optimizer"] = _optimizer(optimizer_name, named.model)
    forecast = plan(named.model, *named.inputs, budget=parsed.budget, **elsewhere, **options)
    if forecast.refusal is not None:
        raise forecast.refusal
    return forecast


def _optimizer(name: str, model: Any) -> Any:
    import torch

    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise OptionError(f"--optimizer {name}: torch.optim has none of that name; AdamW is one.")
    if not isinstance(model, torch.nn.Module):
        raise OptionError(
            "--optimizer needs a model that is an nn.Module, whose parameters it gets."
        )
    try:
        return found(model.parameters(), lr=1e-3)
    except Exception as error:
        raise OptionError(f"--optimizer {name} cannot be made: {error}") from error


def _is_named_model(name: str) -> bool:
    """Whether an argument is a ``module:callable``, rather than a file.

    Raises:
        OptionError: if it is neither, and seems to be the name of a module.
    """
    path = Path(name)
    if path.exists():
        return False
    if ":" not in name and path.suffix in ("", ".py"):
        raise OptionError(
            f"{name}: No such file or directory. If a model is meant, name what makes it as"
            f" module:callable, such as {path.stem}:make."
        )
    return ":" in name


def _plan_program(parsed: argparse.Namespace) -> None:
    from dtrcompile.passes.planning.planners import infeasible, make_planner, minimum_plan
    from dtrcompile.passes.planning.planners.base import keep_all
    from dtrcompile.passes.program.replay import replay

    options = {
        "budget": parsed.budget,
        "planner": parsed.planner,
        "heuristic": parsed.heuristic,
        "planning_s": parsed.planning_s,
    }
    checked = Options.parse(options)
    program = _read_program(Path(parsed.model))
    _, baseline = replay(program, keep_all(program))
    try:
        budget_bytes = checked.resolve_budget_bytes(baseline.peak_bytes)
    except OptionError as error:
        raise OptionError(
            "--budget auto needs a device; give an amount, such as 8GiB, 40% or min."
        ) from error
    link = _host_link(parsed)
    linked = {} if link is None else {"host_link": link}
    planner = make_planner(checked.planner, **checked.planner_options(), **linked)
    if budget_bytes is None:
        plan = minimum_plan(program, planner)
    else:
        try:
            plan = planner.plan(program, budget_bytes)
        except InfeasibleBudgetError as error:
            raise infeasible(program, budget_bytes, planner) from error
    if parsed.output is None:
        print(plan.to_text(), end="")
        _print_stats(program, plan, file=sys.stderr)
    else:
        write_whole(parsed.output, plan.to_text())
        _print_stats(program, plan, file=sys.stdout)


def _replay(parsed: argparse.Namespace) -> None:
    from dtrcompile.passes.program.plan import Plan
    from dtrcompile.passes.program.replay import replay

    program = _read_program(parsed.program)
    plan = _read(parsed.plan, Plan.from_text)
    if parsed.host_link is not None:
        plan = replace(plan, host_link=_host_link(parsed))
    if parsed.json:
        _refuse_ignored(parsed, ("steps",), "--json")
        _, stats = replay(program, plan)
        print(json.dumps({**asdict(stats), "overhead": stats.overhead}))
        return
    if parsed.steps:
        timeline, _ = replay(program, plan)
        rows = zip(plan.steps, timeline.during_bytes, timeline.after_bytes, strict=True)
        for index, (step, during, after) in enumerate(rows):
            print(f"{index:>7} {during:>15} {after:>15}  {step}")
    _print_stats(program, plan, file=sys.stdout)


def _gap(parsed: argparse.Namespace) -> None:
    from dtrcompile.passes.fitting.gap import gap_text
    from dtrcompile.passes.inductor.schedule_trace import from_json
    from dtrcompile.passes.program.plan import Plan

    program = _read_program(parsed.program)
    plan = _read(parsed.plan, Plan.from_text)
    schedule = _read(parsed.schedule, from_json)
    print(gap_text(program, plan, schedule, parsed.most))


def _host_link(parsed: argparse.Namespace) -> HostLink | None:
    from dtrcompile.passes.program.host_link import HostLink

    # 10⁹ bytes/s is a byte a ns.
    return None if parsed.host_link is None else HostLink(parsed.host_link)


def _read(path: Path, parse: Callable[[str], Read]) -> Read:
    """What a file holds.

    Raises:
        DTRError: if it holds something else, with the name of the file.
    """
    return _parsed(path, _read_text(path), parse)


def _parsed(path: Path, text: str, parse: Callable[[str], Read]) -> Read:
    try:
        return parse(text)
    except (PlanError, ProgramError) as error:
        raise type(error)(f"{path}: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DTRError(f"{path} is not a text file: {error}.") from error


def _read_program(path: Path) -> Program:
    from dtrcompile.passes.program.io import from_json

    return _read(path, from_json)


def _print_stats(program: Program, plan: Plan, *, file: TextIO) -> None:
    from dtrcompile.passes.planning.planners.base import keep_all
    from dtrcompile.passes.program.replay import replay

    _, baseline = replay(program, keep_all(program))
    _, stats = replay(program, plan)
    share = stats.peak_bytes / baseline.peak_bytes if baseline.peak_bytes else 1.0
    rows = [
        ("planner", plan.planner),
        ("operators", str(len(program.operators))),
        ("baseline peak", f"{baseline.peak_bytes} bytes ({format_bytes(baseline.peak_bytes)})"),
        (
            "planned peak",
            f"{stats.peak_bytes} bytes ({format_bytes(stats.peak_bytes)}), {share:.1%} of the"
            f" baseline, at {stats.peak_operator or 'the start'}",
        ),
        ("overhead", f"{stats.overhead:.3f} x the baseline's compute"),
        ("extra runs", f"{stats.recomputed_operators} of {len(stats.recomputed)} operators"),
    ]
    if plan.host_link is not None:
        copied = f"{stats.offloaded_bytes} bytes; compute waits {stats.stall_ns} ns"
        rows.append(("to the host", copied))
    for name, text in rows:
        print(f"{name + ':':<15} {text}", file=file)
