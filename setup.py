"""Builds `mok._C` with nvcc where there is one; without it the package installs as pure Python, as `mok.info()` says.

`MOK_ARCH` chooses what is compiled: names of ARCHITECTURES with commas between them, `all` or `none`. Default: the
architectures of the NVIDIA GPUs of this machine, else all.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
# Compute capability of each architecture that the kernels can be compiled for. The letter gives access to its
# tensor-core instructions.
ARCHITECTURES = {"SM90": "90a"}
SOURCES = sorted(str(path.relative_to(ROOT)) for kind in ("*.cu", "*.cpp") for path in (ROOT / "csrc").rglob(kind))


def find_nvcc() -> Path | None:
    """nvcc on PATH, in CUDA_HOME, or in the wheels nvidia-cuda-nvcc, -crt, -cccl and nvidia-nvvm."""
    candidates = [shutil.which("nvcc")]
    if "CUDA_HOME" in os.environ:
        candidates.append(str(Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc"))
    for site in (sysconfig.get_paths()["purelib"], *sys.path):
        candidates.extend(map(str, Path(site).glob("nvidia/cu*/bin/nvcc")))
    return next((Path(path) for path in candidates if path and Path(path).exists()), None)


def gpu_architectures() -> list[str]:
    """Names of the supported architectures among the GPUs present."""
    try:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        capabilities = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []
    return [
        name for name in ARCHITECTURES if ARCHITECTURES[name].rstrip("af") in {c.replace(".", "") for c in capabilities}
    ]


def requested_architectures() -> list[str]:
    """The architectures that MOK_ARCH names, or the default; raises ValueError for an unknown name."""
    value = os.environ.get("MOK_ARCH", "")
    if not value:
        return gpu_architectures() or list(ARCHITECTURES)
    if value.lower() in ("all", "none"):
        return list(ARCHITECTURES) if value.lower() == "all" else []
    names = [name.strip().upper() for name in value.split(",")]
    unknown = [name for name in names if name not in ARCHITECTURES]
    if unknown:
        raise ValueError(f"MOK_ARCH: expected all, none or a list of {', '.join(ARCHITECTURES)}, got {value!r}")
    return names


def newest_header() -> float:
    return max(path.stat().st_mtime for path in (ROOT / "csrc").rglob("*.*h"))


class BuildKernels(build_ext):
    """Compiles each source with nvcc, only when it or a header changed, and links them with a static CUDA runtime."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        nvcc = find_nvcc()
        assert nvcc is not None  # the extension is only declared when nvcc is there
        python_include = os.environ.get("MOK_PYTHON_INCLUDE", sysconfig.get_paths()["include"])
        codes = [ARCHITECTURES[name] for name in requested_architectures()]
        flags = ["-std=c++20", "-O3", "-lineinfo", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Werror"]
        flags += ["-Werror=all-warnings"]
        flags += ["--diag-suppress=186", f'-DMOK_ARCHITECTURES="{",".join(codes)}"']
        flags += [f"-gencode=arch=compute_{code},code=sm_{code}" for code in codes]
        flags += ["-isystem", pybind11.get_include(), "-isystem", python_include]
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)

        def compile_source(source: str) -> str:
            target = objects / (Path(source).stem + "_" + Path(source).parent.name + ".o")
            stamp = target.with_suffix(".flags")
            is_current = target.exists() and stamp.exists() and stamp.read_text() == " ".join(flags)
            newest = max(newest_header(), (ROOT / source).stat().st_mtime)
            if not is_current or target.stat().st_mtime < newest:
                subprocess.run([nvcc, *flags, "-c", str(ROOT / source), "-o", str(target)], check=True)
                stamp.write_text(" ".join(flags))
            return str(target)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            linked = list(pool.map(compile_source, SOURCES))
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([nvcc, "-shared", "-cudart=static", *linked, "-o", str(output)], check=True)


extensions = []
if requested_architectures():
    if find_nvcc() is None:
        print("mok: no nvcc found: installing without the CUDA kernels", file=sys.stderr)
    else:
        extensions.append(Extension("mok._C", sources=SOURCES))

setup(ext_modules=extensions, cmdclass={"build_ext": BuildKernels})
