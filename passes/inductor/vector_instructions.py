"""The programs that tell which vector instructions a CPU has, compiled while a model is traced.

Before Inductor writes its first C++ kernel, it compiles and loads a small program for each set of
instructions, one after the other: six seconds with an empty cache folder.  Here they are compiled
side by side beforehand, into the same folder.  Inductor still asks for all of them itself, and
finds the files, or waits for the lock of the one that is being compiled.  Nothing else is shared
with it.
"""

from __future__ import annotations

import copy
import logging
import os
import platform
import threading

import torch

from dtrcompile.passes.torch_private import (
    VecAMX,
    VecAVX512,
    VecAVX512VNNI,
    VecISA,
    inductor_config,
    supported_vec_isa_list,
    x86_isa_checker,
)

log = logging.getLogger("dtrcompile")

_LOCK = threading.Lock()
_is_begun = False
_MAX_THREADS = 4


def compile_checks_beforehand() -> None:
    """Begin to compile the programs in other threads, once in a process."""
    global _is_begun
    with _LOCK:
        if _is_begun:
            return
        _is_begun = True
    if inductor_config.cpp.vec_isa_ok is not None or platform.machine() not in ("x86_64", "AMD64"):
        return  # Inductor compiles none, or another one for each CPU
    checks = _checks()
    n_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    for first in range(n_threads):
        threading.Thread(
            target=_compile,
            args=(checks[first::n_threads],),
            name=f"dtrcompile vector instructions {first}",
            daemon=True,
        ).start()


def _checks() -> list[tuple[VecISA, str]]:
    """Sets of instructions, each with a program that uses it, in the order in which Inductor asks.

    The objects are not Inductor's own, which change while it asks them.
    """
    flags = x86_isa_checker()
    found = []
    for known in supported_vec_isa_list:
        if all(flag in flags for flag in str(known).split()):
            isa = type(known)()
            found.append((isa, VecISA._avx_code))
            if isinstance(isa, VecAVX512) and torch.cpu._is_avx512_bf16_supported():
                found.append((_with_flag(isa, "-mavx512bf16"), VecAVX512._avx512_bf16_code))
                isa = type(known)()  # whose later programs may have that flag as well
                isa._is_avx512_bf16_supported = True
            if isinstance(isa, VecAVX512VNNI) and torch.cpu._is_vnni_supported():
                found.append((isa, VecAVX512VNNI._avx512_vnni_code))
            if isinstance(isa, VecAMX):
                found.append((isa, VecAMX._amx_code))
                if torch.cpu._is_amx_fp16_supported():
                    found.append((_with_flag(isa, "-mamx-fp16"), VecAMX._amx_fp16_code))
    return found


def _with_flag(isa: VecISA, flag: str) -> VecISA:
    changed = copy.copy(isa)
    changed._arch_flags = f"{isa._arch_flags} {flag}"
    return changed


def _compile(checks: list[tuple[VecISA, str]]) -> None:
    for isa, code in checks:
        try:
            isa.check_build(code)
        except Exception as error:  # Inductor asks again, and says what is wrong
            log.debug("the check of %s failed beforehand: %s", isa, error)
            return
