"""Builds the simulator, compiles kernels to PTX and runs them on CPU tensors.

    sim = Simulator(seed=3)
    module = sim.load(compile_ptx(KERNELS / "gemm.cu"))
    module.launch("gemm", grid=4, block=384, args=[a_map, x, Int(128)], shared=70000)

A launch raises `SimulatorError` with all that the checks found. `docs/simulator.md` says what they find.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).parent
KERNELS = HERE / "kernels"
BUILD = HERE / "build"
CHECKS = {
    name: 1 << i
    for i, name in enumerate(("bounds", "align", "init", "race", "proxy", "nc", "barrier", "wgmma", "leak"))
}
ALL_CHECKS = sum(CHECKS.values())


class SimulatorError(RuntimeError):
    """What a launch did wrong. `kinds`: the check that each report comes from."""

    def __init__(self, reports: list[tuple[str, str]]) -> None:
        super().__init__("\n".join(f"{kind}: {text}" for kind, text in reports))
        self.kinds = [kind for kind, _ in reports]


@contextmanager
def cached(name: str, key: str) -> Iterator[Path]:
    """A folder under build/ for what `key` names; others wait while one fills it."""
    folder = BUILD / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def run(command: Sequence[str | Path], **options: object) -> None:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if result.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")


def cuda_include() -> Path:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise RuntimeError("the simulator's tests need nvcc to compile kernels to PTX")
    for parent in (Path(nvcc).resolve().parent.parent, Path("/usr/local/cuda")):
        if (parent / "include" / "cuda_runtime_api.h").exists():
            return parent / "include"
    raise RuntimeError(f"no CUDA headers beside {nvcc}")


def compiler() -> list[str]:
    """g++ and its flags; the code runs on the machine that builds it."""
    return ["g++", "-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra", "-pthread"]


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "".join(line for line in lines[:30] if line.startswith(("model name", "flags")))


def build_library() -> Path:
    """Compile the simulator into a shared library that also stands in for libcudart; unchanged objects are kept."""
    flags = [*compiler(), "-isystem", str(cuda_include())]
    headers = "".join(path.read_text() for path in sorted((HERE / "src").glob("*.h")))
    sources = sorted((HERE / "src").glob("*.cpp"))

    def compile_source(source: Path) -> Path:
        with cached(source.stem, " ".join(flags) + cpu_name() + headers + source.read_text()) as folder:
            target = folder / "object.o"
            if not target.exists():
                run([*flags, "-c", source, "-o", folder / "new.o"])
                (folder / "new.o").rename(target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_source, sources))
    with cached("library", "".join(map(str, objects))) as folder:
        target = folder / "libmoksim.so"
        if not target.exists():
            run(["g++", "-shared", "-pthread", *objects, "-o", folder / "new.so"])
            (folder / "new.so").rename(target)
    return target


def compile_ptx(source: Path, defines: Sequence[str] = (), includes: Sequence[Path] = ()) -> str:
    """PTX of a CUDA file for sm_90a, with source lines. Cached by the content of it and of the headers beside it."""
    flags = ["-std=c++20", "-O3", "-lineinfo", "-arch=sm_90a", "-ptx", *(f"-D{d}" for d in defines)]
    flags += [f"-I{path}" for path in includes]
    headers = [p for folder in (source.parent, *includes) for p in sorted(folder.rglob("*.*h"))]
    text = "".join(path.read_text() for path in [source, *headers])
    with cached(source.stem, " ".join(flags) + text) as folder:
        target = folder / "kernel.ptx"
        if not target.exists():
            run(["nvcc", *flags, source, "-o", folder / "new.ptx"])
            (folder / "new.ptx").rename(target)
        return target.read_text()


@dataclass(frozen=True)
class TensorMap:
    """A tensor and the 128 bytes that describe its tiles to TMA. `box`: from the innermost dimension on."""

    tensor: Tensor
    data: bytes


SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_MAP_TYPES = {torch.uint8: 0, torch.int32: 3, torch.int64: 5, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}


class Simulator:
    """The machine of this process. Settings hold until the next Simulator is made."""

    def __init__(self, *, seed: int = 0, checks: int = ALL_CHECKS, num_sms: int = 4, **settings: float) -> None:
        self.lib = _library()
        defaults = {
            "max_ctas_per_sm": 1,
            "async_rate": -1,
            "deadlock_ns": 2.0**40,
            "num_ranks": 1,
            "allow_unknown_memory": 0,
        }
        defaults |= {"is_blocking": 1, "grace_ms": 5000}
        for name, value in {**defaults, "seed": seed, "checks": checks, "num_sms": num_sms, **settings}.items():
            if not self.lib.sim_configure(name.encode(), float(value)):
                raise ValueError(f"unknown simulator setting {name}")
        self.take_reports()

    def load(self, ptx: str) -> Module:
        return Module(self, ptx)

    def take_reports(self) -> list[tuple[str, str]]:
        text = self.lib.sim_take_reports().decode(errors="replace")
        return [tuple(report.split("\x1f")) for report in text.split("\x1e") if report]

    def raise_reports(self) -> None:
        if reports := self.take_reports():
            raise SimulatorError(reports)

    def add_memory(self, tensor: Tensor, name: str, *, read_only: bool = False, initialized: bool = True) -> None:
        """Make the storage of a tensor known to the machine under this name."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self.lib.sim_add_memory(storage.data_ptr(), storage.nbytes(), name.encode(), read_only, initialized)

    def remove_memory(self, tensor: Tensor) -> None:
        self.lib.sim_remove_memory(tensor.untyped_storage().data_ptr())

    def set_rank(self, rank: int) -> None:
        """The virtual device of this host thread."""
        self.lib.sim_set_rank(rank)

    def statistics(self) -> tuple[float, float]:
        """Thread-instructions executed and seconds spent on them, since the process started."""
        count, seconds = ctypes.c_double(), ctypes.c_double()
        self.lib.sim_statistics(ctypes.byref(count), ctypes.byref(seconds))
        return count.value, seconds.value

    @contextmanager
    def edited_ptx(self, kernel: str, edit: Callable[[str], str]) -> Iterator[None]:
        """Within, host code that is linked against the simulator runs `edit(PTX)` instead of the PTX it brought, of the
        source file with the kernel whose name contains `kernel`."""
        text = ctypes.c_char_p()
        self._check(self.lib.sim_embedded_ptx(kernel.encode(), ctypes.byref(text)))
        assert text.value is not None
        original = text.value.decode()
        edited = edit(original)
        if edited == original:
            raise ValueError("the edit changed nothing")
        self._check(self.lib.sim_replace_ptx(kernel.encode(), edited.encode()))
        try:
            yield
        finally:
            self._check(self.lib.sim_replace_ptx(kernel.encode(), original.encode()))

    def _check(self, is_fine: bool) -> None:
        if not is_fine:
            raise ValueError(self.lib.sim_error().decode())

    def tensor_map(self, tensor: Tensor, box: Sequence[int], *, swizzle: int = 0) -> TensorMap:
        """What cuTensorMapEncodeTiled makes of `tensor` (any strides, the last 1) and `box` (innermost first)."""
        rank = tensor.dim()
        dims = (ctypes.c_uint64 * rank)(*reversed(tensor.shape))
        strides = (ctypes.c_uint64 * rank)(*(s * tensor.element_size() for s in reversed(tensor.stride()[:-1])))
        boxes, ones = (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank)
        data = ctypes.create_string_buffer(128)
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_int, *[ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32], *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4
        )
        encode = prototype(self.lib.sim_tensor_map_encoder())
        base = ctypes.c_void_p(tensor.data_ptr())
        status = encode(
            data, _MAP_TYPES[tensor.dtype], rank, base, dims, strides, boxes, ones, 0, SWIZZLES[swizzle], 0, 0
        )
        if status:
            raise ValueError(
                f"cuTensorMapEncodeTiled: error {status} for shape {tuple(tensor.shape)}, box {tuple(box)}"
            )
        return TensorMap(tensor, data.raw)


