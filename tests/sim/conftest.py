"""The simulator's tests compile C++ and CUDA; where g++ or nvcc is missing they are skipped, and say so."""

import shutil
from pathlib import Path

import pytest

_MISSING = [tool for tool in ("g++", "nvcc") if shutil.which(tool) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _MISSING and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"the simulator needs {' and '.join(_MISSING)}"))
