#!/usr/bin/env python3
"""Fine-tune a mixture-of-experts language model with mok.

With no arguments: take the documentation that ships with Python, train a tokenizer and a small Qwen3-MoE on most of it,
save that as a Hugging Face checkpoint, load it back with mok and fine-tune it on topics that it has not seen. With
--model and --data: the same, with your own checkpoint and text.

    python3 examples/finetune.py
    python3 examples/finetune.py --model PATH --data FILE.jsonl
    torchrun --nproc-per-node 2 examples/finetune.py        # each process holds half of the experts of every layer

The output folder then has `model/` (a Hugging Face checkpoint), `loss.png`, `expert_load.png` and `history.json`.
"""

import argparse
import ast
import json
import math
import os
import re
import shutil
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only, no window
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.colors import TwoSlopeNorm
from matplotlib.ticker import MaxNLocator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeConfig
from transformers.utils import logging as transformers_logging

import mok.hf
from mok.comm import Communicator, as_communicator
from mok.nn import MoKExperts, MoKLayer, RouterLosses, tokens_per_expert

END_OF_TEXT = "<|endoftext|>"


class InputError(Exception):
    """Something the user gave that can not be used."""


def python_text() -> tuple[list[str], list[str], list[str]]:
    """Documents for the base model (docstrings), for fine-tuning (topics of `help`), and held out (every sixth).

    No paragraph of a later list is in an earlier one.
    """
    texts = [topics[name] for name in sorted(topics)]
    held_out = texts[::6]
    tuning = without_paragraphs_of(held_out, [text for index, text in enumerate(texts) if index % 6])
    return without_paragraphs_of(held_out + tuning, standard_library_docstrings()), tuning, held_out


def standard_library_docstrings() -> list[str]:
    """The docstrings of each top-level module of the standard library, one document a module."""
    documents = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
        documents.append("\n\n".join(filter(None, docstrings)))
    return documents


def without_paragraphs_of(others: list[str], documents: list[str]) -> list[str]:
    seen = {paragraph for other in others for paragraph in paragraphs(other)}
    return ["\n\n".join(p for p in paragraphs(document) if p not in seen) for document in documents]


def paragraphs(text: str) -> list[str]:
    return [part for part in re.split(r"\n(?:[ \t]*\n)+", text.strip("\n")) if part]


