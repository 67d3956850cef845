#!/usr/bin/env python3
"""Run one of mok's two jobs; everything it needs is put into `.venv`, beside this file.

    python3 run.py finetune [ARGUMENTS]   fine-tune a language model (finetune --help lists the arguments)
    python3 run.py test [ARGUMENTS]       run the tests (ARGUMENTS go to pytest; paths are relative to this folder)

The first run installs PyTorch, mok and what the job needs; later runs only look whether that is still up to date.
MOK_ARCH=SM90 (or all, none) says which GPU architectures the CUDA kernels are compiled for.

On Linux PyPI's torch is a CUDA build of several GB. Without an NVIDIA GPU, ask for the small CPU build:
    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu python3 run.py finetune
"""

from __future__ import annotations  # so that an old Python gets as far as the message about its version

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
TORCH = "torch==2.13.0"
# Each job's optional dependencies in pyproject.toml; those of a later job include those of the earlier ones.
JOBS = ("finetune", "test")


def has_nvidia_gpu() -> bool:
    nvidia_smi = shutil.which("nvidia-smi")
    return nvidia_smi is not None and subprocess.run([nvidia_smi, "-L"], capture_output=True).returncode == 0


def installation_digest() -> str:
    """What an installation depends on: this interpreter, torch, the architectures asked for, build files and csrc."""
    digest = hashlib.sha256(repr((sys.version, str(ROOT), TORCH, os.environ.get("MOK_ARCH"))).encode())
    for path in [ROOT / "pyproject.toml", ROOT / "setup.py", *sorted((ROOT / "csrc").rglob("*"))]:
        if path.is_file():
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def run_or_exit(command: list[str | Path], env: dict[str, str], hint: str) -> None:
    print("$", *command, flush=True)
    if subprocess.run(command, env=env).returncode != 0:
        sys.exit(f"run.py: the last command failed. {hint}")


def install(job: str) -> None:
    """Bring .venv up to date for `job`. A stamp per job holds the digest of the installation that was made for it."""
    digest = installation_digest()
    stamps = [VENV / f"mok-{name}.stamp" for name in JOBS[JOBS.index(job) :]]
    if PYTHON.exists() and any(stamp.exists() and stamp.read_text() == digest for stamp in stamps):
        return
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        sys.exit(f"run.py: {sys.executable} lacks the venv module; on Debian or Ubuntu: apt install python3-venv")
    env = dict(os.environ)
    if job == "finetune" and not has_nvidia_gpu():
        env.setdefault("MOK_ARCH", "none")  # nothing to compile for
    print("Setting up .venv; the first time takes a few minutes.")
    run_or_exit([sys.executable, "-m", "venv", VENV], env, "See its message above.")
    pip: list[str | Path] = [PYTHON, "-m", "pip", "--disable-pip-version-check", "install"]
    hint = "See pip's message above; pip needs a network connection, or PIP_INDEX_URL or PIP_FIND_LINKS set."
    run_or_exit([*pip, TORCH], env, hint)
    run_or_exit([*pip, "--editable", f"{ROOT}[{job}]"], env, hint)
    stamps[0].write_text(digest)


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit(f"run.py: Python 3.11 or newer is needed; {sys.executable} is {sys.version.split()[0]}")
    job, *arguments = sys.argv[1:] or ["no job"]
    if job not in JOBS:
        print(__doc__.strip())
        return 0 if job in ("-h", "--help") else 2
    install(job)
    # A waiting OpenMP thread sleeps soon instead of spinning: where other programs keep the cores busy, fine-tuning is
    # more than twice as fast with it (2 cores, 2 busy programs beside it), and as fast as before where none does.
    env = {"GOMP_SPINCOUNT": "1000", **os.environ}
    if job == "finetune":
        return subprocess.run([PYTHON, ROOT / "examples" / "finetune.py", *arguments], env=env).returncode
    return subprocess.run([PYTHON, "-m", "pytest", *arguments], env=env, cwd=ROOT).returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