class Module:
    """PTX that the simulator has parsed."""

    def __init__(self, sim: Simulator, ptx: str) -> None:
        self.sim = sim
        self.handle = sim.lib.sim_load_ptx(ptx.encode())
        if not self.handle:
            raise ValueError(sim.lib.sim_error().decode())

    def kernels(self) -> list[str]:
        return self.sim.lib.sim_kernels(self.handle).decode().split()

    def decode(self, kernel: str) -> None:
        """Raise ValueError for an instruction of the kernel that the simulator does not know."""
        if not self.sim.lib.sim_decode(self.handle, kernel.encode()):
            raise ValueError(self.sim.lib.sim_error().decode())

    def launch(
        self,
        kernel: str,
        *,
        args: Sequence[object],
        grid: int | tuple[int, ...] = 1,
        block: int | tuple[int, ...] = 32,
        cluster: int | tuple[int, ...] = 1,
        shared: int = 0,
        rank: int = 0,
        outputs: Sequence[Tensor] = (),
    ) -> None:
        """Run a kernel (extern "C" or mangled name) to its end.

        args: tensors (their pointer), `TensorMap`s, bytes (a struct), ctypes values or ints (int32). Memory of
        tensors is known for the time of the launch; tensors of `outputs` count as uninitialised before it.
        """
        arrays, tensors = [], []
        for arg in args:
            if isinstance(arg, TensorMap):
                tensors.append(arg.tensor)
                arrays.append(ctypes.create_string_buffer(arg.data, 128))
            elif isinstance(arg, Tensor):
                tensors.append(arg)
                arrays.append(ctypes.c_uint64(arg.data_ptr()))
            elif isinstance(arg, bytes):
                arrays.append(ctypes.create_string_buffer(arg, len(arg)))
            else:
                arrays.append(ctypes.c_int(arg) if isinstance(arg, int) else arg)
        pointers = (ctypes.c_void_p * len(arrays))(*(ctypes.addressof(a) for a in arrays))
        shape = (ctypes.c_uint32 * 9)(*(n for s in (grid, block, cluster) for n in _triple(s)))
        fresh = {t.data_ptr() for t in outputs}
        for i, tensor in enumerate(tensors):
            self.sim.add_memory(tensor, f"tensor {i}", initialized=tensor.data_ptr() not in fresh)
        error = ctypes.c_int()
        try:
            if not self.sim.lib.sim_launch(
                self.handle, kernel.encode(), shape, shared, pointers, rank, ctypes.byref(error)
            ):
                raise ValueError(self.sim.lib.sim_error().decode())
        finally:
            for tensor in tensors:
                self.sim.remove_memory(tensor)
        self.sim.raise_reports()


