"""Tests marked `gpu` are skipped where there is no CUDA device, and the summary says which and how many."""

import collections

import pytest

_GPU_SKIP = "needs a CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # only when it decides something: `pytest --collect-only` stays fast

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=_GPU_SKIP))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if _GPU_SKIP in str(report.longrepr)]
    if not skipped:
        return
    terminalreporter.section(f"{len(skipped)} GPU tests skipped: no CUDA device")
    for test, count in collections.Counter(report.nodeid.split("[")[0] for report in skipped).items():
        terminalreporter.line(f"{test}  ({count})")
