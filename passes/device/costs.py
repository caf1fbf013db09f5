"""What one run of an operator costs, in nanoseconds.

An operator of a `program.Program` is a group of FX nodes that becomes one kernel: one extern node
(a matrix product, a convolution, attention), or a cone of pointwise and reduction nodes that
Inductor fuses.  Two models price it:

* `RooflineCostModel` (Williams, Waterman, Patterson, "Roofline", CACM 2009): the larger of the
  arithmetic time and the time to move each byte once, plus a launch.  It looks at nothing but
  shapes, dtypes and the name of the GPU, so the same program is priced, and therefore planned,
  the same on every machine and rank.  On CPU it prices a fixed reference machine.
* `MeasuredCostModel`: runs each distinct operator once on the device and remembers the time on
  disk.  **Measured plans may differ from machine to machine and from rank to rank**: times are
  rounded to two digits, which hides most jitter but not a different machine.  For several ranks
  use the roofline, or let every rank read one cache directory that was filled beforehand.

Only ratios matter to a planner, so neither tries to predict a step's absolute time.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import fx
from torch.utils import benchmark
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from dtrcompile.passes.errors import OptionError
from dtrcompile.passes.nodes import Role, expression, hint, is_on_cpu, map_by_name, packet, role
from dtrcompile.passes.torch_private import disable_modes

log = logging.getLogger("dtrcompile.costs")

aten = torch.ops.aten

Nodes: TypeAlias = Sequence[fx.Node]


class CostModel(ABC):
    """Prices one run of an operator."""

    name: ClassVar[str]

    @abstractmethod
    def cost_ns(self, nodes: Nodes, inputs: Nodes, outputs: Nodes) -> int:
        """Nanoseconds of one run, at least 1.

        Args:
            nodes: the operator's FX nodes, in topological order, with ``meta["val"]``.
            inputs: nodes outside whose storages it reads.
            outputs: the nodes whose values it writes to memory.
        """


def cost_form(nodes: Nodes, inputs: Nodes, outputs: Nodes) -> Hashable:
    """Equal for two operators that cost the same, whatever values the graph's symbols have.

    They compute the same of tensors of the same type, whose sizes and strides are the same
    expressions in the symbols; the names of nodes are not in it.  Arguments as those of
    `CostModel.cost_ns`.
    """
    numbers: dict[fx.Node, int] = {}

    def form(value: object) -> Hashable:
        if isinstance(value, fx.Node):
            if value.op == "get_attr":
                return value.target  # a graph of its own, for example
            return numbers.setdefault(value, len(numbers)), form(value.meta.get("val"))
        if isinstance(value, torch.Tensor):
            sizes = tuple(map(expression, value.shape))
            strides = tuple(map(expression, _strides(value)))
            return str(value.dtype), value.device.type, str(value.layout), sizes, strides
        if isinstance(value, torch.types.py_sym_types):
            return str(value.node.expr)
        if isinstance(value, list | tuple):
            return tuple(map(form, value))
        if isinstance(value, Mapping):
            return tuple((name, form(v)) for name, v in value.items())
        return type(value), str(value)

    read = tuple(map(form, inputs))
    computed = tuple((str(n.target), form(n.args), form(n.kwargs), form(n)) for n in nodes)
    return read, computed, tuple(map(form, outputs))


# --- the device ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    """What a device can do at best, from its data sheet.

    Attributes:
        matrix_flops: matrix products, floating-point operations a second, by dtype name
            (``"tf32"`` for float32 where TF32 is allowed); dense, float32 accumulation.
        vector_flops: everything else, operations a second.
        bandwidth: bytes a second to and from device memory.
        launch_ns: fixed cost of one kernel.
        random_ops: what one random number takes, in vector operations.
    """

    matrix_flops: Mapping[str, float]
    vector_flops: float
    bandwidth: float
    launch_ns: int
    random_ops: int

    def matrix_peak(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """Operations a second for matrix products of ``dtype``; unlisted dtypes run as vectors."""
        name = str(dtype).removeprefix("torch.")
        if tf32 and name == "float32" and "tf32" in self.matrix_flops:
            name = "tf32"
        return self.matrix_flops.get(name, self.vector_flops)


# Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section
# 3.3), of whose four results Inductor's kernels use one.  On a GPU each of ten rounds is two wide
# products and two logical instructions on the integer units, which issue a quarter of what the
# floating-point units count as operations.  On a CPU the kernels are not vectorized: a number
# takes some 80 cycles of a core (`bench.cost_model`), in which 16 vector operations each fit.
_GPU_RANDOM_OPS = 260
_CPU_RANDOM_OPS = 1_300


def _gpu(
    gigabytes_s: float, *, f16: float, f32: float, tf32: float = 0, f64: float = 0, f8: float = 0
) -> DevicePeaks:
    """Peaks of a GPU from data-sheet numbers in GB/s and TFLOP/s; 0 where it has no such units."""
    tera = {
        "float16": f16,
        "bfloat16": f16,
        "float32": f32,
        "tf32": tf32 or f32,
        "float64": f64 or f32 / 32,
        "int8": f8 or f16,
        "float8_e4m3fn": f8,
        "float8_e5m2": f8,
    }
    return DevicePeaks(
        {name: value * 1e12 for name, value in tera.items() if value},
        vector_flops=f32 * 1e12,
        bandwidth=gigabytes_s * 1e9,
        launch_ns=3_000,
        random_ops=_GPU_RANDOM_OPS,
    )


# Vendors' data sheets; "with sparsity" numbers halved.  The first name that occurs in
# `torch.cuda.get_device_properties(device).name` counts, so the longer names stand first.
GPU_PEAKS: Mapping[str, DevicePeaks] = {
    "B200": _gpu(7700, f16=2250, f32=75, tf32=1125, f64=37, f8=4500),
    "GH200": _gpu(4000, f16=989, f32=67, tf32=494, f64=67, f8=1979),
    "H200": _gpu(4800, f16=989, f32=67, tf32=494, f64=67, f8=1979),
    "H100 NVL": _gpu(3900, f16=835, f32=60, tf32=417, f64=60, f8=1670),
    "H100 PCIe": _gpu(2000, f16=756, f32=51, tf32=378, f64=51, f8=1513),
    "H100": _gpu(3350, f16=989, f32=67, tf32=494, f64=67, f8=1979),
    "A100-SXM4-40GB": _gpu(1555, f16=312, f32=19.5, tf32=156, f64=19.5),
    "A100-PCIE-40GB": _gpu(1555, f16=312, f32=19.5, tf32=156, f64=19.5),
    "A100": _gpu(2039, f16=312, f32=19.5, tf32=156, f64=19.5),
    "A10G": _gpu(600, f16=70, f32=31.5, tf32=35),
    "A10": _gpu(600, f16=125, f32=31.2, tf32=62.5),
    "A40": _gpu(696, f16=149.7, f32=37.4, tf32=74.8),
    "L40S": _gpu(864, f16=362, f32=91.6, tf32=183, f8=733),
    "L40": _gpu(864, f16=181, f32=90.5, tf32=90.5, f8=362),
    "L4": _gpu(300, f16=121, f32=30.3, tf32=60, f8=242),
    "V100": _gpu(900, f16=125, f32=15.7, f64=7.8),
    "T4": _gpu(320, f16=65, f32=8.1),
    "RTX 6000 Ada": _gpu(960, f16=364, f32=91.1, tf32=182, f8=728),
    "RTX 5090": _gpu(1792, f16=209.5, f32=104.8, tf32=104.8, f8=419),
    "RTX 4090": _gpu(1008, f16=165.2, f32=82.6, tf32=82.6, f8=330),
    "RTX 3090": _gpu(936, f16=71, f32=35.6, tf32=35.6),
    "MI300X": _gpu(5300, f16=1307, f32=163.4, tf32=653.7, f64=163.4, f8=2615),
    "MI250": _gpu(1638, f16=191.5, f32=47.9, f64=47.9),
}

# A GPU of no known name is priced as this one.
_UNKNOWN_GPU = "A100"

# One fixed machine, so that plans do not depend on where they were made: 8 cores with AVX2 at
# 3 GHz (8 * 32 * 3e9 = 768 GFLOP/s) and two channels of DDR4-3200 (51 GB/s).
CPU_PEAKS = DevicePeaks(
    {"float32": 768e9, "float64": 384e9, "bfloat16": 768e9, "float16": 768e9},
    vector_flops=384e9,
    bandwidth=51e9,
    launch_ns=3_000,
    random_ops=_CPU_RANDOM_OPS,
)

# What a product takes longer by if the rows of an operand, or of the result, are not all at
# multiples of so many bytes, on tensor cores (`bench.gpu`, part "costs", on an H100: 5.2 to 7.6 for
# bfloat16 of odd width, 3.0 for even ones; 2.6 to 3.0 for TF32).  Without tensor cores it is 1.
_TENSOR_CORE_ALIGNMENT = 16
_MISALIGNED_SLOWDOWN = {2: 6.0, 4: 3.0, 8: 3.0}

# What well-written kernels reach of the data sheet.
_MATRIX_EFFICIENCY = 0.7
_BANDWIDTH_EFFICIENCY = 0.8


def device_peaks(device: torch.device) -> DevicePeaks:
    """The peaks that the roofline uses for ``device``."""
    if device.type == "cpu":
        return CPU_PEAKS
    if device.type == "cuda":
        name = torch.cuda.get_device_properties(device).name
        for known, peaks in GPU_PEAKS.items():
            if known.lower() in name.lower():
                return peaks
    else:
        name = device.type
    log.warning(
        "no data sheet for device %r; its operators are priced as on %s."
        " Add it to dtrcompile.passes.device.costs.GPU_PEAKS for better plans",
        name,
        _UNKNOWN_GPU,
    )
    return GPU_PEAKS[_UNKNOWN_GPU]


# --- sizes --------------------------------------------------------------------------------------

# Inductor's own default for a size that no guard and no example bounds.
_UNBACKED_SIZE = 8192


def size_hint(size: int | torch.SymInt) -> int:
    """A size as a number; one that only the data will tell costs something."""
    return hint(size, _UNBACKED_SIZE)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]


def _numel(tensor: torch.Tensor) -> int:
    """Elements, those that an expanded dimension repeats counted once."""
    count = 1
    for size, stride in zip(tensor.shape, _strides(tensor), strict=True):
        if size_hint(stride) != 0:
            count *= size_hint(size)
    return count


def _strides(tensor: torch.Tensor) -> Sequence[int | torch.SymInt]:
    if tensor.layout is not torch.strided:
        return [1] * tensor.dim()
    return tensor.stride()


def _bytes_of(node: fx.Node) -> int:
    return sum(_numel(t) * t.element_size() for t in _tensors(node))


def is_kernel(node: fx.Node) -> bool:
    """Whether the node computes something: it is no view, no item of a tuple, no size."""
    return role(node) in (Role.FUSED, Role.KERNEL)


# These read only the rows of their first argument that the indices name.
_GATHERS = frozenset({aten.embedding, aten.index, aten.gather, aten.index_select, aten.take})


def _bytes_read(node: fx.Node, inside: frozenset[fx.Node]) -> int:
    """Bytes of ``node`` that the operator made of ``inside`` reads: less than all of a sliced base
    or of a gathered table."""
    whole = _bytes_of(node)
    read = 0
    for user in node.users:
        if user not in inside:
            continue
        if not is_kernel(user):
            read += _bytes_read(user, inside)
        elif packet(user) in _GATHERS and user.args[0] is node:
            read += _bytes_of(user)
        else:
            return whole
    return min(whole, read) if read else whole


def bytes_moved(nodes: Nodes, inputs: Nodes, outputs: Nodes) -> int:
    """Bytes from and to device memory, each counted once."""
    inside = frozenset(nodes)
    return sum(_bytes_read(n, inside) for n in inputs) + sum(_bytes_of(n) for n in outputs)


# --- the roofline -------------------------------------------------------------------------------

# Vector operations an element, where it is not about one.  Counted from vectorized libm kernels
# (polynomial of degree 5 to 10 plus range reduction).
_HEAVY_FLOPS: Mapping[str, int] = {
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tan"), 12),
    **dict.fromkeys(("tanh", "sigmoid", "erf", "erfc", "erfinv", "log_softmax", "_softmax"), 16),
    **dict.fromkeys(("_log_softmax", "gelu", "silu", "softplus", "mish", "elu", "atan2"), 16),
    **dict.fromkeys(("pow", "lgamma", "digamma", "sinh", "cosh", "asin", "acos", "atan"), 24),
    **dict.fromkeys(("div", "sqrt", "rsqrt", "reciprocal", "fmod", "remainder"), 4),
}

# Operators that make a random number for each element.
_RANDOM = frozenset(
    {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like"}
    | {"inductor_random", "inductor_randint", "native_dropout", "bernoulli"}
)

# Operators without a formula in torch that are another one's with other trailing arguments.
_SAME_FLOPS: Mapping[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
    aten._scaled_dot_product_fused_attention_overrideable: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_fused_attention_overrideable_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
    aten.mkldnn_convolution: aten.convolution,
}


def flop_formula(node: fx.Node) -> Callable[..., int] | None:
    """torch's count for the node's operator, or None where it is not a matrix product."""
    target = packet(node)
    return flop_registry.get(_SAME_FLOPS.get(target, target))


def _on_meta(value: object) -> object:
    """An FX argument as flop formulas want it: tensors with plain sizes, symbols as ints."""
    if isinstance(value, fx.Node):
        return tree_map(_on_meta, value.meta.get("val"))
    if isinstance(value, torch.Tensor):
        shape = [size_hint(s) for s in value.shape]
        return torch.empty(shape, dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    return value


def matrix_flops(node: fx.Node) -> int | None:
    """Floating-point operations of a matrix product, convolution or attention; None for others."""
    formula = flop_formula(node)
    if formula is None:
        return None
    args, kwargs = tree_map(_on_meta, (node.args, node.kwargs))
    try:
        with disable_modes():
            return int(formula(*args, **kwargs, out_val=_on_meta(node)))
    except Exception as error:
        # torch's formulas assume their own operator's exact signature, which changes between
        # versions.  A cost is advice: the bytes still give one.
        log.warning("no FLOP count for %s (%s); priced by its bytes", node.target, error)
        return None


def vector_flops(node: fx.Node, random_ops: int) -> int:
    """Operations of anything else: one an element, more for transcendental functions.

    Args:
        random_ops: of one random number.
    """
    if not is_kernel(node):
        return 0
    sizes = [_numel(t) for t in _tensors(node)]
    sizes += [_numel(t) for n in node.all_input_nodes for t in _tensors(n)]
    name = getattr(packet(node), "__name__", "")
    each = random_ops if name in _RANDOM else _HEAVY_FLOPS.get(name, 1)
    return max(sizes, default=0) * each


def _tf32_allowed(node: fx.Node) -> bool:
    """Whether the user lets this float32 product run on tensor cores."""
    if "conv" in str(node.target):
        return torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


_PRODUCTS = frozenset(
    {
        torch.ops.aten.mm,
        torch.ops.aten.addmm,
        torch.ops.aten.bmm,
        torch.ops.aten.baddbmm,
    }
)


def _slowdown(node: fx.Node) -> float:
    """What rows that tensor cores cannot read at once cost a product on a GPU."""
    matrices = [t for n in (*node.all_input_nodes, node) for t in _tensors(n) if t.dim() >= 2]
    is_on_gpu = any(matrix.device.type != "cpu" for matrix in matrices)
    if packet(node) not in _PRODUCTS or not is_on_gpu:
        return 1.0
    return misaligned_slowdown(map(row_bytes, matrices))


def misaligned_slowdown(rows_bytes: Iterable[int]) -> float:
    """How many times as long a product takes on tensor cores as one of aligned rows.

    Args:
        rows_bytes: from one row to the next, of operands and result.
    """
    return _MISALIGNED_SLOWDOWN.get(math.gcd(_TENSOR_CORE_ALIGNMENT, *rows_bytes), 1.0)


def row_bytes(matrix: torch.Tensor) -> int:
    """From one row, or one column, of a matrix to the next; of a batch of matrices, too."""
    return max(map(size_hint, matrix.stride()[-2:])) * matrix.element_size()


class RooflineCostModel(CostModel):
    """max(arithmetic at the device's peak, bytes moved once at its bandwidth) + a launch.

    Matrix FLOPs come from `torch.utils.flop_counter`'s registry.  Data-sheet peaks are scaled by
    what kernels reach in practice (0.7 of the matrix peak, 0.8 of the bandwidth).  Products of
    matrices whose rows tensor cores cannot read at once take several times as long.
    """

    name = "roofline"

    def __init__(self, device: torch.device, peaks: DevicePeaks | None = None) -> None:
        self.peaks = device_peaks(device) if peaks is None else peaks

    def cost_ns(self, nodes: Nodes, inputs: Nodes, outputs: Nodes) -> int:
        if not any(is_kernel(n) for n in nodes):
            return 1
        compute_s = self.compute_s(nodes)
        memory_s = bytes_moved(nodes, inputs, outputs) / (
            self.peaks.bandwidth * _BANDWIDTH_EFFICIENCY
        )
        return self.peaks.launch_ns + round(max(compute_s, memory_s) * 1e9)

    def compute_s(self, nodes: Nodes) -> float:
        """Seconds of arithmetic alone."""
        matrix_s, vector_ops = 0.0, 0
        for node in nodes:
            flops = matrix_flops(node)
            if flops is None:
                vector_ops += vector_flops(node, self.peaks.random_ops)
                continue
            operand = next(t for n in node.all_input_nodes for t in _tensors(n))
            peak = self.peaks.matrix_peak(operand.dtype, tf32=_tf32_allowed(node))
            slowdown = _slowdown(node) if peak > self.peaks.vector_flops else 1.0
            matrix_s += slowdown * flops / (peak * _MATRIX_EFFICIENCY)
        return matrix_s + vector_ops / self.peaks.vector_flops


# --- the measurement ----------------------------------------------------------------------------

_MEASURE_S = 0.01
_COPY_BYTES_MIN = 1 << 12


def cache_directory() -> Path:
    """``$DTRCOMPILE_CACHE_DIR``, or ``dtrcompile`` under the user's cache directory."""
    given = os.environ.get("DTRCOMPILE_CACHE_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtrcompile"


def device_key(device: torch.device) -> str:
    """What a measured time is valid for, beside the version of torch."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).name
    return f"{device.type} {platform.machine()} {cpu_name()} x{torch.get_num_threads()}"


def cpu_name() -> str:
    """The CPU's model, which decides how long its libraries take, and what they hold inside."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


class CostCache:
    """Measured times on disk: JSON lines ``{"device", "torch", "operator", "cost_ns"}``.

    Each record is appended by one write, so that processes may share the file; of two records for
    one operator the later counts.  A line that cannot be read is skipped with a warning, and a
    directory that cannot be written costs a warning and the memory of what was measured.
    """

    def __init__(self, directory: Path, device: str, torch_version: str) -> None:
        self.path = directory / "costs.jsonl"
        self.device = device
        self.torch_version = torch_version
        self._warned = False
        self._costs: dict[str, int] = dict(self._read())

    def _read(self) -> Iterable[tuple[str, int]]:
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("cannot read measured costs: %s", error)
            return
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                key = (record["device"], record["torch"])
                name, cost_ns = record["operator"], record["cost_ns"]
            except (ValueError, KeyError, TypeError):
                log.warning("%s:%d: not a measured cost; ignored", self.path, number)
                continue
            if type(cost_ns) is not int or cost_ns < 1:
                log.warning("%s:%d: cost_ns %r is no cost; ignored", self.path, number, cost_ns)
            elif key == (self.device, self.torch_version):
                yield name, cost_ns

    def get(self, operator_key: str) -> int | None:
        """The remembered time, or None."""
        return self._costs.get(operator_key)

    def put(self, operator_key: str, cost_ns: int) -> None:
        """Remember a time, here and on disk."""
        self._costs[operator_key] = cost_ns
        record = {
            "device": self.device,
            "torch": self.torch_version,
            "operator": operator_key,
            "cost_ns": cost_ns,
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # The newline in front ends a line that a killed process left unfinished.
            data = f"\n{json.dumps(record, sort_keys=True)}\n".encode()
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)
        except OSError as error:
            if not self._warned:
                log.warning("cannot write measured costs, so they are not kept: %s", error)
                self._warned = True


def round_cost(cost_ns: float) -> int:
    """Two significant digits, so that jitter seldom shows: 12,345 -> 12,000."""
    return max(1, int(float(f"{cost_ns:.1e}")))


class MeasuredCostModel(CostModel):
    """The time that the device takes, for each distinct operator measured once.

    An operator of one node is run alone.  A cone would run as many eager kernels where Inductor
    makes one, so it is priced by a copy of as many bytes, which is measured, or by the roofline's
    arithmetic where that is more.  What cannot be run falls back to the roofline, with one warning
    an operator.  Random state is left as it was.
    """

    name = "measured"

    def __init__(self, device: torch.device, cache: CostCache | None = None) -> None:
        self.device = device
        self.roofline = RooflineCostModel(device)
        if cache is None:
            cache = CostCache(cache_directory(), device_key(device), torch.__version__)
        self.cache = cache
        self._failed: set[str] = set()

    def cost_ns(self, nodes: Nodes, inputs: Nodes, outputs: Nodes) -> int:
        kernels = [n for n in nodes if is_kernel(n)]
        if not kernels:
            return 1
        if len(kernels) == 1:
            cost_ns = self._measured(operator_key(kernels[0]), lambda: _node_call(kernels[0]))
            if cost_ns is not None:
                return cost_ns
            return self.roofline.cost_ns(nodes, inputs, outputs)
        arithmetic_ns = round(self.roofline.compute_s(nodes) * 1e9)
        return max(1, arithmetic_ns, self._copy_ns(bytes_moved(nodes, inputs, outputs)))

    def _copy_ns(self, moved_bytes: int) -> int:
        """Time to move so many bytes, from a measured copy of the next power of two."""
        copied_bytes = max(_COPY_BYTES_MIN, 1 << (moved_bytes - 1).bit_length())
        measured = self._measured(
            f"copy {copied_bytes}", lambda: _copy_call(copied_bytes, self.device)
        )
        peaks = self.roofline.peaks
        if measured is None:
            bandwidth = peaks.bandwidth * _BANDWIDTH_EFFICIENCY
            return peaks.launch_ns + round(moved_bytes / bandwidth * 1e9)
        launch_ns = min(peaks.launch_ns, measured)
        return launch_ns + round((measured - launch_ns) * moved_bytes / copied_bytes)

    def _measured(self, key: str, make_call: Callable[[], Call]) -> int | None:
        """The cached or newly measured time, or None where it cannot run here."""
        cost_ns = self.cache.get(key)
        if cost_ns is not None or key in self._failed:
            return cost_ns
        log.info("measuring %s", key)
        try:
            with disable_modes(), torch.no_grad(), _kept_random_state(self.device):
                cost_ns = round_cost(time_ns(make_call()))
        except Exception as error:
            # Whatever goes wrong (out of memory, no kernel, an opaque argument): a cost is advice.
            self._failed.add(key)
            log.warning(
                "cannot measure %s (%s: %s); its cost is the roofline's",
                key,
                type(error).__name__,
                str(error).partition("\n")[0],
            )
            return None
        log.info("measured %s: %d ns", key, cost_ns)
        self.cache.put(key, cost_ns)
        return cost_ns


Call: TypeAlias = Callable[[], object]


def time_ns(call: Call) -> float:
    """Median time of one call, warmed up; CUDA calls are queued and waited for together."""
    call()
    timer = benchmark.Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=_MEASURE_S).median * 1e9


def operator_key(node: fx.Node) -> str:
    """Everything that the node's time depends on, as one line; no name of a node is in it."""

    def describe(value: object) -> str:
        if isinstance(value, fx.Node):
            return describe(value.meta.get("val"))
        if isinstance(value, torch.Tensor):
            shape = [size_hint(s) for s in value.shape]
            strides = [size_hint(s) for s in _strides(value)]
            return f"{str(value.dtype).removeprefix('torch.')}{shape}{strides}"
        if isinstance(value, torch.SymInt):
            return str(size_hint(value))
        if isinstance(value, list | tuple):
            return f"[{', '.join(describe(v) for v in value)}]"
        return str(value)

    arguments = [describe(a) for a in node.args]
    arguments += [f"{name}={describe(v)}" for name, v in node.kwargs.items()]
    return f"{node.target}({', '.join(arguments)})"


def _node_call(node: fx.Node) -> Call:
    target = node.target

    def real(name: str, argument: object) -> object:
        device = torch.device("cpu") if is_on_cpu(target, name) else None
        return tree_map(lambda value: _real(value, device), argument)

    args, kwargs = map_by_name(target, real, node.args, node.kwargs)
    if not callable(target):
        raise TypeError(f"{target!r} is not a function")
    return lambda: target(*args, **kwargs)


def _copy_call(moved_bytes: int, device: torch.device) -> Call:
    source = torch.zeros(moved_bytes // 2, dtype=torch.uint8, device=device)
    destination = torch.zeros_like(source)
    return lambda: destination.copy_(source)


def _real(value: object, device: torch.device | None) -> object:
    """A tensor of the argument's size, stride and dtype that holds harmless values.

    Args:
        device: of the tensor; None: the argument's.
    """
    if isinstance(value, fx.Node):
        return tree_map(lambda inner: _real(inner, device), value.meta.get("val"))
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape = [size_hint(s) for s in value.shape]
    strides = [size_hint(s) for s in _strides(value)]
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
    device = device or value.device
    _check_fits(extent * value.element_size(), device)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        # Not zeros, with which some devices draw less power and so run faster.
        flat = torch.linspace(-1.0, 1.0, extent, device=device).to(value.dtype)
    else:
        # Zero is a valid index into anything that is not empty.
        flat = torch.zeros(extent, dtype=value.dtype, device=device)
    return flat.as_strided(shape, strides)


def _check_fits(size_bytes: int, device: torch.device) -> None:
    """Refuse what would take most of a machine's memory: the kernel kills rather than raise."""
    if device.type != "cpu":
        return
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size_bytes > free_bytes // 4:
        raise MemoryError(f"an argument of {size_bytes} bytes does not fit in memory comfortably")


def _kept_random_state(device: torch.device) -> Any:
    devices = [device] if device.type == "cuda" else []
    return torch.random.fork_rng(devices=devices)


# --- the table ----------------------------------------------------------------------------------

COST_MODELS: dict[str, type[RooflineCostModel] | type[MeasuredCostModel]] = {
    model.name: model for model in (RooflineCostModel, MeasuredCostModel)
}


def make_cost_model(name: str, device: torch.device) -> CostModel:
    """The cost model called ``name``, for ``device``.

    Raises:
        OptionError: if there is none of this name.
    """
    if name not in COST_MODELS:
        raise OptionError.unknown("cost model", name, COST_MODELS)
    return COST_MODELS[name](device)
