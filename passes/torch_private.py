"""The only module that imports private torch API.  Checked on torch 2.11 to 2.15.

Everything else in the project imports these names from here, so that a new torch release is one
file to look at.  A release that nobody has tried is refused before the first of them is imported:
importing this module is the first use of the backend.
"""

# Names are grouped by what they are used for; most are used by exactly one module.
# ruff: noqa: F401, I001  (this module exists to re-export, by use)
# ruff: noqa: E402  (the release is looked at before anything is imported from it)

from __future__ import annotations

import os

import torch

from dtrcompile.passes.releases import require_supported

require_supported(torch.__version__, os.environ)
# --- what Dynamo does not put into a graph --------------------------------------------------------
from torch._dynamo import config as dynamo_config
from torch._dynamo import mark_static_address
from torch._dynamo.cache_size import exceeds_recompile_limit
from torch._dynamo.callback import CallbackTrigger, callback_handler
from torch._dynamo.convert_frame import output_codes
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._dynamo.exc import (
    BackendCompilerFailed,
    SkipFrame,
    TensorifyScalarRestartAnalysis,
    Unsupported,
    UserError,
    exceptions_allowed_to_be_fallback,
)
from torch._dynamo.utils import counters
from torch._dynamo.utils import (
    get_hook_for_recompile_user_context as frame_compilation_hooks,
)
from torch._dynamo.utils import (
    register_hook_for_recompile_user_context as register_frame_compilation_hook,
)
from torch._dynamo.symbolic_convert import TensorifyState

# --- Dynamo's graph -----------------------------------------------------------------------------
from torch._C import _get_mkldnn_enabled as mkldnn_enabled
from torch._C import _set_mkldnn_enabled as set_mkldnn_enabled

# --- capture and emission ---------------------------------------------------------------------
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._functorch._aot_autograd.descriptors import (
    ForwardTokenAOTInput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.graph_compile import collect_fw_donated_buffer_idxs
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module as make_graph_module
from torch.fx.experimental.symbolic_shapes import (
    find_symbol_binding_fx_nodes,
    free_symbols,
    is_symbol_binding_fx_node,
)
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

# --- the eager executor -------------------------------------------------------------------------
from torch._C import _AutoDispatchBelowADInplaceOrView as below_views

# --- measuring costs, and watching a step ---------------------------------------------------------
from torch._C._profiler import _EventType as EventType
from torch._C._profiler import _ExperimentalConfig as ExperimentalConfig
from torch.autograd import ProfilerConfig, ProfilerState
from torch.autograd import _disable_profiler_legacy as disable_profiler
from torch.autograd import _enable_profiler_legacy as enable_profiler
from torch.utils._python_dispatch import _disable_current_modes as disable_modes

# --- planning for a device that is not there ------------------------------------------------------
from torch._C import DispatchKey, DispatchKeySet
from torch._C import _ExcludeDispatchKeyGuard as ExcludeDispatchKeyGuard
from torch._dynamo import device_interface
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx as compile_fx_module
from torch._inductor import scheduler as inductor_scheduler
from torch._inductor.codegen.triton_split_scan import TritonSplitScanKernel
from torch._inductor.fx_passes import joint_graph, pad_mm
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._inductor.runtime.hints import DeviceProperties
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor as fake_tensor_module
from torch._subclasses.fake_tensor import _DISPATCH_META_HANDLERS as metadata_handlers
from torch.fx.experimental import proxy_tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _triton as triton_availability

# --- what the allocator counts --------------------------------------------------------------------
from torch.cuda.memory import _snapshot as allocator_snapshot

# --- what an optimizer's step holds ---------------------------------------------------------------
from torch.optim import optimizer as optimizer_module

# --- Inductor: lowering, scheduling, compilation ------------------------------------------------
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.choices import InductorChoices
from torch._inductor.compile_fx import (
    _CompileFxKwargs as CompileFxKwargs,
)
from torch._inductor.compile_fx import (
    _InProcessFxCompile as InProcessFxCompile,
)
from torch._inductor.compile_fx import (
    _recursive_joint_graph_passes as joint_graph_passes,
)
from torch._inductor.compile_fx import (
    compile_fx,
    compile_fx_inner,
    get_input_idxs_to_check,
    get_static_input_idxs,
    select_decomp_table,
)
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor import pattern_matcher
from torch._inductor.pattern_matcher import is_match
from torch._inductor.codegen import cpp as cpp_codegen
from torch._inductor.codegen.cpp import CppKernel, CppScheduling, CppVecKernel
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.codegen.wrapper import AllocateLine
from torch._inductor.cpu_vec_isa import (
    VecAMX,
    VecAVX512,
    VecAVX512VNNI,
    VecISA,
    supported_vec_isa_list,
    x86_isa_checker,
)
from torch._inductor import inductor_prims
from torch._inductor.ir import (
    NHWC_STRIDE_ORDER,
    ExternKernel,
    IRNode,
    MutationLayoutSHOULDREMOVE,
    TensorBox,
)
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.cudagraph_utils import BoxedDeviceIndex
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.scheduler import NopKernelSchedulerNode, SchedulerNode
from torch._inductor.utils import (
    BoxedBool,
    count_tangents,
    fresh_cache,
    op_dtype_propagation_rules,
    should_use_remote_fx_graph_cache,
)
from torch._inductor.virtualized import V

# --- Triton's kernels -----------------------------------------------------------------------------
from torch._inductor.runtime.benchmarking import InductorBenchmarker
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

# --- C++ kernels ----------------------------------------------------------------------------------
from torch._inductor.async_compile import AsyncCompile, get_compile_threads, kernel_code_log
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.exc import CppCompileError

# --- what is kept on disk -------------------------------------------------------------------------
from torch._inductor.codecache import torch_key, write_atomic
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.compiler._cache import CacheArtifactManager

# --- the backend --------------------------------------------------------------------------------
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import detect_fake_mode, dynamo_timed, get_chromium_event_logger
from torch._functorch import config as functorch_config
from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks
from torch._C import _storage_Use_Count as storage_use_count
from torch._logging import trace_structured
from torch.utils.checkpoint import CheckpointPolicy


def weak_storage_bytes(address: int) -> int:
    """Bytes of a storage that a `StorageWeakRef` refers to, by its ``cdata``; 0 if it is gone."""
    storage = torch.UntypedStorage._new_with_weak_ptr(address)
    return 0 if storage is None else int(storage.nbytes())


def tensor_use_count(tensor: torch.Tensor) -> int:
    """How many in C++ hold a tensor; 0 where the release of PyTorch does not tell."""
    use_count = getattr(tensor, "_use_count", None)
    return 0 if use_count is None else int(use_count())
