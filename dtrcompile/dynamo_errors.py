"""Errors that leave Dynamo as what they are.

Dynamo wraps what a backend raises in its own ``BackendCompilerFailed``, with a traceback of a
hundred lines and advice on debugging Dynamo below the text.  An error that is one of Dynamo's own
is passed on as it is, so ours are given to Dynamo as both: ``except InfeasibleBudgetError`` catches
one, and so does ``except BackendCompilerFailed``.
"""

from __future__ import annotations

import types
from typing import Any

from dtrcompile.passes.errors import DTRError
from dtrcompile.passes.torch_private import BackendCompilerFailed, dynamo_config


class _Passing(BackendCompilerFailed):  # type: ignore[misc]
    """Of an error of ours, what Dynamo looks at.

    Attributes:
        inner_exception: the error itself.
    """

    inner_exception: DTRError

    def __str__(self) -> str:
        # (Dynamo adds its advice to the arguments.)
        return str(self.inner_exception)

    def __reduce__(self) -> Any:
        return self.inner_exception.__reduce__()

    def remove_dynamo_frames(self) -> Any:
        """Called by Dynamo where the compiled model was called: nothing below is the user's."""
        if dynamo_config.verbose:
            return self
        return self.with_traceback(None)


def for_dynamo(error: DTRError, backend: object) -> DTRError:
    """The same error, as one that Dynamo passes on to the user.

    Args:
        backend: what raises it.
    """
    if isinstance(error, BackendCompilerFailed):
        return error
    given = type(error)
    # It is shown by its name, and pickled as what it is.
    members = {"__module__": "dtrcompile", "__doc__": given.__doc__}
    kind = types.new_class(given.__name__, (_Passing, given), exec_body=lambda n: n.update(members))
    made: Any = Exception.__new__(kind)
    BackendCompilerFailed.__init__(made, backend, error, None)
    made.__dict__.update(error.__dict__)
    made.args = error.args
    return made  # type: ignore[no-any-return]
