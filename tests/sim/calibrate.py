"""Compares the simulator with a real GPU on the cases of cases.py.

    python tests/sim/calibrate.py record results.pt [cases]     on a machine with a Hopper GPU
    python tests/sim/calibrate.py compare results.pt            anywhere: a table; fails if a bit differs that must not

docs/testing.md has the result.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from cases import CASES
from simulator import _MAP_TYPES, SWIZZLES, Simulator, _triple
from torch import Tensor

from mok.testing import relative_l2


class Gpu:
    """Launches kernels through the CUDA driver; CPU tensors are copied there and back for each launch."""

    def __init__(self) -> None:
        torch.cuda.init()
        torch.zeros(1, device="cuda")  # makes the context current
        self.driver = ctypes.CDLL("libcuda.so.1")

    def check(self, name: str, *args: object) -> None:
        status = getattr(self.driver, name)(*args)
        if status:
            raise RuntimeError(f"{name}: CUDA driver error {status}")

    def load(self, ptx: str) -> GpuModule:
        return GpuModule(self, ptx)

    def tensor_map(self, tensor: Tensor, box: Sequence[int], *, swizzle: int = 0) -> tuple[Tensor, Sequence[int], int]:
        return tensor, box, swizzle

    def encode(self, tensor: Tensor, address: int, box: Sequence[int], swizzle: int) -> ctypes.Array[ctypes.c_char]:
        rank = tensor.dim()
        memory = ctypes.create_string_buffer(128 + 64)
        map_at = ctypes.c_void_p((ctypes.addressof(memory) + 63) // 64 * 64)
        dims = (ctypes.c_uint64 * rank)(*reversed(tensor.shape))
        strides = (ctypes.c_uint64 * rank)(*(s * tensor.element_size() for s in reversed(tensor.stride()[:-1])))
        boxes, ones = (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank)
        shape = (_MAP_TYPES[tensor.dtype], rank, ctypes.c_void_p(address), dims, strides, boxes, ones)
        self.check("cuTensorMapEncodeTiled", map_at, *shape, 0, SWIZZLES[swizzle], 0, 0)
        return ctypes.create_string_buffer(ctypes.string_at(map_at, 128), 128)


class GpuModule:
    def __init__(self, gpu: Gpu, ptx: str) -> None:
        self.gpu = gpu
        self.handle = ctypes.c_void_p()
        gpu.check("cuModuleLoadData", ctypes.byref(self.handle), ptx.encode())

    def launch(
        self, kernel: str, *, args: Sequence[object], grid: object = 1, block: object = 32, shared: int = 0, **_: object
    ) -> None:
        copies: dict[int, tuple[Tensor, Tensor]] = {}  # storage -> its bytes here and there

        def address(tensor: Tensor) -> int:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in copies:
                here = torch.empty(0, dtype=torch.uint8).set_(storage)
                copies[storage.data_ptr()] = here, here.cuda()
            return copies[storage.data_ptr()][1].data_ptr() + tensor.storage_offset() * tensor.element_size()

        arrays = []
        for arg in args:
            if isinstance(arg, tuple):
                arrays.append(self.gpu.encode(arg[0], address(arg[0]), *arg[1:]))
            elif isinstance(arg, Tensor):
                arrays.append(ctypes.c_uint64(address(arg)))
            else:
                arrays.append(ctypes.c_int(arg))
        pointers = (ctypes.c_void_p * len(arrays))(*(ctypes.addressof(a) for a in arrays))
        function = ctypes.c_void_p()
        self.gpu.check("cuModuleGetFunction", ctypes.byref(function), self.handle, kernel.encode())
        self.gpu.check("cuFuncSetAttribute", function, 8, shared)  # the limit of dynamic shared memory
        self.gpu.check("cuLaunchKernel", function, *_triple(grid), *_triple(block), shared, None, pointers, None)
        torch.cuda.synchronize()
        for here, there in copies.values():
            here.copy_(there)


def record(path: str, names: list[str]) -> None:
    """Each case in a process of its own, since a fault ends the CUDA context."""
    parts = [f"{path}.{name}" for name in names]
    processes = [
        subprocess.Popen([sys.executable, __file__, "record", part, name], stderr=subprocess.PIPE, text=True)
        for part, name in zip(parts, names, strict=True)
    ]
    recorded: dict[str, dict[str, Tensor]] = {}
    for part, name, process in zip(parts, names, processes, strict=True):
        _, errors = process.communicate()
        if process.returncode:
            print(f"{name}: {next(line for line in reversed(errors.splitlines()) if 'rror: ' in line)}")
            continue
        recorded |= torch.load(part)
        Path(part).unlink()
    torch.save(recorded, path)


def compare(recorded: dict[str, dict[str, Tensor]]) -> bool:
    """Print one line per output; True if all agree as they must."""
    all_agree = True
    for name in recorded:
        for key, simulated in CASES[name](Simulator()).items():
            real = recorded[name][key]
            if key.endswith("~"):
                error = relative_l2(simulated, real)
                result, agrees = (
                    f"relative error {error:.1e}",
                    error < (2e-3 if simulated.dtype == torch.bfloat16 else 1e-3),
                )
            else:
                bytes_differ = (
                    (simulated.contiguous().view(torch.uint8) != real.contiguous().view(torch.uint8)).sum().item()
                )
                result, agrees = "same bits" if not bytes_differ else f"{bytes_differ} bytes differ", not bytes_differ
            all_agree &= agrees
            print(f"{name:18} {key:14} {result}{'' if agrees else '  <-- '}")
    return all_agree


if __name__ == "__main__":
    command, path, *names = sys.argv[1:]
    if command == "compare":
        sys.exit(not compare(torch.load(path)))
    if len(names) == 1:
        torch.save({names[0]: CASES[names[0]](Gpu())}, path)
    else:
        record(path, names or list(CASES))