def read_documents(path: Path) -> list[str]:
    """One document of a text file, or one of the "text" of each line of a JSONL file."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--data: {path} can not be read as UTF-8 text: {error}") from error
    if path.suffix != ".jsonl":
        return [text]
    documents = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f'--data: {path}:{number}: expected {{"text": "..."}}, got {line[:60]!r}') from error
        if not isinstance(document, str):
            raise InputError(f'--data: {path}:{number}: "text": expected a string, got {document!r:.60}')
        documents.append(document)
    return documents


def train_tokenizer(documents: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level byte-pair encoding: any text can be encoded, and decoding gives it back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def load_tokenizer(path: Path) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"--model: {path} has no tokenizer that can be used: {error}") from error
    if tokenizer.eos_token_id is None:
        raise InputError(f"--model: the tokenizer of {path} has no end-of-text token")
    return tokenizer


def to_blocks(documents: list[str], tokenizer: Any, sequence_length: int) -> Tensor:
    """All documents, each closed by the end-of-text token, in rows `[N, sequence_length + 1]`; the rest is dropped."""
    ids = [token for document in documents for token in [*tokenizer.encode(document), tokenizer.eos_token_id]]
    width = sequence_length + 1
    return torch.tensor(ids[: len(ids) // width * width], dtype=torch.int64).view(-1, width)


def load_model(path: Path, ranks: Communicator, device: torch.device) -> nn.Module:
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


def expert_group(ranks: Communicator) -> dist.ProcessGroup | None:
    return dist.group.WORLD if ranks.size > 1 else None


def make_base_model(folder: Path, options: argparse.Namespace, ranks: Communicator) -> None:
    """Train a tokenizer and a small Qwen3-MoE from nothing, and save both as a Hugging Face checkpoint."""
    documents, _, _ = python_text()
    tokenizer = train_tokenizer(documents, vocab_size=2048)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        moe_intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(options.seed)  # the same weights on every rank; convert keeps this rank's experts
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mok.hf.convert(model, process_group=expert_group(ranks))
    blocks = to_blocks(documents, tokenizer, options.sequence_length)
    training = Training(model, blocks, options.base_steps, 3e-3, options, ranks, folder.with_name("base-training"))
    training.run("base model")
    mok.hf.save_pretrained(model, training.folder)
    if ranks.rank == 0:
        tokenizer.save_pretrained(training.folder)
        training.remove_checkpoints()
        shutil.rmtree(folder, ignore_errors=True)
        training.folder.rename(folder)  # from here on it is whole
    ranks.barrier()


@contextmanager
def recorded_routing(model: nn.Module) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """(logits, weights, expert ids) of each MoE layer; filled when the model is called inside the context."""
    routing: list[tuple[Tensor, Tensor, Tensor]] = []
    logits: list[Tensor] = []

    def after_router(_router: nn.Module, _inputs: Any, output: Any) -> None:
        # What a router returns, and in which order, differs between families; the logits are the widest of it.
        logits.append(max([output] if isinstance(output, Tensor) else output, key=lambda tensor: tensor.shape[-1]))

    def before_experts(_experts: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        routing.append((logits[-1], inputs[2], inputs[1]))

    layers = [module for module in model.modules() if isinstance(module, MoKLayer)]
    hooks = [layer.router.register_forward_hook(after_router) for layer in layers]
    hooks += [layer.experts.register_forward_pre_hook(before_experts) for layer in layers]
    try:
        yield routing
    finally:
        for hook in hooks:
            hook.remove()


class Training:
    """One model on one set of token blocks, in one process or expert-parallel.

    A step takes the same batch however many ranks there are; each rank takes its share of the rows. Losses are sums
    over a rank's tokens divided by the number of all ranks' tokens, so that the gradients of what every rank holds add
    up over the ranks, and those of the experts, which get tokens from all ranks, are whole as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Tensor,
        steps: int,
        learning_rate: float,
        options: argparse.Namespace,
        ranks: Communicator,
        folder: Path,
        held_out: Tensor | None = None,
    ) -> None:
        for text, use in ((blocks, "training"), (held_out, "held-out")):
            if text is not None and len(text) < options.batch_size:
                size = f"{len(text)} sequences of {options.sequence_length} tokens"
                raise InputError(f"too little {use} text for a batch of {options.batch_size}: {size}")
        self.model, self.blocks, self.held_out, self.steps = model.to(options.device), blocks, held_out, steps
        self.options, self.ranks, self.folder = options, ranks, folder
        experts = {id(p) for m in model.modules() if isinstance(m, MoKExperts) for p in m.parameters()}
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.expert_parameters = [p for p in parameters if id(p) in experts]
        self.replicated_parameters = [p for p in parameters if id(p) not in experts]
        self.optimizer = torch.optim.AdamW(parameters, learning_rate, weight_decay=0.01, fused=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.learning_rate_factor)
        self.step = 0
        self.history: list[dict[str, float]] = []
        self.expert_load: list[Tensor] = []

    def learning_rate_factor(self, step: int) -> float:
        """Linear warm-up over a twentieth of the steps, then a cosine down to a tenth."""
        warm_up = max(1, self.steps // 20)
        return min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / self.steps)))

    def run(self, name: str) -> None:
        torch.manual_seed(self.options.seed + self.ranks.rank)
        if self.options.resume:
            self.load_checkpoint()
        if self.step == 0 and self.held_out is not None:
            self.evaluate()
        bar = tqdm(
            total=self.steps, initial=self.step, desc=name, unit="step", mininterval=1, disable=self.ranks.rank > 0
        )
        while self.step < self.steps:
            self.history.append(self.train_step())
            self.step += 1
            bar.set_postfix(loss=f"{self.history[-1]['loss']:.3f}", refresh=False)
            bar.update()
            last = self.step == self.steps
            if self.held_out is not None and (last or self.step % self.options.evaluate_every == 0):
                self.evaluate()
            if self.step % self.options.checkpoint_every == 0 and not last:
                self.save_checkpoint()
        bar.close()

    def train_step(self) -> dict[str, float]:
        self.model.train()
        cross_entropy, auxiliary, _ = self.losses(self.batch())
        (cross_entropy + self.options.auxiliary_loss * auxiliary).backward()
        gradient_norm = self.reduce_and_clip_gradients()
        loss, auxiliary = self.ranks.all_reduce_sum(torch.stack([cross_entropy, auxiliary]).detach()).tolist()
        if not math.isfinite(loss + gradient_norm):
            raise InputError(f"step {self.step}: loss {loss}, gradient norm {gradient_norm}; lower --learning-rate")
        learning_rate = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return {
            "step": self.step,
            "loss": loss,
            "auxiliary_loss": auxiliary,
            "gradient_norm": gradient_norm,
            "learning_rate": learning_rate,
        }

    def batch(self) -> Tensor:
        """The rows of this step, which depend on nothing but the seed and the step: a resumed run sees the same."""
        batch_size = self.options.batch_size
        epoch, index = divmod(self.step, len(self.blocks) // batch_size)
        order = torch.randperm(len(self.blocks), generator=torch.Generator().manual_seed(self.options.seed + epoch))
        return self.blocks[order[index * batch_size : (index + 1) * batch_size]]

    def losses(self, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's part of the cross entropy and of the load-balancing loss; its tokens per expert `[layers, E]`."""
        share = batch[self.ranks.rank :: self.ranks.size].to(self.options.device)
        inputs, targets = share[:, :-1], share[:, 1:]
        on_gpu = self.options.device.type == "cuda"
        autocast = torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()
        with recorded_routing(self.model) as routing, autocast:
            logits = self.model(input_ids=inputs, use_cache=False).logits
        num_tokens = len(batch) * inputs.shape[1]
        cross_entropy = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") / num_tokens
        num_experts = routing[0][0].shape[-1]
        router_losses = RouterLosses(num_experts, process_group=expert_group(self.ranks))
        for output in routing:
            router_losses.add(output)
        load = torch.stack([tokens_per_expert(top_experts, num_experts) for _, _, top_experts in routing])
        return cross_entropy, router_losses.load_balancing_loss(), load

    def reduce_and_clip_gradients(self) -> float:
        """Add up the replicated parameters' gradients; clip all by their norm over the whole model, and return it."""
        for parameter in self.replicated_parameters:
            parameter.grad = self.ranks.all_reduce_sum(parameter.grad)
        squares = [
            torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]).to(self.options.device) ** 2
            for group in (self.replicated_parameters, self.expert_parameters)
        ]
        norm = (squares[0] + self.ranks.all_reduce_sum(squares[1])).sqrt()
        parameters = self.replicated_parameters + self.expert_parameters
        torch.nn.utils.clip_grads_with_norm_(parameters, self.options.clip, norm)
        return norm.item()

    @torch.no_grad()
    def evaluate(self) -> None:
        """Loss and expert load on the held-out text; whole batches only."""
        self.model.eval()
        batches = self.held_out.split(self.options.batch_size)
        results = [self.losses(batch) for batch in batches if len(batch) == self.options.batch_size]
        loss = self.ranks.all_reduce_sum(sum(result[0] for result in results) / len(results)).item()
        load = self.ranks.all_reduce_sum(sum(result[2] for result in results)).cpu()
        self.expert_load = [*self.expert_load[:1], load]  # the first and the last
        self.history.append({"step": self.step, "held_out_loss": loss})

    def save_checkpoint(self) -> None:
        """All that `load_checkpoint` needs to go on with the same bits; each rank writes its own file."""
        on_gpu = self.options.device.type == "cuda"
        state = {
            "settings": self.settings(),
            "step": self.step,
            "history": self.history,
            "expert_load": self.expert_load,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if on_gpu else None,
        }
        unfinished = self.folder / "unfinished"
        unfinished.mkdir(parents=True, exist_ok=True)
        torch.save(state, unfinished / f"rank-{self.ranks.rank}.pt")
        self.ranks.barrier()
        if self.ranks.rank == 0:
            older = checkpoints(self.folder)
            unfinished.rename(self.folder / f"step-{self.step:06}")
            for path in older:
                shutil.rmtree(path)
        self.ranks.barrier()

    def load_checkpoint(self) -> None:
        """Go back to the newest checkpoint, if there is one."""
        newest = next(reversed(checkpoints(self.folder)), None)
        if newest is None:
            return
        path = newest / f"rank-{self.ranks.rank}.pt"
        try:
            state = torch.load(path, map_location=self.options.device)
        except (OSError, RuntimeError) as error:
            raise InputError(f"--resume: {path} can not be read: {error}") from error
        settings = self.settings()
        differing = [
            f"{key}: {settings[key]} now, {old} then" for key, old in state["settings"].items() if settings[key] != old
        ]
        if differing:
            raise InputError(f"--resume: {newest} was made with other settings ({'; '.join(differing)})")
        self.step, self.history, self.expert_load = state["step"], state["history"], state["expert_load"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"].cpu())
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"].cpu())

    def settings(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one that it goes on with."""
        names = ("auxiliary_loss", "batch_size", "clip", "evaluate_every", "seed", "sequence_length")
        own = {"steps": self.steps, "sequences": len(self.blocks), "processes": self.ranks.size}
        return own | {name: getattr(self.options, name) for name in names}

    def remove_checkpoints(self) -> None:
        for path in checkpoints(self.folder):
            shutil.rmtree(path)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("step-*"))


def plot_losses(history: list[dict[str, float]], path: Path) -> None:
    steps, losses, auxiliary = zip(
        *((h["step"], h["loss"], h["auxiliary_loss"]) for h in history if "loss" in h), strict=True
    )
    held_out = [(h["step"], h["held_out_loss"]) for h in history if "held_out_loss" in h]
    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained")
    top.plot(steps, losses, color="tab:blue", alpha=0.5, label="training")
    top.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", label="held out")
    top.set(title="Fine-tuning loss", ylabel="cross entropy per token (nats)")
    top.legend()
    bottom.plot(steps, auxiliary, color="tab:green")
    bottom.set(xlabel="step", ylabel="load-balancing loss")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_expert_load(before: Tensor, after: Tensor, path: Path) -> None:
    """Heat maps `[layers, E]` of each expert's share of its layer's routes, as a multiple of an even share."""
    figure, panels = plt.subplots(2, sharex=True, sharey=True, figsize=(8, 6), layout="constrained")
    shares = [load / load.float().mean(dim=1, keepdim=True) for load in (before, after)]
    limit = max(2.0, *(share.max().item() for share in shares))
    for axes, share, when in zip(panels, shares, ("before", "after"), strict=True):
        norm = TwoSlopeNorm(vmin=0, vcenter=1, vmax=limit)
        image = axes.imshow(share.tolist(), aspect="auto", cmap="RdBu_r", norm=norm, interpolation="nearest")
        axes.set(title=f"Expert load on held-out text {when} fine-tuning", ylabel="MoE layer")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[1].set_xlabel("expert")
    figure.colorbar(image, ax=panels, label="tokens, relative to an even share")
    figure.savefig(path, dpi=120)
    plt.close(figure)


@torch.no_grad()
def generate(model: nn.Module, tokenizer: Any, held_out: Tensor, options: argparse.Namespace) -> list[tuple[str, str]]:
    """Beginnings of held-out sequences and what the model makes of them. Every rank must call it."""
    model.eval()
    torch.manual_seed(options.seed)  # the ranks draw the same tokens
    pairs = []
    for block in held_out[:: max(1, len(held_out) // 3)][:3]:
        prompt = block[None, :24].to(options.device)
        sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "pad_token_id": tokenizer.eos_token_id}
        whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=48, **sampling)[0]
        pairs.append(
            (tokenizer.decode(prompt[0]), tokenizer.decode(whole[prompt.shape[1] :], skip_special_tokens=True))
        )
    return pairs


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, metavar="PATH", help="folder of a Hugging Face MoE checkpoint; none: make a small one")
    add("--data", type=Path, metavar="FILE", help='.txt, or .jsonl with a "text" in each line; a tenth is held out')
    add("--output", type=Path, metavar="DIR", default=Path("outputs/finetune"), help="default: %(default)s")
    add("--resume", action="store_true", help="go on where an unfinished run in --output stopped")
    add("--steps", type=positive(int), default=150, help="of fine-tuning; default: %(default)s")
    add("--base-steps", type=positive(int), default=400, help="of the small base model; default: %(default)s")
    add(
        "--batch-size", type=positive(int), default=16, help="sequences of all processes together; default: %(default)s"
    )
    add("--sequence-length", type=positive(int), default=128, help="tokens; default: %(default)s")
    add("--learning-rate", type=positive(float), help="peak; default: 1e-3, or 2e-5 with --model")
    add(
        "--auxiliary-loss", type=float, default=0.01, metavar="C", help="weight of load balancing; default: %(default)s"
    )
    add("--clip", type=positive(float), default=1.0, metavar="NORM", help="largest gradient norm; default: %(default)s")
    add("--evaluate-every", type=positive(int), default=25, metavar="STEPS", help="default: %(default)s")
    add("--checkpoint-every", type=positive(int), default=50, metavar="STEPS", help="default: %(default)s")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is a GPU")
    options = parser.parse_args()
    options.learning_rate = options.learning_rate or (2e-5 if options.model else 1e-3)
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
    options.device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)) if kind == "cuda" else None)
    if kind == "cuda":
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
    if not options.resume and any(output.glob("*/step-*")):
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
        is_held_out = torch.arange(len(all_blocks)) % 10 == 9
        blocks, held_out = all_blocks[~is_held_out], all_blocks[is_held_out]
    model = load_model(model_path, ranks, options.device)
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
        plot_expert_load(*training.expert_load, output / "expert_load.png")
        (output / "history.json").write_text(json.dumps(training.history, indent=1))
        training.remove_checkpoints()
    for prompt, continuation in generate(model, tokenizer, held_out, options):
        say(f"\nprompt: {' '.join(prompt.split())}\nmodel:  {' '.join(continuation.split())}")
    before, after = (entry["held_out_loss"] for entry in (training.history[0], training.history[-1]))
    say(f"\nloss on held-out text: {before:.3f} before, {after:.3f} after fine-tuning")
    say(f"written to {output}: model/ (a Hugging Face checkpoint), loss.png, expert_load.png, history.json")
    say(f"took {time.monotonic() - start:.0f} s")


def main() -> None:
    options = parse_arguments()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        finetune(options, start_ranks(options))
    except InputError as error:
        sys.exit(f"finetune.py: error: {error}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