def _triple(shape: int | tuple[int, ...]) -> tuple[int, ...]:
    values = (shape,) if isinstance(shape, int) else tuple(shape)
    return values + (1,) * (3 - len(values))


_loaded: list[ctypes.CDLL] = []
_failures: list[Exception] = []
_loading = threading.Lock()


def _library() -> ctypes.CDLL:
    with _loading:
        if _failures:
            raise _failures[0]
        if not _loaded:
            try:
                lib = ctypes.CDLL(str(build_library()), mode=ctypes.RTLD_GLOBAL)
            except Exception as failure:  # every test needs the library: do not compile it again for each
                _failures.append(failure)
                raise
            for name in ("sim_error", "sim_kernels", "sim_take_reports", "sim_instruction_table"):
                getattr(lib, name).restype = ctypes.c_char_p
            for name in ("sim_load_ptx", "sim_tensor_map_encoder"):
                getattr(lib, name).restype = ctypes.c_void_p
            for name in ("sim_decode", "sim_launch", "sim_configure", "sim_replace_ptx", "sim_embedded_ptx"):
                getattr(lib, name).restype = ctypes.c_bool
            lib.sim_kernels.argtypes = [ctypes.c_void_p]
            lib.sim_decode.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
            lib.sim_launch.argtypes = [
                ctypes.c_void_p,
                ctypes.c_char_p,
                ctypes.c_void_p,
                ctypes.c_uint32,
                ctypes.c_void_p,
            ]
            lib.sim_launch.argtypes += [ctypes.c_int, ctypes.c_void_p]
            lib.sim_configure.argtypes = [ctypes.c_char_p, ctypes.c_double]
            lib.sim_add_memory.argtypes = [
                ctypes.c_uint64,
                ctypes.c_uint64,
                ctypes.c_char_p,
                ctypes.c_bool,
                ctypes.c_bool,
            ]
            lib.sim_remove_memory.argtypes = [ctypes.c_uint64]
            lib.sim_remove_memory.restype = lib.sim_add_memory.restype = None
            _loaded.append(lib)
        return _loaded[0]
