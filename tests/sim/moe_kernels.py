"""Runs the project's own kernels in the simulator: `mok.functional` with the CUDA backend, on CPU tensors.

`_C` is built from the same sources as for a GPU, with PTX instead of machine code, and linked against the simulator
instead of the CUDA runtime.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import simulator
import torch
from simulator import Simulator, cached, run
from torch import Tensor

ROOT = Path(__file__).parents[2]
SOURCES = sorted(str(path.relative_to(ROOT)) for kind in ("*.cu", "*.cpp") for path in (ROOT / "csrc").rglob(kind))


def build_extension() -> Path:
    """The shared object of `mok._C` for the simulator."""
    import pybind11

    library = simulator.build_library()
    include = os.environ.get("MOK_PYTHON_INCLUDE", sysconfig.get_paths()["include"])
    flags = ["-std=c++20", "-O1", "-Xcompiler=-fPIC,-fvisibility=hidden", "--no-compress", "-cudart=none"]
    flags += [
        "--diag-suppress=186",
        "-lineinfo",
        '-DMOK_ARCHITECTURES="90a"',
        "-gencode=arch=compute_90a,code=compute_90a",
    ]
    flags += ["-isystem", pybind11.get_include(), "-isystem", include]
    text = "".join(path.read_text() for path in sorted((ROOT / "csrc").rglob("*.*")) if path.is_file())

    def compile_source(source: str) -> Path:
        with cached(Path(source).stem, " ".join(flags) + sys.version + text) as folder:
            target = folder / "object.o"
            if not target.exists():
                run(["nvcc", *flags, "-c", ROOT / source, "-o", folder / "new.o"])
                (folder / "new.o").rename(target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_source, SOURCES))
    with cached("extension", f"{library}{objects}") as folder:
        target = folder / "_C.so"
        if not target.exists():
            run(["g++", "-shared", *objects, library, f"-Wl,-rpath,{library.parent}", "-o", folder / "new.so"])
            (folder / "new.so").rename(target)
    return target


def load_extension() -> ModuleType:
    """Import `mok._C` from the simulator's build, whatever else is installed."""
    if "mok._C" not in sys.modules or "libmoksim" not in getattr(sys.modules["mok._C"], "runtime", ""):
        loader = importlib.machinery.ExtensionFileLoader("mok._C", str(build_extension()))
        spec = importlib.util.spec_from_loader("mok._C", loader)
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        module.runtime = "libmoksim"
        import mok

        sys.modules["mok._C"] = mok._C = module
    return sys.modules["mok._C"]


def forget_backends() -> None:
    """What mok remembers of which backend serves a CPU, where that changes."""
    from mok import functional
    from mok.nn import _op

    functional.clear_workspace_cache()
    _op._saved_types.cache_clear()


@contextmanager
def simulated_kernels(sim: Simulator, *, device_barriers: bool = False) -> Iterator[None]:
    """Within, `MoKConfig(backend="cuda")` works on CPU tensors and runs the kernels in `sim`.

    Every tensor whose pointer reaches a kernel is known to the simulator with its bounds, and what the backend
    allocates without a value counts as uninitialised. With `device_barriers` virtual ranks meet inside the kernels,
    as the GPUs of a process group do, instead of on the host.
    """
    load_extension()
    from mok import _backends, cuda_backend, ops
    from mok.testing import VirtualGroup

    data_ptr = Tensor.data_ptr
    known: set[int] = set()
    uninitialised: list[Tensor] = []  # kept, so that their memory does not come back as that of another tensor

    def known_pointer(tensor: Tensor) -> int:
        pointer = data_ptr(tensor)
        storage = tensor.untyped_storage()
        if storage.nbytes():
            sim.add_memory(tensor, f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}")
            known.add(storage.data_ptr())
        return pointer

    def empty(workspace: object, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        tensor = torch.full(shape, float("nan") if dtype.is_floating_point else -(2**31) + 77, dtype=dtype)
        uninitialised.append(tensor)
        if tensor.numel():
            known.add(tensor.untyped_storage().data_ptr())
            sim.add_memory(
                tensor, f"uninitialised {str(dtype).removeprefix('torch.')} {list(shape)}", initialized=False
            )
        return tensor

    make_peers = cuda_backend.PeerMemory.make

    def make_peers_with_barriers(workspace: object) -> object:
        return replace(make_peers(workspace), has_device_barriers=device_barriers)

    run_group = VirtualGroup.run

    def run_ranks(group: VirtualGroup, fn: Callable[[object], object]) -> list[object]:
        def call(member: object) -> object:
            sim.set_rank(member.rank())
            return fn(member)

        return run_group(group, call)

    stream = SimpleNamespace(cuda_stream=0)
    settings = ops.Launch.settings

    def settings_on_device_0(launch: ops.Launch) -> object:
        return settings(SimpleNamespace(device=SimpleNamespace(index=0), num_sms=launch.num_sms))

    zeros = torch.zeros
    with (
        mock.patch.object(_backends, "backend_problem", lambda name, device: None),
        mock.patch.object(cuda_backend, "_empty", empty),
        mock.patch.object(cuda_backend.PeerMemory, "make", make_peers_with_barriers),
        mock.patch.object(torch.cuda, "current_stream", lambda device=None: stream),
        mock.patch.object(torch.cuda, "synchronize", lambda device=None: None),
        mock.patch.object(ops, "num_sms", lambda device: ops._C.device_num_sms(0)),
        mock.patch.object(ops.Launch, "settings", settings_on_device_0),
        mock.patch.object(ops, "new_error_memory", lambda: zeros(ops._C.ERROR_RECORD_BYTES, dtype=torch.uint8)),
        mock.patch.object(Tensor, "data_ptr", known_pointer),
        mock.patch.object(VirtualGroup, "run", run_ranks),
    ):
        forget_backends()
        yield
    forget_backends()
    for base in known:
        sim.lib.sim_remove_memory(base)
