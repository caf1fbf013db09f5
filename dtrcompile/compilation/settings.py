"""The user's settings of Inductor, as patches of its configuration."""

from __future__ import annotations

from typing import Any

from dtrcompile.options import Options
from dtrcompile.passes.errors import OptionError
from dtrcompile.passes.torch_private import inductor_config, list_mode_options


def inductor_patches(options: Options) -> dict[str, Any]:
    """Name of a setting -> its value, from the option ``inductor`` and its mode.

    Raises:
        OptionError: if Inductor has no setting of that name.
    """
    patches: dict[str, Any] = {}
    if options.inductor_mode is not None:
        patches.update(list_mode_options(options.inductor_mode))
    patches.update(options.inductor_patches)
    known = inductor_config.get_config_copy()
    for name in patches:
        if name.replace("-", "_") not in known:
            raise OptionError.unknown("Inductor setting", name, known)
    return {name.replace("-", "_"): value for name, value in patches.items()}
