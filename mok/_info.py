"""The text of `mok.info()`."""

from __future__ import annotations

import platform

import torch

import mok
from mok._backends import backend_problem


def report() -> str:
    """Versions, then for every device the backends: usable, or why not; `*` marks the one that is picked."""
    cuda = torch.version.cuda or "no CUDA"
    lines = [f"mok {mok.__version__}, torch {torch.__version__} ({cuda}), Python {platform.python_version()}"]
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        lines.append(f"{device}: {_device_name(device)}")
        problem = backend_problem("cuda", device)
        lines.append(f"  {'*' if problem else ' '} torch: usable")
        lines.append(f"  {' ' if problem else '*'} cuda: {f'not usable: {problem}' if problem else 'usable'}")
    return "\n".join(lines)


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.machine()}, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    memory_gib = properties.total_memory / 2**30
    return f"{properties.name}, compute capability {properties.major}.{properties.minor}, {memory_gib:.0f} GiB"
