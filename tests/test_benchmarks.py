"""benchmarks/ep.py in small, on the CPU: what it checks holds, and it runs where ranks are threads or processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SIZES = {"tokens": 32, "hidden-size": 32, "intermediate-size": 16, "num-experts": 8, "top-k": 2, "runs": 1, "steps": 12}
OPTIONS = [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_expert_parallel_benchmark(tmp_path, ranks):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    start, own = ([], ["--virtual", "2"]) if ranks == "threads" else (torchrun, [])
    log = tmp_path / "log.json"
    command = [sys.executable, *start, ROOT / "benchmarks" / "ep.py", *own, *OPTIONS, "--device", "cpu", "--out", log]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(log.read_text())["rows"]
    assert [row["what"] for row in rows if not row["passed"]] == []
    assert {row["part"] for row in rows} == {"correctness", "speed", "sweep", "robustness"}
    assert "2 ranks  " in result.stdout and "12 batches" in result.stdout
    assert "1 of 1 others raised" in result.stdout
    systems = {row["numbers"]["system"] for row in rows if "system" in row["numbers"]}
    assert systems == {"mok", "all-to-all", "no exchange", "mok alone"}
