"""The layer: router, experts, shared expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mok._checks import check_int, check_tensor, describe
from mok.comm import as_communicator
from mok.config import MoKConfig
from mok.nn.experts import MoKExperts, MoKSharedExpert
from mok.nn.replay import routing_memory
from mok.nn.router import MoKRouter, RouterOutput


class MoKLayer(nn.Module):
    """A mixture-of-experts block: `[..., H]` -> `[..., H]`.

        y = sum over the chosen experts e of w_e * experts[e](x)  [+ shared_expert(x) [* sigmoid(shared_expert_gate x)]]

    Children: `router`; `experts` (`MoKExperts`); `shared_expert` (`MoKSharedExpert`) and `shared_expert_gate`
    (`nn.Linear [1, H]`), or None.

    router: a module that maps `[T, H]` to (logits `[T, E]`, weights `[T, K]`, ids `[T, K]`), such as a `MoKRouter` with
        other options or one of transformers' own; default: `MoKRouter(hidden_size, num_experts, top_k)`.
    shared_intermediate_size: width of the shared expert; None: no shared expert.
    shared_expert_gate: scale the shared expert's output by a learned sigmoid.
    swiglu_limit: gate is clamped to at most this, up to within +- this, in all experts.
    process_group: ranks that share the experts (`MoKExperts`).
    config: settings of the kernels.

    Router logits, weights and ids: `forward(..., return_router_output=True)`, or a forward hook on `router`.
    Load: `mok.nn.tokens_per_expert(router_output.top_experts, num_experts)`. Nothing is kept on the module, so that
    checkpointing, compilation and microbatches can not count twice.

    Raises TypeError or ValueError that names the argument.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        router: nn.Module | None = None,
        shared_intermediate_size: int | None = None,
        shared_expert_gate: bool = False,
        swiglu_limit: float | None = None,
        process_group: Any = None,
        config: MoKConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = check_int("hidden_size", hidden_size, 1)
        self.swiglu_limit = swiglu_limit
        if shared_expert_gate and shared_intermediate_size is None:
            raise ValueError("shared_expert_gate: expected False without shared_intermediate_size, got True")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.router = MoKRouter(hidden_size, num_experts, top_k, **factory) if router is None else router
        self.experts = MoKExperts(
            num_experts,
            hidden_size,
            intermediate_size,
            swiglu_limit=swiglu_limit,
            process_group=process_group,
            config=config,
            **factory,
        )
        self.shared_expert = (
            None
            if shared_intermediate_size is None
            else MoKSharedExpert(hidden_size, shared_intermediate_size, swiglu_limit=swiglu_limit, **factory)
        )
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False, **factory) if shared_expert_gate else None

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, *, return_router_output: bool = False
    ) -> Any:
        """`hidden_states [..., H]` -> `[..., H]`, and the `RouterOutput` if asked for.

        padding_mask: bool `[...]`, True for real tokens. The others are not routed; whatever they hold, their output
        and the gradient of their input are zero.
        """
        self._check(hidden_states, padding_mask)
        x = hidden_states.reshape(-1, self.hidden_size)
        mask = None if padding_mask is None else padding_mask.reshape(-1)
        if mask is not None:
            x = x.masked_fill(~mask[:, None], 0.0)
        routed = self._route(x, mask)
        shared = self._fused_shared_expert()
        output = self.experts(x, routed.top_experts, routed.router_weights, shared=shared)
        if self.shared_expert is not None and shared is None:
            beside = self.shared_expert(x)
            if self.shared_expert_gate is not None:
                beside = self.shared_expert_gate(x).sigmoid() * beside
            output = output + beside
        output = output.view(hidden_states.shape)
        return (output, routed) if return_router_output else output

    def _route(self, x: Tensor, mask: Tensor | None) -> RouterOutput:
        if isinstance(self.router, MoKRouter):
            memory = None if torch.compiler.is_compiling() else routing_memory(self.experts)
            return self.router(x, mask, replay=memory and memory.settle)
        logits, weights, top_experts = self.router(x)
        if mask is not None:
            top_experts = top_experts.masked_fill(~mask[:, None], -1)
        return RouterOutput(logits, weights, top_experts)

    def _fused_shared_expert(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The weights of a shared expert that the experts' op can compute; None: call it, if there is one."""
        expert = self.shared_expert
        if not isinstance(expert, MoKSharedExpert) or self.shared_expert_gate is not None:
            return None
        return expert.plain_weights() if expert.swiglu_limit == self.swiglu_limit else None

    def _check(self, hidden_states: Tensor, padding_mask: Tensor | None) -> None:
        """Raises on every rank of the group if on one: the others are told at their first meeting in `experts`."""
        error: TypeError | ValueError | None = None
        if hidden_states.dim() == 0 or hidden_states.shape[-1] != self.hidden_size:
            error = ValueError(f"hidden_states: expected [..., {self.hidden_size}], got {describe(hidden_states)}")
        elif padding_mask is not None:
            try:
                check_tensor("padding_mask", padding_mask, hidden_states.shape[:-1], torch.bool, hidden_states.device)
            except (TypeError, ValueError) as caught:
                error = caught
        if error is not None:
            as_communicator(self.experts.process_group).agree("MoKLayer", {}, error)
