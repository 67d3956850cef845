"""Losses and statistics over the outputs of routers. They see what was routed: masked tokens (ids -1) do not count."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mok.comm import as_communicator
from mok.nn.router import RouterOutput


def tokens_per_expert(top_experts: Tensor, num_experts: int) -> Tensor:
    """How many of the routes `[T, K]` go to each expert: int64 `[E]`; -1 does not count."""
    # A bin of its own for -1: no mask, whose size would have to be known on the host.
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=top_experts.device)
    routes = top_experts.reshape(-1).long()
    return counts.index_add_(0, routes + 1, torch.ones_like(routes))[1:]


class RouterLosses:
    """Both router losses of a batch, whichever way it is cut into microbatches, layers and ranks.

    `add` each RouterOutput; the losses then come from sums over all tokens added:

        load_balancing = E * sum_e (routes to e / N) * (sum of softmax(logits)[e] / N)
        z              = sum of logsumexp(logits)^2 / N

    with N the number of (unmasked) tokens times layers. load_balancing is transformers' `load_balancing_loss_func`
    (Switch Transformer, arXiv 2101.03961, equations 4 to 6), z is ST-MoE's (arXiv 2202.08906, equation 5).

    process_group: the ranks that share the batch. The results are then this rank's part: counts and N are of all ranks,
    so that the parts of all ranks sum to the loss of the whole batch. Collective.

    Autograd follows them. load_balancing multiplies sums of different microbatches, so the gradient of the whole batch
    needs one backward for all of its microbatches. To go backward after each microbatch, give the counts of the whole
    batch, known beforehand, to `load_balancing_loss`; its results then sum to the loss of the batch, and so do its
    gradients.
    """

    def __init__(self, num_experts: int, process_group: Any = None) -> None:
        self.num_experts = num_experts
        self._communicator = as_communicator(process_group)
        self._counts: Tensor | float = 0.0
        self._probabilities: Tensor | float = 0.0
        self._squares: Tensor | float = 0.0
        self._num_tokens: Tensor | float = 0.0

    def add(self, output: RouterOutput | tuple[Tensor, Tensor, Tensor]) -> None:
        router_logits, _, top_experts = output
        logits = router_logits.float()
        routed = (top_experts >= 0).any(-1)
        self._counts = self._counts + tokens_per_expert(top_experts, self.num_experts).float()
        probabilities = logits.softmax(-1).masked_fill(~routed[:, None], 0.0)
        self._probabilities = self._probabilities + probabilities.sum(0)
        self._squares = self._squares + logits.logsumexp(-1).square().masked_fill(~routed, 0.0).sum()
        self._num_tokens = self._num_tokens + routed.sum().float()

    def counts(self) -> tuple[Tensor, Tensor]:
        """Routes per expert `[E]` and N, of all ranks; float32."""
        own = torch.cat([torch.as_tensor(self._counts), torch.as_tensor(self._num_tokens).reshape(1)])
        total = self._communicator.all_reduce_sum(own)
        return total[:-1], total[-1].clamp(min=1.0)  # a batch of nothing but padding has loss 0

    def load_balancing_loss(self, counts: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """A float32 scalar. counts: those of the whole batch, if this is only part of it."""
        per_expert, num_tokens = self.counts() if counts is None else counts
        return torch.sum((per_expert / num_tokens) * (self._probabilities / num_tokens)) * self.num_experts

    def z_loss(self, counts: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """A float32 scalar. counts: those of the whole batch, if this is only part of it."""
        _, num_tokens = self.counts() if counts is None else counts
        return self._squares / num_tokens


def load_balancing_loss(outputs: RouterOutput | Iterable[RouterOutput]) -> Tensor:
    """`RouterLosses.load_balancing_loss` of one router output, or of those of several layers together."""
    return _sums(outputs).load_balancing_loss()


def router_z_loss(outputs: RouterOutput | Iterable[RouterOutput]) -> Tensor:
    """`RouterLosses.z_loss` of one router output, or of those of several layers together."""
    return _sums(outputs).z_loss()


def _sums(outputs: RouterOutput | Iterable[RouterOutput]) -> RouterLosses:
    several = [outputs] if isinstance(outputs, RouterOutput) else list(outputs)
    if not several:
        raise ValueError("outputs: expected at least one router output, got none")
    losses = RouterLosses(several[0].router_logits.shape[-1])
    for output in several:
        losses.add(output)
    return losses
