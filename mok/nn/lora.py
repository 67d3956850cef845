"""LoRA on experts: `W x + s B (A x)` with a pair of low-rank factors per expert, trained in place of its weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mok._checks import check_int
from mok.nn.experts import MoKExperts, fill_uniform

TARGETS = ("gate_up_proj", "down_proj")


class ExpertLora(nn.Module):
    """The adapters of one stacked weight `[E_l, out, in]`: parameters `lora_A [E_l, r, in]` and `lora_B [E_l, out, r]`.
    Made by `add_lora`; `MoKExperts` computes with it."""

    def __init__(
        self,
        weight: Tensor,
        r: int,
        lora_alpha: float,
        *,
        use_rslora: bool,
        first_expert: int,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.r, self.lora_alpha, self.use_rslora = r, lora_alpha, use_rslora
        self.first_expert = first_expert
        num_local_experts, num_rows, num_columns = weight.shape
        if dtype is None:
            # Small steps vanish in the rounding of a half-precision factor; PEFT keeps them in float32 as well.
            dtype = torch.promote_types(weight.dtype, torch.float32)
        empty = weight.new_empty
        self.lora_A = nn.Parameter(empty(num_local_experts, r, num_columns, dtype=dtype, requires_grad=False))
        self.lora_B = nn.Parameter(empty(num_local_experts, num_rows, r, dtype=dtype, requires_grad=False))
        self.reset_parameters()

    @property
    def scaling(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As PEFT: A uniform within 1/sqrt(in), B zero. An expert's A is the same for every EP size."""
        seed = int(torch.randint(2**48, (), device="cpu"))
        fill_uniform(self.lora_A, 1 / math.sqrt(self.lora_A.shape[2]), seed + self.first_expert)
        self.lora_B.zero_()

    def factors(self) -> tuple[Tensor, Tensor]:
        """A and s B, as `mok.functional.LoraFactors` has them."""
        return self.lora_A, self.lora_B * self.scaling

    @torch.no_grad()
    def add_to(self, weight: Tensor) -> None:
        """`weight += s B A`, rounded once; one expert at a time, so that not all products are in memory."""
        for one, lora_A, lora_B in zip(weight.detach(), self.lora_A, self.lora_B, strict=True):
            dtype = torch.promote_types(one.dtype, lora_A.dtype)
            one.copy_(torch.addmm(one.to(dtype), lora_B.to(dtype), lora_A.to(dtype), alpha=self.scaling))

    def extra_repr(self) -> str:
        num_local_experts, num_rows, num_columns = self.lora_B.shape[0], self.lora_B.shape[1], self.lora_A.shape[2]
        shape = f"[{num_local_experts}, {num_rows}, {num_columns}]"
        return f"{shape}, r={self.r}, lora_alpha={self.lora_alpha}, use_rslora={self.use_rslora}"


