"""Where in the user's program the operators and storages of a `Program` come from."""

from __future__ import annotations

import os
from dataclasses import dataclass

_INSTALLED = f"{os.sep}site-packages{os.sep}"


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of the user's program.

    Attributes:
        code: the text of the line; empty where it could not be read.
    """

    file: str
    line: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        """File and line; the file from the present folder, or from the installed packages, on."""
        file, folder = self.file, f"{os.getcwd()}{os.sep}"
        if file.startswith(folder):
            file = file[len(folder) :]
        return f"{file.rpartition(_INSTALLED)[2]}:{self.line}"


@dataclass(frozen=True, slots=True)
class Source:
    """Where something comes from.

    Attributes:
        module: path of the submodule, such as ``"blocks.0.norm"``; empty for the model itself, and
            where it is not known.
        frames: of the user's program, the outermost first; empty where they are not known.
    """

    module: str = ""
    frames: tuple[Frame, ...] = ()

    def __str__(self) -> str:
        """The module, and the innermost line."""
        line = str(self.frames[-1]) if self.frames else ""
        return ", ".join(part for part in (self.module, line) if part)


NOWHERE = Source()


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What a storage holds.

    Attributes:
        name: of a parameter, buffer or input as the user's program reads it; empty for what is
            computed.
        shape: of its owner; empty for a scalar.
        dtype: without ``torch.``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Sources:
    """Of a program.

    Attributes:
        operators: one entry an operator.
        storages: one entry a storage.
    """

    operators: tuple[Source, ...]
    storages: tuple[TensorForm, ...]
