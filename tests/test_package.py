"""The package as a newcomer meets it: installing, importing, and the code and links of the documents."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def run_python(python: Path | str, *arguments: str | Path, **options) -> str:
    result = subprocess.run([python, *arguments], capture_output=True, text=True, timeout=240, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_pip_install_without_nvcc(tmp_path):
    """Into a new environment that sees this one's torch and build tools, with no compiler on PATH."""
    source = shutil.copytree(
        ROOT,
        tmp_path / "source",
        ignore=shutil.ignore_patterns(".*", "build", "outputs", "*.so", "*.egg-info", "shared"),
    )
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(run_python(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "this-environment.pth").write_text(sysconfig.get_path("purelib"))
    env = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "MOK_ARCH", "PYTHONPATH")}
    env["PATH"] = str(tmp_path / "venv" / "bin")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-build-isolation", source]
    run_python(*pip, env=env, cwd=tmp_path)
    code = (
        "import mok, mok.nn, torch; print(mok.__file__); mok.info();"
        "layer = mok.nn.MoKLayer(16, 8, 4, 2); layer(torch.randn(3, 16)).sum().backward();"
        "print(layer.experts.down_proj.grad.shape)"
    )
    output = run_python(python, "-c", code, env=env, cwd=tmp_path)
    assert output.startswith(str(site / "mok"))
    assert "torch: usable" in output and "not usable" in output
    assert output.rstrip().endswith("torch.Size([4, 16, 8])")
    assert (site / "mok" / "py.typed").exists()
    assert not list((site / "mok").glob("_C*"))


@pytest.mark.parametrize("module", ["mok", "mok.functional", "mok.nn"])
def test_import_does_no_work(module):
    code = (
        f"import sys, {module}, torch; print(torch.cuda.is_initialized());"
        "print({'mok._C', 'mok.ops', 'mok.cuda_backend', 'transformers', 'matplotlib'} & set(sys.modules))"
    )
    assert run_python(sys.executable, "-c", code).split() == ["False", "set()"]


def test_info_command():
    output = run_python(sys.executable, "-m", "mok", "info")
    assert output.startswith("mok 0.") and "torch: usable" in output


def python_blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny random Qwen3-MoE, which the documents call `my-checkpoint`."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16, "head_dim": 8, "num_experts": 8}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    path = tmp_path_factory.mktemp("documents") / "my-checkpoint"
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **layers)).save_pretrained(path)
    return path


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if python_blocks(d)], ids=lambda document: document.name)
def test_code_of_documents_runs(document, checkpoint, tmp_path):
    """All python blocks of a page, one after the other."""
    shutil.copytree(checkpoint, tmp_path / "my-checkpoint")
    script = tmp_path / "page.py"
    script.write_text("\n".join(python_blocks(document)))
    run_python(sys.executable, script, cwd=tmp_path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_of_documents(document):
    text = re.sub(r"^```.*?^```", "", document.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), f"{document.name}: {link} leads nowhere"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), flags=re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{document.name}: {link}: there is no such heading"