def add_lora(
    module: nn.Module,
    r: int = 8,
    lora_alpha: float = 8,
    *,
    target_parameters: Iterable[str] = TARGETS,
    use_rslora: bool = False,
    dtype: torch.dtype | None = None,
) -> list[nn.Parameter]:
    """Give every `MoKExperts` in `module` (a layer, a model) adapters, freeze its weights, and return the adapters'
    parameters: those to train. Routers and all else stay as trainable as they are.

        W x + s B (A x)        s = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora

    Neither W + s B A nor a gradient of its shape is ever computed. Options and the first values of the factors (so that
    nothing changes until B is trained) are those of PEFT. The parameters, of this rank's experts only, are
    `experts.lora.<target>.lora_A [E_l, r, in]` and `lora_B [E_l, out, r]`.

    From now on the experts compute with the torch backend, on a GPU too: the kernels do not know adapters.

    r: the rank; a multiple of 8 where torch's grouped matmul on a GPU is to take it.
    target_parameters: "gate_up_proj", "down_proj" or both; call again for the other with other options.
    dtype: of the adapters, whatever the experts compute in; default: that of the weights, but at least float32.

    Raises TypeError or ValueError, before anything is changed, that names the argument: also if there are no experts,
    if they have such adapters already, or if their config asks for the cuda backend.
    """
    check_int("r", r, 1)
    if isinstance(lora_alpha, bool) or not isinstance(lora_alpha, (int, float)):
        raise TypeError(f"lora_alpha: expected a number, got {type(lora_alpha).__name__} {lora_alpha!r}")
    targets = [target_parameters] if isinstance(target_parameters, str) else list(target_parameters)
    if not targets or not set(targets) <= set(TARGETS):
        raise ValueError(f"target_parameters: expected some of {TARGETS}, got {target_parameters!r}")
    found = list(experts_in(module))
    if not found:
        raise ValueError(f"module: expected MoKExperts in it, got none in {type(module).__name__}")
    for name, experts in found:
        check_adaptable(name or type(module).__name__, experts, targets)
    added: list[nn.Parameter] = []
    for _, experts in found:
        if experts.lora is None:
            experts.lora = nn.ModuleDict()
        for target in dict.fromkeys(targets):
            lora = ExpertLora(
                experts.get_parameter(target),
                r,
                lora_alpha,
                use_rslora=use_rslora,
                first_expert=experts.first_expert,
                dtype=dtype,
            )
            experts.lora[target] = lora.train(experts.training)
            added += lora.parameters()
        for target in TARGETS:
            experts.get_parameter(target).requires_grad_(False)
    return added


def merge_lora(module: nn.Module) -> None:
    """Add the adapters of every `MoKExperts` in `module` to its weights, `W += s B A`, and remove them.

    The weights stay frozen. Every backend can compute with them again.

    Raises ValueError if there are no adapters, or if FSDP2 has sharded them.
    """
    adapted = _adapted(module)
    for name, experts in adapted:
        if any(isinstance(parameter, DTensor) for parameter in experts.parameters()):
            where = name or type(module).__name__
            raise ValueError(f"module: expected whole weights to merge in {where}, got sharded ones (DTensor)")
    for _, experts in adapted:
        for target, lora in adapters(experts):
            lora.add_to(experts.get_parameter(target))
    remove_lora(module)


def remove_lora(module: nn.Module) -> None:
    """Remove the adapters of every `MoKExperts` in `module`, and what they have learned. The weights stay frozen.

    Raises ValueError if there are no adapters.
    """
    for _, experts in _adapted(module):
        del experts.lora  # no longer a child
        experts.lora = None


def experts_in(module: nn.Module) -> Iterator[tuple[str, MoKExperts]]:
    """With their names in `module`."""
    return ((name, part) for name, part in module.named_modules() if isinstance(part, MoKExperts))


def adapters(experts: MoKExperts) -> Iterator[tuple[str, ExpertLora]]:
    """By target, gate and up first."""
    there: Any = experts.lora or {}
    return ((target, there[target]) for target in TARGETS if target in there)


def check_adaptable(name: str, experts: MoKExperts, targets: Iterable[str]) -> None:
    """Raise ValueError if `add_lora` can not give `experts`, called `name`, adapters of `targets`."""
    if experts.config.backend == "cuda":
        raise ValueError(
            f'module: expected backend "torch" or None in the config of {name}, got "cuda", '
            "whose kernels do not know adapters"
        )
    if isinstance(experts.down_proj, DTensor):
        raise ValueError(f"module: expected whole weights in {name}, got sharded ones (DTensor); shard afterwards")
    for target, _ in adapters(experts):
        if target in targets:
            raise ValueError(f"module: expected no adapters of {target} in {name}, got some; see remove_lora")


def _adapted(module: nn.Module) -> list[tuple[str, MoKExperts]]:
    adapted = [(name, experts) for name, experts in experts_in(module) if experts.lora is not None]
    if not adapted:
        raise ValueError(f"module: expected experts with adapters in it, got none in {type(module).__name__}")
    return adapted
