"""The experts, routed and shared."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from mok._checks import check_int
from mok.comm import as_communicator
from mok.config import MoKConfig
from mok.functional import LoraFactors
from mok.nn._op import moe, seat_of


class MoKExperts(nn.Module):
    """SwiGLU experts `down(silu(gate x) * up x)`; in the experts slot of a transformers block, or in `MoKLayer`.

    Parameters `gate_up_proj [E_l, 2I, H]` (gate rows first) and `down_proj [E_l, H, I]`: the E_l = num_experts / ranks
    experts `first_expert ..` that this rank of `process_group` owns (a ProcessGroup, None for one rank, or a member of
    a `mok.testing.VirtualGroup`). Their gradients are of the tokens of all ranks, so do not average them over this
    group: keep them out of a DistributedDataParallel over it.

    lora: None, or the adapters that `mok.nn.add_lora` gave it; with them it computes with the torch backend.

    swiglu_limit: gate is clamped to at most this, up to within +- this.
    Raises ValueError if num_experts can not be divided among the ranks.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        swiglu_limit: float | None = None,
        process_group: Any = None,
        config: MoKConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = check_int("num_experts", num_experts, 1)
        self.hidden_size = check_int("hidden_size", hidden_size, 1)
        self.intermediate_size = check_int("intermediate_size", intermediate_size, 1)
        self.swiglu_limit = swiglu_limit
        communicator = as_communicator(process_group)
        self.num_local_experts, rest = divmod(num_experts, communicator.size)
        if rest:
            raise ValueError(f"num_experts: expected a multiple of the {communicator.size} ranks, got {num_experts}")
        self.first_expert = communicator.rank * self.num_local_experts
        self._seat = seat_of(process_group, config)
        self._seat_with_lora = seat_of(process_group, replace(self._seat.config, backend="torch"))
        self.lora: nn.ModuleDict | None = None
        shape = (self.num_local_experts, 2 * intermediate_size, hidden_size)
        self.gate_up_proj = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        shape = (self.num_local_experts, hidden_size, intermediate_size)
        self.down_proj = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def process_group(self) -> Any:
        return self._seat.process_group

    @property
    def config(self) -> MoKConfig:
        return self._seat.config

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As `nn.Linear`: uniform within 1/sqrt(H) and 1/sqrt(I).

        One number is drawn from torch's CPU generator; each expert's weights come from a generator seeded with it and
        the expert's number. So, for the same `torch.manual_seed`, an expert starts out the same for every EP size
        (and on every kind of device of its own).
        """
        seed = int(torch.randint(2**48, (), device="cpu"))
        for parameter, fan_in in ((self.gate_up_proj, self.hidden_size), (self.down_proj, self.intermediate_size)):
            seed += self.num_experts
            fill_uniform(parameter, 1 / math.sqrt(fan_in), seed + self.first_expert)

    def forward(
        self,
        hidden_states: Tensor,
        top_experts: Tensor,
        router_weights: Tensor,
        *,
        shared: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`hidden_states [T, H]`, ids `[T, K]` (-1 = dropped) and weights `[T, K]` -> `[T, H]`.

        shared: gate and up `[I_s, H]` and down `[H, I_s]` of a shared expert, whose output is added.
        A forward that activation checkpointing repeats keeps the ids of the first (`mok.nn.replay`).
        """
        return moe(
            hidden_states,
            top_experts,
            router_weights,
            self.gate_up_proj,
            self.down_proj,
            shared=shared,
            swiglu_limit=self.swiglu_limit,
            lora=self._lora_factors(),
            module=self,
            seat=self._seat if self.lora is None else self._seat_with_lora,
        )

    def _lora_factors(self) -> LoraFactors | None:
        if self.lora is None:
            return None
        loras: Any = self.lora
        pairs = [
            loras[target].factors() if target in loras else (None, None) for target in ("gate_up_proj", "down_proj")
        ]
        return LoraFactors(*pairs[0], *pairs[1])

    def extra_repr(self) -> str:
        parts = [f"num_experts={self.num_experts}, hidden_size={self.hidden_size}"]
        parts.append(f"intermediate_size={self.intermediate_size}")
        if self.num_local_experts < self.num_experts:
            parts.append(f"local_experts={self.first_expert}..{self.first_expert + self.num_local_experts - 1}")
        if self.swiglu_limit is not None:
            parts.append(f"swiglu_limit={self.swiglu_limit}")
        if self.lora is not None:
            parts.append("backend=torch")
        return ", ".join(parts)


def fill_uniform(parameter: Tensor, bound: float, seed: int) -> None:
    """`[E_l, ...]`: uniform within +- bound, each expert from a seed of its own. Nothing happens on the meta device."""
    if parameter.is_meta:
        return
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    for index, weight in enumerate(whole):
        weight.uniform_(-bound, bound, generator=torch.Generator(whole.device).manual_seed(seed + index))
    if isinstance(parameter, DTensor):  # sharded by FSDP2
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)


class MoKSharedExpert(nn.Module):
    """The expert that sees every token: `down_proj(silu(gate_proj x) * up_proj x)`, linear layers without bias."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        swiglu_limit: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("intermediate_size", intermediate_size, 1)
        self.swiglu_limit = swiglu_limit
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False, device=device, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.swiglu_limit is not None:
            gate, up = gate.clamp(max=self.swiglu_limit), up.clamp(-self.swiglu_limit, self.swiglu_limit)
        return self.down_proj(F.silu(gate) * up)

    def plain_weights(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Gate, up and down weight, if calling this module does no more than use them: no adapter, hook or sharding
        of their own. Else None."""
        modules = (self, self.gate_proj, self.up_proj, self.down_proj)
        kinds: tuple[type[nn.Module], ...] = (MoKSharedExpert, nn.Linear, nn.Linear, nn.Linear)
        for module, kind in zip(modules, kinds, strict=True):
            hooks = (
                module._forward_hooks,
                module._forward_pre_hooks,
                module._backward_hooks,
                module._backward_pre_hooks,
            )
            if type(module) is not kind or any(hooks):
                return None
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        return None if any(isinstance(weight, DTensor) for weight in weights) else weights
