"""The option that writes the golden plans anew: ``pytest tests/golden --update-golden``."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden plans instead of comparing"
    )
