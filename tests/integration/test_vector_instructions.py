"""The checks of the CPU's vector instructions are compiled before Inductor asks for them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own, because Inductor and this package ask once in a process.
_SCRIPT = """
import json, os, threading
from pathlib import Path

from dtrcompile.passes.inductor.vector_instructions import compile_checks_beforehand
from dtrcompile.passes.torch_private import supported_vec_isa_list
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

def built():
    return sorted(path.name for path in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so"))

def flags():
    return [(str(isa), isa._arch_flags) for isa in supported_vec_isa_list]

before = flags()
for _ in range(2):
    compile_checks_beforehand()
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
are_untouched = flags() == before
beforehand = built()
valid = [str(isa) for isa in valid_vec_isa_list()]
print(json.dumps([are_untouched, beforehand, built(), valid]))
"""


def run(folder: Path, **environment: str) -> tuple[bool, list[str], list[str], list[str]]:
    given = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_VEC_ISA_OK"}
    given |= {"TORCHINDUCTOR_CACHE_DIR": str(folder), **environment}
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    are_untouched, beforehand, afterwards, valid = json.loads(done.stdout.splitlines()[-1])
    return are_untouched, beforehand, afterwards, valid


@pytest.mark.slow
def test_inductor_finds_all_that_it_asks_for(tmp_path: Path) -> None:
    are_untouched, beforehand, afterwards, valid = run(tmp_path)
    assert are_untouched
    assert beforehand == afterwards
    if platform.machine() == "x86_64":  # elsewhere, Inductor compiles nothing of the kind
        assert bool(valid) == bool(beforehand)


def test_nothing_is_compiled_where_the_user_says_what_there_is(tmp_path: Path) -> None:
    _, beforehand, afterwards, _ = run(tmp_path, TORCHINDUCTOR_VEC_ISA_OK="0")
    assert beforehand == afterwards == []
