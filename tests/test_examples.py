"""The fine-tuning example, in small: its files, its resumption, its expert-parallel form and its error messages."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import comparison
import corpus
import finetune
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from mok.testing import assert_close_rel_l2

EXAMPLES = Path(__file__).parent.parent / "examples"

TEXT = "".join(f"{n} times {m} is {n * m}, and {n} plus {m} is {n + m}.\n" for n in range(40) for m in range(20))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A folder with a random checkpoint `model`, with tokenizer, and a text `data.txt`."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "data.txt").write_text(TEXT)
    tokenizer = corpus.train_tokenizer([TEXT], vocab_size=300)
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes, **layers)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


def arguments(tiny: Path, output: Path, **changes: object) -> list[str]:
    options = {
        "model": tiny / "model",
        "data": tiny / "data.txt",
        "output": output,
        "steps": 8,
        "batch_size": 4,
        "sequence_length": 32,
        "learning_rate": 1e-2,
        "device": "cpu",
        **changes,
    }
    return [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def run_here(monkeypatch: pytest.MonkeyPatch, *command: str) -> None:
    monkeypatch.setattr(sys, "argv", ["finetune.py", *command])
    finetune.main()


def history(output: Path) -> list[dict[str, float]]:
    return json.loads((output / "history.json").read_text())


def assert_is_a_picture(path: Path) -> None:
    """A PNG of which at least one pixel in fifty is not background."""
    import matplotlib.image

    pixels = matplotlib.image.imread(path)[..., :3]
    assert (pixels < 0.9).any(axis=-1).mean() > 0.02, path


def test_without_arguments_in_small(tmp_path):
    """From nothing to a fine-tuned model, as the README's first command but with fewer steps."""
    command = [sys.executable, EXAMPLES / "finetune.py", "--base-steps", "15", "--steps", "12", "--evaluate-every", "6"]
    result = subprocess.run(
        [*command, "--device", "cpu"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stderr
    output = tmp_path / "outputs" / "finetune"
    held_out = [entry["held_out_loss"] for entry in history(output) if "held_out_loss" in entry]
    assert len(held_out) == 3 and held_out[0] > held_out[1] > held_out[2]
    assert f"loss on held-out text: {held_out[0]:.3f} before, {held_out[2]:.3f} after" in result.stdout
    assert result.stdout.count("\nmodel:  ") == 3
    assert "fine-tuning: 100%" in result.stderr
    for name in ("loss.png", "expert_load.png"):
        assert_is_a_picture(output / name)
    assert not list(output.glob("**/step-*"))
    assert AutoModelForCausalLM.from_pretrained(output / "model").config.model_type == "qwen3_moe"
    base = load_file(output / "base" / "model.safetensors")
    tuned = load_file(output / "model" / "model.safetensors")
    assert base.keys() == tuned.keys()
    assert [name for name in base if torch.equal(base[name], tuned[name])] == []


def test_killed_and_resumed_run_gives_the_same_bits(tiny, tmp_path, monkeypatch):
    """With dropout, so that the state of the random numbers counts too."""
    model = shutil.copytree(tiny / "model", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.2}))
    options = {"model": model, "steps": 60, "checkpoint_every": 5, "evaluate_every": 7}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_here(monkeypatch, *arguments(tiny, whole, **options))
    command = [sys.executable, EXAMPLES / "finetune.py", *arguments(tiny, killed, **options)]
    # In this process's number of threads: it decides the order of sums.
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not list(killed.glob("checkpoints/step-*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, process.stderr.read()
    with pytest.raises(SystemExit, match="holds an unfinished run; --resume goes on with it"):
        run_here(monkeypatch, *arguments(tiny, killed, **options))
    with pytest.raises(SystemExit, match=r"made with other settings .*batch_size: 8 now, 4 then"):
        run_here(monkeypatch, "--resume", *arguments(tiny, killed, **options, batch_size=8))
    run_here(monkeypatch, "--resume", *arguments(tiny, killed, **options))
    assert history(killed) == history(whole)
    expected = load_file(whole / "model" / "model.safetensors")
    for name, tensor in load_file(killed / "model" / "model.safetensors").items():
        assert torch.equal(tensor, expected[name]), name


def test_expert_parallel_run_has_the_same_losses(tiny, tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    # Adam turns the sign of a gradient that is nothing but rounding into a whole step: a small learning rate keeps the
    # two runs together.
    options = {"clip": 0.5, "auxiliary_loss": 0.1, "learning_rate": 1e-3}
    run_here(monkeypatch, *arguments(tiny, one, **options))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*torchrun, EXAMPLES / "finetune.py", *arguments(tiny, two, **options)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    assert any(entry.get("gradient_norm", 0) > 0.5 for entry in history(one)), "nothing was clipped"
    for ours, theirs in zip(history(one), history(two), strict=True):
        assert ours == pytest.approx(theirs, rel=5e-6), f"step {ours['step']}"
    expected = load_file(one / "model" / "model.safetensors")
    for name, tensor in load_file(two / "model" / "model.safetensors").items():
        assert_close_rel_l2(name, tensor, expected[name], 1e-4)


def test_comparison_has_the_same_losses_in_each_way(tiny, tmp_path, monkeypatch, capsys):
    options = ["--compare", "--size", "tiny", "--steps", "8", "--device", "cpu", "--data", str(tiny / "data.txt")]
    run_here(monkeypatch, *options, "--output", str(tmp_path))
    output = tmp_path / "compare-tiny"
    results = json.loads((output / "comparison.json").read_text())
    assert list(results) == list(comparison.WAYS)
    expected = results["transformers, eager"]["losses"]
    assert len(expected) == 8 and expected[-1] < expected[0] - 0.1
    for way, result in results.items():
        assert result["losses"] == pytest.approx(expected, rel=1e-4), way
        assert result["tokens_per_second"] > 0 and result["peak_bytes"] is None
    assert capsys.readouterr().out.count("tokens/s, loss") == len(comparison.WAYS)
    assert_is_a_picture(output / "comparison.png")
    assert AutoModelForCausalLM.from_pretrained(output / "base").config.model_type == "qwen3_moe"


def test_comparison_on_a_gpu_is_of_a_billion_parameters():
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**comparison.SIZES["1b"].model, vocab_size=comparison.VOCAB_SIZE))
    assert sum(parameter.numel() for parameter in model.parameters()) > 1.2e9


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no.txt", None, "--data: .*no.txt can not be read"),
        ("bytes.txt", b"\xff\xfe\x00", "--data: .*bytes.txt can not be read as UTF-8"),
        ("empty.txt", b"", "too little training text for a batch of 4: 0 sequences of 32 tokens"),
        ("short.txt", b"one two " * 100, "too little held-out text for a batch of 4: [0-3] sequences of 32 tokens"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', r'--data: .*a.jsonl:2: expected \{"text": "..."\}, got .*txt'),
        ("b.jsonl", b"\nnot json\n", r"--data: .*b.jsonl:2: expected .*, got 'not json'"),
        ("c.jsonl", b'{"text": 3}\n', '--data: .*c.jsonl:1: "text": expected a string, got 3'),
    ],
)
def test_bad_data_is_named(tiny, tmp_path, monkeypatch, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=message):
        run_here(monkeypatch, *arguments(tiny, tmp_path / "output", data=tmp_path / name))


