"""What `mok.functional` and its backends hand to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mok.comm import Communicator
from mok.config import MoKConfig

# An MXFP8 weight is a tuple of data and scales (`mok.mxfp8`).
Weight = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class MoKWorkspace:
    """What one rank keeps between calls. Made by `mok.functional.get_workspace`; holds no state of any call.

    num_local_tokens: the most tokens that a call may bring, equal on all ranks. hidden_size, topk: H and K.
    backend: the backend module that serves it. buffers: whatever that backend keeps here.
    """

    config: MoKConfig
    communicator: Communicator
    device: torch.device
    num_local_tokens: int
    hidden_size: int
    topk: int
    backend: Any
    buffers: Any = None


@dataclass
class MoKSchedule:
    """Which routed row is which. R routed rows on this rank, E_l local experts, T local tokens; all int32.

    Rows are grouped by expert and ordered by (source rank, token, k) inside an expert, so that every sum over rows is
    the same however the tokens are split over ranks.

    expert_offsets [E_l + 1]: first row of each local expert; the last entry is R.
    row_route [R]: the route of each row, `(source_rank * num_local_tokens + token) * K + k`. Where a backend can not
        know R without waiting for the GPU, it has room for more rows and -1 after the last.
    route_row [T, K]: the row of each local route on the rank that owns its expert, -1 if dropped.
    route_rank [T, K]: that rank, -1 if dropped.

    Every field, also of a backend's subclass, is a tensor, so that callers can flatten a schedule into
    `save_for_backward` and rebuild it by keyword.
    """

    expert_offsets: Tensor
    row_route: Tensor
    route_row: Tensor
    route_rank: Tensor


@dataclass
class MoKForwardContext:
    """What backward needs from forward; flattened and rebuilt like `MoKSchedule`.

    gate_up [R, 2I]: g and u of every routed row, before the activation, in the dtype of x.
    shared_gate_up [T, 2*I_s]: the same of the shared expert; empty without one.
    Both are empty after `forward(save_for_backward=False)`.
    """

    gate_up: Tensor
    shared_gate_up: Tensor


class ExpertWeights(NamedTuple):
    """The six weights in the order of the public signatures; shared ones are None together."""

    shared_gate: Tensor | None
    shared_up: Tensor | None
    shared_down: Tensor | None
    routed_gate: Weight
    routed_up: Weight
    routed_down: Weight | None  # None where only the context is computed


class LoraFactors(NamedTuple):
    """Adapters of the routed weights, `W + B A`, with their scaling in B; or their gradients. The two factors of a
    weight are None together where it has no adapter. r may differ between the two weights.

    gate_up_A [E_l, r, H], gate_up_B [E_l, 2I, r] (gate rows first), down_A [E_l, r, I], down_B [E_l, H, r].
    """

    gate_up_A: Tensor | None = None
    gate_up_B: Tensor | None = None
    down_A: Tensor | None = None
    down_B: Tensor | None = None


NO_LORA = LoraFactors()


class MoKGradients(NamedTuple):
    """The results of `mok.functional.backward`, None where not wanted or where there is no such input."""

    d_x: Tensor | None
    d_router_weights: Tensor | None
    d_routed_gate: Tensor | None
    d_routed_up: Tensor | None
    d_routed_down: Tensor | None
    d_shared_gate: Tensor | None
    d_shared_up: Tensor | None
    d_shared_down: Tensor | None


class NeedsGrad(NamedTuple):
    """Which gradients `backward` computes, in the order of its results."""

    x: bool = True
    router_weights: bool = True
    routed_gate: bool = True
    routed_up: bool = True
    routed_down: bool = True
    shared_gate: bool = True
    shared_up: bool = True
    shared_down: bool = True


class MainGrads(NamedTuple):
    """Buffers that weight gradients are added to, in the order of the weights; None: return that gradient instead."""

    shared_gate: Tensor | None = None
    shared_up: Tensor | None = None
    shared_down: Tensor | None = None
    routed_gate: Tensor | None = None
    routed_up: Tensor | None = None
    routed_down: Tensor | None = None
