"""What a command line names as the model: a user's ``module:callable``.

The callable takes no arguments and returns the model and its inputs.  The name of a configuration
class of the transformers library stands for its model, without data, and inputs of a given size.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from dtrcompile.configured_model import UserModel, is_config, model_of_config
from dtrcompile.passes.errors import OptionError

_EXPECTED = (
    "It has to return the model and what the model is called with, such as `return model, x` or"
    " `return model, (x, labels)`"
)


def user_model(name: str, batch: int | None = None, length: int | None = None) -> UserModel:
    """Import the module, and call what it names.

    Args:
        name: ``package.module:callable``; modules are looked for in the present folder too.
        batch, length: of the inputs of a configuration's model, in samples and in tokens.

    Raises:
        OptionError: if that fails, in one line that says at which line of the user's.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise OptionError(f"{name!r} is not of the form module:callable, such as train:make.")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module_name}.".startswith(f"{error.name}."):
            raise OptionError(f"{module_name} cannot be imported: {_told(error)}") from error
        raise OptionError(
            f"there is no module {module_name!r} in {folder} or among the installed packages."
        ) from error
    except (Exception, SystemExit) as error:
        raise OptionError(f"{module_name} cannot be imported: {_told(error)}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise OptionError(f"the module {module_name!r} has no {path!r}.")
        found = getattr(found, part)
    if not callable(found):
        raise OptionError(f"{name} is {type(found).__name__}, and cannot be called. {_EXPECTED}.")
    if is_config(found):
        return model_of_config(found, batch, length)
    if batch is not None or length is not None:
        raise OptionError(
            f"--batch and --length are for configurations of transformers; {name} makes its own"
            " inputs."
        )
    try:
        returned = found()
    except (Exception, SystemExit) as error:
        if not isinstance(error, SystemExit) and not _users_frames(error):
            raise OptionError(f"{name} has to be called without arguments: {error}.") from error
        raise OptionError(f"{name} raised {_told(error)}") from error
    return _of_returned(name, returned)


def _of_returned(name: str, returned: Any) -> UserModel:
    if not isinstance(returned, Sequence) or len(returned) < 2 or not callable(returned[0]):
        raise OptionError(f"{name} returned {type(returned).__name__}. {_EXPECTED}.")
    model, *inputs = returned
    if len(inputs) == 1 and isinstance(inputs[0], (tuple, list)):
        inputs = list(inputs[0])
    return UserModel(model, tuple(inputs))


def _told(error: BaseException) -> str:
    """An exception in one line, with the innermost line of its traceback."""
    text = " ".join(str(error).split())
    frames = _users_frames(error)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}"


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
