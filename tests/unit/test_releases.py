"""A release of PyTorch that nobody has tried is refused when the backend is first used."""

from __future__ import annotations

import configparser
import logging
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtrcompile.passes.errors import UnsupportedTorchError
from dtrcompile.passes.releases import (
    NEWEST,
    OLDEST,
    TRY_VARIABLE,
    is_supported,
    require_supported,
)

ROOT = Path(__file__).resolve().parents[2]
FIRST, LAST = (f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
NEXT = f"{NEWEST[0]}.{NEWEST[1] + 1}"


@pytest.mark.parametrize(
    "version",
    [f"{FIRST}.0", "2.13.0+cpu", f"{LAST}.0", f"{LAST}.1+cu132", f"{LAST}.0a0+git1234567", LAST],
)
def test_every_build_of_a_supported_release_is_supported(version: str) -> None:
    assert is_supported(version)
    require_supported(version, {})


@pytest.mark.parametrize(
    "version", ["2.10.1", f"{NEXT}.0", f"{NEXT}.0.dev20270101+cpu", "1.15.0", "3.11.0", "unknown"]
)
def test_others_are_refused_in_one_line(version: str) -> None:
    with pytest.raises(UnsupportedTorchError) as caught:
        require_supported(version, {TRY_VARIABLE: "0"})
    message = str(caught.value)
    assert f"PyTorch {FIRST} to {LAST}" in message
    assert version in message
    assert f"{TRY_VARIABLE}=1" in message
    assert "\n" not in message


def test_the_variable_tries_another_release_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="dtrcompile"):
        require_supported(f"{NEXT}.0", {TRY_VARIABLE: "1"})
    assert f"{NEXT}.0" in caplog.text


def test_the_error_can_be_pickled() -> None:
    error = UnsupportedTorchError("2.10.0", OLDEST, NEWEST, TRY_VARIABLE)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.version == "2.10.0"


# A release whose private names are not those of the others: importing any of them fails.
_ON_ANOTHER_RELEASE = """
import sys, torch
torch.__version__ = sys.argv[1]
import torch._inductor.choices
del torch._inductor.choices.InductorChoices
import dtrcompile, dtrcompile.cli
dtrcompile.set_defaults(budget="1GiB")
assert "dtr" in torch._dynamo.list_backends()
for _ in range(2):
    try:
        torch.compile(torch.nn.Linear(2, 2), backend="dtr")
    except dtrcompile.DTRError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize("version", ["2.10.0", f"{NEXT}.0"])
def test_torch_compile_refuses_and_importing_the_package_does_not(version: str) -> None:
    output = subprocess.run(
        [sys.executable, "-c", _ON_ANOTHER_RELEASE, version],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != TRY_VARIABLE}
        | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    with pytest.raises(UnsupportedTorchError) as caught:
        require_supported(version, {})
    assert output == [f"UnsupportedTorchError {caught.value}"] * 2


def test_the_range_is_the_same_wherever_it_stands() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    # Without an upper bound: pip would replace a newer torch, where the backend only refuses it.
    assert f"torch>={FIRST}" in config["options"]["install_requires"].split()
    environment = (ROOT / ".ci" / "environment").read_text(encoding="utf-8")
    assert f"torch_allowed='torch>={FIRST},<{NEXT}'" in environment
    for name in ("README.md", "passes/torch_private.py", "docs/releases.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        named = set(re.findall(r"(?:torch|PyTorch) (2\.\d+ to 2\.\d+)", text))
        assert named == {f"{FIRST} to {LAST}"}, name
