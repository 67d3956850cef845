"""The training loop of the fine-tuning example, in one process or expert-parallel."""

import argparse
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import InputError
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from mok.comm import Communicator
from mok.nn import MoKExperts, MoKLayer, RouterLosses, tokens_per_expert


def expert_group(ranks: Communicator) -> dist.ProcessGroup | None:
    return dist.group.WORLD if ranks.size > 1 else None


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
        model: PreTrainedModel,
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
        balance, load = zip(*(self.balance(output) for output in routing), strict=True)
        return cross_entropy, torch.stack(balance).mean(), torch.stack(load)

    def balance(self, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Load-balancing loss and tokens per expert of one layer: layers do not make up for each other."""
        router_losses = RouterLosses(num_experts=output[0].shape[-1], process_group=expert_group(self.ranks))
        router_losses.add(output)
        return router_losses.load_balancing_loss(), tokens_per_expert(output[2], router_losses.num_experts)

    def reduce_and_clip_gradients(self) -> float:
        """Add up the replicated parameters' gradients; clip all by their norm over the whole model, and return it."""
        for parameter in self.replicated_parameters:
            # A parameter that took no part has no gradient, on this rank.
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.ranks.all_reduce_sum(own)
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
        assert self.held_out is not None
        batches = self.held_out.split(self.options.batch_size)
        results = [self.losses(batch) for batch in batches if len(batch) == self.options.batch_size]
        losses, _, loads = (torch.stack(column) for column in zip(*results, strict=True))
        loss = self.ranks.all_reduce_sum(losses.mean()).item()
        load = self.ranks.all_reduce_sum(loads.sum(0)).cpu()
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
        own = {
            "learning_rate": self.optimizer.defaults["lr"],
            "processes": self.ranks.size,
            "sequences": len(self.blocks),
            "steps": self.steps,
        }
        return own | {name: getattr(self.options, name) for name in names}

    def remove_checkpoints(self) -> None:
        for path in (*checkpoints(self.folder), self.folder / "unfinished"):
            shutil.rmtree(path, ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("step-*"))
