"""What `finetune.py --compare` does: one model, transformers' Trainer, and the experts of transformers and of mok."""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from corpus import InputError, python_text, read_documents, to_blocks, train_tokenizer
from plots import plot_comparison
from transformers import (
    AutoModelForCausalLM,
    PrinterCallback,
    Qwen3MoeConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

import mok.hf
from mok import functional


class Size(NamedTuple):
    """model: what differs from Qwen3-MoE's defaults."""

    sequence_length: int
    learning_rate: float
    model: dict[str, Any]


VOCAB_SIZE = 2048
SIZES = {
    "tiny": Size(
        64,
        1e-3,
        {
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
    ),
    # 1.3 B parameters, 0.2 B of them at work for a token.
    "1b": Size(
        1024,
        3e-4,
        {
            "hidden_size": 1024,
            "moe_intermediate_size": 512,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
    ),
}
WARM_UP_STEPS = 5  # whose time does not count


def transformers_experts(implementation: str) -> Callable[..., Any]:
    def load(path: Path, **options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, experts_implementation=implementation, **options)

    return load


def registered(path: Path, **options: Any) -> Any:
    mok.hf.register()
    return AutoModelForCausalLM.from_pretrained(path, experts_implementation="mok", **options)


def converted(path: Path, **options: Any) -> Any:
    return mok.hf.convert(AutoModelForCausalLM.from_pretrained(path, **options))


WAYS = {
    "transformers, eager": transformers_experts("eager"),
    "transformers, grouped_mm": transformers_experts("grouped_mm"),
    "mok.hf.register": registered,
    "mok.hf.convert": converted,
}


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def make_checkpoint(folder: Path, size: Size, options: argparse.Namespace, dtype: torch.dtype) -> torch.Tensor:
    """Save a model with random weights, and return the text `[N, sequence_length]` to train it on."""
    documents = read_documents(options.data) if options.data else [text for part in python_text()[:2] for text in part]
    tokenizer = train_tokenizer(documents, VOCAB_SIZE)
    config = Qwen3MoeConfig(
        **size.model, norm_topk_prob=True, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id
    )
    torch.manual_seed(options.seed)
    with options.device:
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sequence_length = options.sequence_length or size.sequence_length
    blocks = to_blocks(documents, tokenizer, sequence_length - 1)  # labels are the inputs; the model shifts them
    if len(blocks) < options.batch_size:
        raise InputError(f"too little text for a batch of {options.batch_size}: {len(blocks)} sequences")
    return blocks


def train(model: Any, blocks: torch.Tensor, learning_rate: float, folder: Path, options: argparse.Namespace) -> dict:
    """Losses of the steps; seconds of a step and peak bytes of GPU memory (None on a CPU)."""
    on_gpu = options.device.type == "cuda"
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=WARM_UP_STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        seed=options.seed,
    )
    if on_gpu:
        arguments._n_gpu = 1  # else the Trainer makes replicas on all GPUs that it sees
        torch.cuda.reset_peak_memory_stats()
    clock = Clock()
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": block, "labels": block} for block in blocks],
        data_collator=default_data_collator,
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    steps = [end - start for start, end in zip(clock.times, clock.times[1:], strict=False)]
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "step_seconds": statistics.median(steps[min(WARM_UP_STEPS, len(steps) - 1) :]),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def compare(options: argparse.Namespace) -> None:
    """Train the same checkpoint on the same batches in each way; print and save what came of it."""
    on_gpu = options.device.type == "cuda"
    name = options.size or ("1b" if on_gpu else "tiny")
    size = SIZES[name]
    learning_rate = options.learning_rate or size.learning_rate
    folder = options.output / f"compare-{name}"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    blocks = make_checkpoint(folder / "base", size, options, dtype)
    results: dict[str, dict[str, Any]] = {}
    for way, load in WAYS.items():
        model = load(folder / "base", dtype=dtype)
        if not results:
            count = sum(parameter.numel() for parameter in model.parameters())
            print(f"{folder / 'base'}: {count / 1e6:,.1f} M parameters, {dtype}, on {options.device}")
        result = results[way] = train(model, blocks, learning_rate, folder / "trainer", options)
        result["tokens_per_second"] = options.batch_size * blocks.shape[1] / result["step_seconds"]
        peak = "" if result["peak_bytes"] is None else f", at most {result['peak_bytes'] / 2**30:.1f} GiB"
        losses = result["losses"]
        print(f"{way:25} {result['tokens_per_second']:10,.0f} tokens/s{peak}, loss {losses[0]:.3f} to {losses[-1]:.3f}")
        # The next way starts from nothing.
        del model
        functional.clear_workspace_cache()
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    plot_comparison(results, folder / "comparison.png")
    (folder / "comparison.json").write_text(json.dumps(results, indent=1))
    print(f"written to {folder}: comparison.png, comparison.json, base/")
