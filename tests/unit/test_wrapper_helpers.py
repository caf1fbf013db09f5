"""Functions that Inductor's wrappers get from PyTorch's C++ are known, in this release."""

from __future__ import annotations

import inspect
import re

from torch._inductor.codegen import wrapper

from dtrcompile.passes.inductor.wrapper_run import helpers

# In the text that wrappers begin with, or in a line that is added to one.
_ASSIGNED = re.compile(r"^[ \t]+(\w+) = torch\._C\.", re.MULTILINE)
_IMPORTED = re.compile(
    r"[\"']from torch\.(?:_C|_inductor\.runtime\.runtime_utils)\b[\w.]* import (\w+)"
)
# They are given no sizes that a plan has: a device's number; buffers of symmetric memory.
_WITHOUT_SIZES = {"get_raw_stream", "empty_strided_p2p"}


def test_each_function_that_is_given_sizes_has_a_stand_in() -> None:
    source = inspect.getsource(wrapper)
    found = {*_ASSIGNED.findall(source), *_IMPORTED.findall(source)}
    assert {"assert_size_stride", "empty_strided_cpu", "reinterpret_tensor"} <= found
    missing = found - set(helpers()) - _WITHOUT_SIZES
    assert not missing, f"give {missing} a stand-in in wrapper_run.helpers, if they are given sizes"
