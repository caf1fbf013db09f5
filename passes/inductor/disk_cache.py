"""Entries on disk that later processes read: beside Inductor's own, and under the same settings.

An entry is a JSON object in a file of its own under ``TORCHINDUCTOR_CACHE_DIR``.  The entry repeats
its key and carries a checksum, so a file that was cut off, or that belongs to something else, is no
entry; and it is written under another name first, so two processes that write at once leave one
whole file.  A cache that cannot be read or written makes a compilation slower and nothing else.

``torch._inductor.config.force_disable_caches`` and ``fx_graph_cache`` switch the entries off, as
they do Inductor's code cache, `torch._inductor.utils.fresh_cache` hides them, and
`torch.compiler.save_cache_artifacts` packs them together with PyTorch's own.  (They travel as
artifacts of autotuning, whose format is the same: a JSON file at a path in the cache's folder.  A
type of our own could not be unpacked by a process that has not imported this package yet.)
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from dtrcompile.passes.device.costs import cpu_name
from dtrcompile.passes.process_switches import process_switches
from dtrcompile.passes.source_hash import hash_of_folders
from dtrcompile.passes.target.devices import Target, current_target
from dtrcompile.passes.torch_private import (
    CacheArtifactManager,
    cache_dir,
    functorch_config,
    inductor_config,
    torch_key,
    write_atomic,
)

log = logging.getLogger("dtrcompile")

_FOLDER = "dtrcompile"
_ARTIFACT_TYPE = "autotune"
# As long as Inductor waits for another process that compiles the same graph.
_LOCK_TIMEOUT_S = 600.0


def is_on() -> bool:
    """Whether entries are read and written."""
    return bool(inductor_config.fx_graph_cache) and not inductor_config.force_disable_caches


def key_of(kind: str, *parts: object, settings: tuple[str, ...] = ("",)) -> str | None:
    """The key of an entry: covers ``parts`` and all of the surroundings that compilations read.

    None where entries are off, or where a setting cannot be told from another by its text.

    Args:
        settings: only these settings of Inductor's count: those whose names begin so.  The others,
            and AOTAutograd's, are not the same while a graph is compiled and while it is loaded.
    """
    if not is_on():
        return None
    try:
        surroundings = _surroundings(settings)
    except _NotPlain as error:
        log.debug("nothing is kept on disk: %s", error)
        return None
    return digest_of(kind, *surroundings, *parts)


def digest_of(*parts: object) -> str:
    """A hash of the parts' texts and of their order: of a key and a name, that of another entry."""
    digest = hashlib.sha256()
    for part in parts:
        text = part if isinstance(part, bytes) else str(part).encode()
        digest.update(f"{len(text)} ".encode() + text)
    return digest.hexdigest()


def read(key: str | None) -> dict[str, Any] | None:
    """The entry of a key, None where there is none that is whole."""
    if key is None:
        return None
    try:
        stored = json.loads(_path(key).read_text(encoding="ascii"))
        entry = stored["entry"]
        if stored["key"] != key or stored["checksum"] != _checksum(entry):
            raise ValueError("it is another's, or was changed")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.debug("the entry %s is ignored: %s", key, error)
        return None
    _record(key, stored)
    assert isinstance(entry, dict)
    return entry


def write(key: str | None, entry: Mapping[str, Any]) -> None:
    """Keep an entry; where that is impossible, nothing is kept."""
    if key is None:
        return
    stored = {"key": key, "checksum": _checksum(entry), "entry": dict(entry)}
    try:
        write_atomic(str(_path(key)), json.dumps(stored).encode("ascii"), make_dirs=True)
    except OSError as error:
        log.debug("the entry %s is not kept: %s", key, error)
    _record(key, stored)


@contextlib.contextmanager
def one_at_a_time(key: str | None) -> Iterator[None]:
    """Processes that want to make the same entry make it one after the other, so one does."""
    lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if key is not None:
        path = _path(key).with_suffix(".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path).acquire(timeout=_LOCK_TIMEOUT_S)
        except (OSError, Timeout) as error:
            log.debug("no lock for the entry %s: %s", key, error)
    with lock:
        yield


def _path(key: str) -> Path:
    return Path(cache_dir()) / _relative_path(key)


def _relative_path(key: str) -> str:
    return os.path.join(_FOLDER, key[:2], f"{key}.json")


def _checksum(entry: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def _record(key: str, stored: Mapping[str, Any]) -> None:
    CacheArtifactManager.record_artifact(_ARTIFACT_TYPE, _relative_path(key), dict(stored))


def _surroundings(prefixes: tuple[str, ...]) -> tuple[object, ...]:
    """What a schedule may depend on beside its graphs; of the settings, those that begin so."""
    modules = (inductor_config, functorch_config) if "" in prefixes else (inductor_config,)
    return (
        _installation(current_target()),
        *process_switches(),
        [f"{name}={os.environ.get(name, '')}" for name in _ALLOCATOR_VARIABLES],
        *(
            [
                f"{name}={_plain(value)}"
                for name, value in sorted(_settings(module).items())
                if name.startswith(prefixes)
            ]
            for module in modules
        ),
    )


_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Settings that no schedule depends on, or that the options stand for (the partitioner).
_WITHOUT_EFFECT = (
    "trace.",
    "compile_threads",
    "worker_",
    "custom_partitioner_fn",
    "fx_graph_cache",
    "fx_graph_remote_cache",
    "autotune_local_cache",
    "autotune_remote_cache",
    "bundled_autotune_remote_cache",
    "enable_autograd_cache",
    "enable_remote_autograd_cache",
)


def _settings(module: Any) -> dict[str, Any]:
    settings: dict[str, Any] = module.get_config_copy()
    return {n: value for n, value in settings.items() if not n.startswith(_WITHOUT_EFFECT)}


class _NotPlain(Exception):
    """A setting has no text that is the same in every process."""


def _plain(value: object) -> str:
    """A setting's value as text, the same in every process.

    Raises:
        _NotPlain: if there is no such text.
    """
    if value is None or isinstance(value, (str, bytes, int, float, complex)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, Mapping):
        return str(sorted((_plain(k), _plain(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return str([_plain(v) for v in value])
    if isinstance(value, Set):
        return str(sorted(_plain(v) for v in value))
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    # Passes of the user's have a uuid, for Inductor's own keys.
    uuid = getattr(value, "uuid", None)
    identity = uuid() if callable(uuid) else None
    if identity is None:
        raise _NotPlain(f"the setting {value!r} has no identity")
    return f"{type(value).__qualname__} {_plain(identity)}"


@functools.cache
def _installation(target: Target | None) -> tuple[object, ...]:
    devices: list[object] = [target]
    devices += [str(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    return (
        torch_key(),
        torch.__version__,
        torch.version.cuda,
        hash_of_folders(Path(__file__).parents[1]),
        torch.backends.cpu.get_cpu_capability(),
        cpu_name(),
        devices,
    )
