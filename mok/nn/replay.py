"""Routing replay: a forward that is run again by activation checkpointing routes as it did the first time.

A recomputed forward need not have the same bits (an attention kernel that adds in another order is enough), and a score
that moves by one bit can flip a choice. Backward would then mix two routings. So each forward of a layer is remembered,
ids and weights, and a recomputation takes its ids from there: whatever its scores are, it can not choose otherwise.

torch.utils.checkpoint does not say which forward is being repeated, but autograd does. It numbers its nodes in the
order of creation, and a recomputation is set off by a node of the first forward:

* `use_reentrant=False`: by a node of the checkpointed region, created after the layers in it were called (the region's
  last node that saved something). So the forward sought is in the region of the last one remembered before that node.
  Forwards lie in one region if the same saved-tensor hooks were active.
* `use_reentrant=True`: by the node of the whole region, created before. So the forward sought is the first after it.

The n-th call in a recomputation is the n-th of its region. What is remembered lives as long as the graph: on the
autograd node of the layer's output. A reentrant checkpoint's first forward leaves no such node, so those are kept until
the first forward after their recomputation.

Under torch.compile nothing is remembered; there, keep the choice with a policy:
`checkpoint(fn, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts,
[torch.ops.aten.topk.default]))`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_MOST_REENTRANT = 256  # forwards in flight in one layer; more than any pipeline has


@dataclass(eq=False)
class _Forward:
    """One remembered forward. born: the number that an autograd node created then would have had; region: the
    saved-tensor hooks that were active; is_reentrant: no graph holds it."""

    top_experts: Tensor
    router_weights: Tensor | None
    born: int
    region: object
    is_reentrant: bool
    was_recomputed: bool = False


class RoutingMemory:
    """The forwards of one module. Ask `routing_memory` for it."""

    def __init__(self) -> None:
        self._forwards: list[weakref.ref[_Forward]] = []  # by age
        self._reentrant: list[_Forward] = []
        self._unheld: list[_Forward] = []
        self._recomputation: object = None
        self._num_calls = 0

    def settle(self, top_experts: Tensor) -> Tensor:
        """The ids to use: those given, except in a recomputation. Ids that this returned last come back as they are."""
        # A Function's forward, such as a reentrant checkpoint's, switches forward-mode gradients off, too.
        in_function = not torch.is_grad_enabled() and not torch._C._is_fwd_grad_enabled()
        needs_no_memory = torch.is_inference_mode_enabled() or not (torch.is_grad_enabled() or in_function)
        if needs_no_memory or self.current(top_experts) is not None:
            return top_experts
        first = None
        cause = torch._C._current_autograd_node()
        if cause is None:
            self._recomputation = None
            self._reentrant = [forward for forward in self._reentrant if not forward.was_recomputed]
        else:
            first = self._recall(cause._sequence_nr())
        if first is None or first.top_experts.shape != top_experts.shape:
            self._remember(top_experts, None, in_function)
            return top_experts
        first.was_recomputed = True
        self._remember(first.top_experts, first.router_weights, in_function)
        return first.top_experts

    def current(self, top_experts: Tensor) -> _Forward | None:
        """The forward that `settle` has just given these ids, None if it did not remember it."""
        is_current = bool(self._unheld) and self._unheld[-1].top_experts is top_experts
        return self._unheld[-1] if is_current else None

    def hold(self, output: Tensor | None) -> None:
        """Let what was settled since the last call live as long as the graph of the layer's output, if it has one."""
        if output is not None and output.grad_fn is not None:
            metadata: Any = output.grad_fn.metadata  # a dict, though typed as a method
            metadata["mok.routing"] = self._unheld
        self._unheld = []

    def _remember(self, top_experts: Tensor, router_weights: Tensor | None, is_reentrant: bool) -> None:
        born = torch._C._autograd._get_sequence_nr()
        forward = _Forward(top_experts, router_weights, born, _active_hooks(), is_reentrant)
        self._forwards = [ref for ref in self._forwards if ref() is not None]
        self._forwards.append(weakref.ref(forward))
        self._unheld.append(forward)
        if is_reentrant:
            self._reentrant = [*self._reentrant, forward][-_MOST_REENTRANT:]

    def _recall(self, cause: int) -> _Forward | None:
        """The forward that is being repeated on account of node number `cause`; None if this is a first one."""
        recomputation = (torch._C._current_graph_task_id(), cause, _active_hooks())
        if recomputation != self._recomputation:
            self._recomputation, self._num_calls = recomputation, 0
        forwards = [forward for ref in self._forwards if (forward := ref()) is not None]
        region = [forward for forward in forwards if forward.is_reentrant and forward.born > cause]
        if not region:
            earlier = [forward for forward in forwards if not forward.is_reentrant and forward.born <= cause]
            region = [forward for forward in forwards if earlier and forward.region == earlier[-1].region]
        self._num_calls += 1
        return region[self._num_calls - 1] if self._num_calls <= len(region) else None


_memories: weakref.WeakKeyDictionary[nn.Module, RoutingMemory] = weakref.WeakKeyDictionary()


def routing_memory(module: nn.Module) -> RoutingMemory:
    """The memory of `module`. It lies beside it, so that copies, pickles and state_dicts know nothing of it."""
    return _memories.setdefault(module, RoutingMemory())


def _active_hooks() -> object:
    """Something equal to itself while the same saved-tensor hooks are active; keeps nothing alive."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else weakref.ref(hooks[0])


def replay(
    module: nn.Module, compute: Callable[[Tensor, Tensor], Tensor], top_experts: Tensor, router_weights: Tensor
) -> Tensor:
    """`compute(top_experts, router_weights)` as a forward of `module`: in a recomputation, with what it was first
    computed with; `[T, K]` both."""
    if torch.compiler.is_compiling():
        return compute(top_experts, router_weights)
    memory = routing_memory(module)
    first = memory.settle(top_experts)
    forward = memory.current(first)
    if forward is not None:
        if forward.router_weights is None:
            forward.router_weights = router_weights.detach()
        router_weights = _FirstWeights.apply(router_weights, top_experts, first, forward.router_weights)
    output = None
    try:
        output = compute(first, router_weights)
        return output
    finally:  # also where a checkpoint that has all it needs breaks off the recomputation
        memory.hold(output)


class _FirstWeights(torch.autograd.Function):
    """The value of `first_weights`, the weights of the routes `first`; the gradient of `router_weights`, those of the
    routes `chosen`. All are `[T, K]`, and the same but in a recomputation.

    Where `first` has a route that is not among the token's chosen ones, the router gets no gradient for it. (A
    `MoKRouter` replays ids itself, so there it does.)
    """

    @staticmethod
    def forward(ctx: Any, router_weights: Tensor, chosen: Tensor, first: Tensor, first_weights: Tensor) -> Tensor:
        # Also where they are the same: a recomputation must save what the first forward did.
        ctx.save_for_backward(chosen, first)
        return first_weights.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        chosen, first = ctx.saved_tensors
        if chosen.data_ptr() != first.data_ptr():
            grad = torch.where(_pairs(chosen, first), grad[:, :, None], 0.0).sum(1)
        return grad, None, None, None


def _pairs(chosen: Tensor, first: Tensor) -> Tensor:
    """`[T, K, K]`: does place i of `first` hold the expert of place j of `chosen`? Only j = i if both agree on i."""
    diagonal = torch.eye(chosen.shape[1], dtype=torch.bool, device=chosen.device)
    return torch.where((chosen == first)[:, :, None], diagonal, first[:, :, None] == chosen[:, None, :])
