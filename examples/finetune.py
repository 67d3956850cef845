#!/usr/bin/env python3
"""Fine-tune a mixture-of-experts language model with mok.

With no arguments: train a tokenizer and a small Qwen3-MoE on the docstrings of Python's standard library, save them as
a Hugging Face checkpoint, load it back with mok, fine-tune it on the topics of help(), and measure it on topics
that were held out. With --model and --data: your own checkpoint, your own text. With --compare: a Qwen3-MoE of random
weights (1.3 B of them on a GPU), trained by transformers' Trainer with transformers' experts and with mok's.

    python3 examples/finetune.py
    python3 examples/finetune.py --model PATH --data FILE.jsonl
    torchrun --nproc-per-node 2 examples/finetune.py        # each process holds half of the experts of every layer
    python3 examples/finetune.py --compare

The output folder then has `model/` (a Hugging Face checkpoint), `loss.png`, `expert_load.png` and `history.json`.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from corpus import InputError, load_tokenizer, python_text, read_documents, to_blocks, train_tokenizer
from plots import plot_expert_load, plot_losses
from torch import Tensor
from training import Training, checkpoints, expert_group
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig
from transformers.utils import logging as transformers_logging

import mok.hf
from mok.comm import Communicator, as_communicator

VOCAB_SIZE = 2048
# What the small model differs in from Qwen3-MoE's defaults.
BASE_MODEL: dict[str, Any] = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,
    "bos_token_id": None,
}


def load_model(path: Path, ranks: Communicator, device: torch.device) -> Any:
    """The checkpoint at `path` with a MoKLayer for each MoE block; reads only the experts of this rank."""
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        mok.hf.convert(model, process_group=expert_group(ranks))
        mok.hf.load_checkpoint(model, path, device=device)
    except (OSError, ValueError) as error:
        raise InputError(f"--model: {path} can not be used: {error}") from error
    return model


def make_base_model(folder: Path, options: argparse.Namespace, ranks: Communicator) -> None:
    """Train a tokenizer and a small Qwen3-MoE from nothing, and save both as a Hugging Face checkpoint."""
    documents, _, _ = python_text()
    tokenizer = train_tokenizer(documents, VOCAB_SIZE)
    config = Qwen3MoeConfig(**BASE_MODEL, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(options.seed)  # the same weights on every rank; convert keeps this rank's experts
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mok.hf.convert(model, process_group=expert_group(ranks))
    blocks = to_blocks(documents, tokenizer, options.sequence_length)
    training = Training(model, blocks, options.base_steps, 6e-3, options, ranks, folder.with_name("base-training"))
    training.run("base model")
    mok.hf.save_pretrained(model, training.folder)
    if ranks.rank == 0:
        tokenizer.save_pretrained(training.folder)
        training.remove_checkpoints()
        shutil.rmtree(folder, ignore_errors=True)
        training.folder.rename(folder)  # from here on it is whole
    ranks.barrier()


@torch.no_grad()
def generate(model: Any, tokenizer: Any, held_out: Tensor, options: argparse.Namespace) -> list[tuple[str, str]]:
    """Beginnings of held-out sequences and what the model makes of them. Every rank must call it."""
    model.eval()
    torch.manual_seed(options.seed)  # the ranks draw the same tokens
    pairs = []
    for block in held_out[:: max(1, len(held_out) // 3)][:3]:
        prompt = block[None, :24].to(options.device)
        sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "pad_token_id": tokenizer.eos_token_id}
        whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=48, **sampling)[0]
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt[0], whole[prompt.shape[1] :])]
        pairs.append((" ".join(texts[0].split()), " ".join(texts[1].split())))
    return pairs


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, metavar="PATH", help="folder of a Hugging Face MoE checkpoint; none: make a small one")
    add("--data", type=Path, metavar="FILE", help='.txt, or .jsonl with a "text" in each line; none: Python topics')
    add("--output", type=Path, metavar="DIR", default=Path("outputs/finetune"), help="default: %(default)s")
    add("--resume", action="store_true", help="go on where an unfinished run in --output stopped")
    add("--steps", type=positive(int), metavar="N", help="default: 160; 50 with --compare")
    add("--base-steps", type=positive(int), metavar="N", default=400, help="of the small model; default: %(default)s")
    add("--batch-size", type=positive(int), metavar="N", default=8, help="of all processes; default: %(default)s")
    add("--sequence-length", type=positive(int), metavar="N", help="in tokens; default: 128, or that of --size")
    add(
        "--learning-rate", type=positive(float), metavar="X", help="peak; default: 2e-3, 2e-5 with --model, or --size's"
    )
    add("--auxiliary-loss", type=float, metavar="X", default=0.01, help="of load balancing; default: %(default)s")
    add("--clip", type=positive(float), metavar="X", default=1.0, help="largest gradient norm; default: %(default)s")
    add("--evaluate-every", type=positive(int), metavar="N", default=25, help="steps; default: %(default)s")
    add("--checkpoint-every", type=positive(int), metavar="N", default=50, help="steps; default: %(default)s")
    add("--seed", type=int, metavar="N", default=0, help="default: %(default)s")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is a GPU")
    add("--compare", action="store_true", help="train with transformers' experts and with mok's, and compare")
    add("--size", choices=("tiny", "1b"), help="of the model to --compare with; default: 1b on a GPU, else tiny")
    options = parser.parse_args()
    options.steps = options.steps or (50 if options.compare else 160)
    if options.compare:
        return options
    options.sequence_length = options.sequence_length or 128
    options.learning_rate = options.learning_rate or (2e-5 if options.model else 2e-3)
    return options


def positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
        return value

    parse.__name__ = kind.__name__  # argparse says "invalid int value" with it
    return parse


def start_ranks(options: argparse.Namespace) -> Communicator:
    """Join the processes that torchrun started, if it did, and set `options.device`."""
    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    elif kind == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: there is no CUDA device")
    options.device = torch.device("cpu")
    if kind == "cuda":
        options.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(options.device)
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    if options.batch_size % num_ranks:
        raise InputError(f"--batch-size: expected a multiple of {num_ranks} processes, got {options.batch_size}")
    if num_ranks == 1:
        return as_communicator(None)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return as_communicator(dist.group.WORLD)


def finetune(options: argparse.Namespace, ranks: Communicator) -> None:
    start = time.monotonic()
    say = print if ranks.rank == 0 else lambda *_: None
    output = options.output
    if not options.resume and (checkpoints(output / "base-training") or checkpoints(output / "checkpoints")):
        raise InputError(f"--output: {output} holds an unfinished run; --resume goes on with it")
    user_documents = read_documents(options.data) if options.data else None
    model_path = options.model or output / "base"
    if not options.model and not (options.resume and model_path.exists()):
        make_base_model(model_path, options, ranks)
    tokenizer = load_tokenizer(model_path)
    if user_documents is None:
        blocks, held_out = (to_blocks(d, tokenizer, options.sequence_length) for d in python_text()[1:])
    else:
        all_blocks = to_blocks(user_documents, tokenizer, options.sequence_length)
        index = torch.arange(len(all_blocks))
        is_held_out = (index % 10 == 9) & (index < 320 * options.batch_size)  # a tenth, up to 32 batches
        blocks, held_out = all_blocks[~is_held_out], all_blocks[is_held_out]
    model = load_model(model_path, ranks, options.device)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if blocks.numel() and int(blocks.max()) >= vocab_size:
        raise InputError(f"--model: its tokenizer has id {blocks.max()}, its vocabulary only {vocab_size} entries")
    num_parameters = sum(p.numel() for p in model.parameters())
    say(f"{model_path}: {num_parameters / 1e6:.1f} M parameters in this process, on {options.device}")
    say(f"fine-tuning on {blocks[:, 1:].numel():,} tokens, {held_out[:, 1:].numel():,} held out")
    training = Training(
        model, blocks, options.steps, options.learning_rate, options, ranks, output / "checkpoints", held_out
    )
    training.run("fine-tuning")
    mok.hf.save_pretrained(model, output / "model")
    if ranks.rank == 0:
        tokenizer.save_pretrained(output / "model")
        plot_losses(training.history, output / "loss.png")
        plot_expert_load(training.expert_load, output / "expert_load.png")
        (output / "history.json").write_text(json.dumps(training.history, indent=1))
        training.remove_checkpoints()
    for prompt, continuation in generate(model, tokenizer, held_out, options):
        say(f"\nprompt: {prompt}\nmodel:  {continuation}")
    before, after = (entry["held_out_loss"] for entry in (training.history[0], training.history[-1]))
    say(f"\nloss on held-out text: {before:.3f} before, {after:.3f} after fine-tuning")
    say(f"written to {output}: model/ (a Hugging Face checkpoint), loss.png, expert_load.png, history.json")
    say(f"took {time.monotonic() - start:.0f} s")


def main() -> None:
    options = parse_arguments()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        ranks = start_ranks(options)
        if options.compare and ranks.size > 1:
            raise InputError(f"--compare: expected one process, got {ranks.size}")
        if options.compare:
            from comparison import compare  # here, because the Trainer takes a while to import

            compare(options)
        else:
            finetune(options, ranks)
    except InputError as error:
        sys.exit(f"finetune.py: error: {error}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