def test_bad_model_is_named(tiny, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"--model: expected a folder with a Hugging Face checkpoint, got .*nowhere"):
        run_here(monkeypatch, *arguments(tiny, tmp_path / "output", model=tmp_path / "nowhere"))
    broken = tmp_path / "broken"
    shutil.copytree(tiny / "model", broken)
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:-1000])
    with pytest.raises(SystemExit, match=r"(?s)--model: .*broken can not be used: .*model.safetensors"):
        run_here(monkeypatch, *arguments(tiny, tmp_path / "output", model=broken))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--steps", "0", "--steps: expected a positive number, got 0"),
        ("--clip", "x", "--clip: invalid float value: 'x'"),
    ],
)
def test_bad_options_are_named(monkeypatch, capsys, option, value, message):
    with pytest.raises(SystemExit):
        run_here(monkeypatch, option, value)
    assert message in capsys.readouterr().err


def test_jsonl_documents_end_with_the_end_of_text_token(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("one", "two")))
    assert corpus.read_documents(path) == ["one", "two"]
    tokenizer = corpus.train_tokenizer(["one two"], vocab_size=257)
    assert tokenizer.decode(corpus.to_blocks(["one", "two"], tokenizer, 7)[0]) == "one<|endoftext|>two<|endoftext|>"


def test_held_out_text_is_in_no_training_text():
    texts = ["\n\n".join(documents) for documents in corpus.python_text()]
    base, tuning, held_out = (set(corpus.paragraphs(text)) for text in texts)
    assert len(base) > 1000 and len(tuning) > 500 and len(held_out) > 100
    assert held_out.isdisjoint(base | tuning) and tuning.isdisjoint(base)
