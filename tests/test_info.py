import re
import subprocess
import sys

import pytest
import torch

import mok
from mok._backends import backend_problem, pick_backend


def test_info_says_what_can_be_used_and_why_not(capsys: pytest.CaptureFixture):
    mok.info()
    text = capsys.readouterr().out
    assert text.startswith(f"mok {mok.__version__}, torch {torch.__version__}")
    assert re.search(
        r"^cpu: .*\n  \* torch: usable\n    cuda: not usable: it runs on CUDA devices, not on cpu$", text, re.M
    )
    assert text.count("torch: usable") == 1 + torch.cuda.device_count()


def test_module_prints_the_same(capsys: pytest.CaptureFixture):
    mok.info()
    command = [sys.executable, "-m", "mok", "info"]
    result = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert result.stdout == capsys.readouterr().out


def test_a_package_without_kernels_says_so(monkeypatch: pytest.MonkeyPatch):
    """None in sys.modules makes the import fail, as it does where nothing was compiled."""
    monkeypatch.setitem(sys.modules, "mok.cuda_backend", None)
    gpu = torch.device("cuda", 0)
    assert "mok was installed without its kernels" in backend_problem("cuda", gpu)
    with pytest.raises(ValueError, match=r'expected one that can serve cuda:0, got "cuda": mok was installed without'):
        pick_backend("cuda", gpu)
    assert pick_backend(None, gpu).__name__ == "mok.torch_backend"


def test_the_backend_is_picked_from_the_device(monkeypatch: pytest.MonkeyPatch):
    class Kernels:
        __name__ = "mok.cuda_backend"

        @staticmethod
        def problem(device: torch.device) -> str | None:
            return None if device.index == 0 else "too old"

    monkeypatch.setitem(sys.modules, "mok.cuda_backend", Kernels)
    assert pick_backend(None, torch.device("cuda", 0)) is Kernels
    assert pick_backend("torch", torch.device("cuda", 0)).__name__ == "mok.torch_backend"
    assert pick_backend(None, torch.device("cuda", 1)).__name__ == "mok.torch_backend"
    with pytest.raises(ValueError, match="too old"):
        pick_backend("cuda", torch.device("cuda", 1))
