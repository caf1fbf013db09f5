"""Which vector instructions the CPU has, found out while a model is traced.

Inductor compiles and loads a small program for each set of instructions before it writes the first
C++ kernel, and waits for it: six seconds with an empty cache folder, half a second otherwise.
"""

from __future__ import annotations

import contextvars
import threading

from dtrcompile.passes.torch_private import valid_vec_isa_list

_LOCK = threading.Lock()
_is_asked = False


def find_out_beforehand() -> None:
    """Have another thread ask, once in a process, under the settings that are active.

    A compilation that asks meanwhile waits for the same files, which Inductor locks.
    """
    global _is_asked
    with _LOCK:
        if _is_asked:
            return
        _is_asked = True
    context = contextvars.copy_context()
    threading.Thread(
        target=context.run, args=(valid_vec_isa_list,), name="dtrcompile-vector", daemon=True
    ).start()
