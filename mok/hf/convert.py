"""Replacing the MoE blocks of a transformers model by `mok.nn.MoKLayer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from mok.comm import Communicator, as_communicator
from mok.config import MoKConfig
from mok.hf.experts import swiglu_limit
from mok.hf.families import FAMILIES, Family
from mok.nn import MoKExperts, MoKLayer, MoKSharedExpert, RouterOutput


class ConvertedMoE(MoKLayer):
    """A `MoKLayer` that keeps the children of a transformers block under the block's names for them.

    So state_dict keys, targets of adapters, recorders of router logits and transformers' files stay as they are. The
    parameters are the block's, and its router is called as the block calls it.
    """

    def __init__(self, block: nn.Module, process_group: Any, config: MoKConfig | None) -> None:
        nn.Module.__init__(self)
        # All that the block has: parameters, buffers, hooks, and attributes that its family reads.
        self.__dict__.update(block.__dict__)
        self.family_name = type(block).__name__
        experts = _own_experts(_child(block, "experts"), process_group, config)
        self.hidden_size, self.swiglu_limit = experts.hidden_size, experts.swiglu_limit
        # Written past `__setattr__`, which takes the properties below for attributes.
        self._modules = {**block._modules, "experts": experts}
        if self.shared_expert is not None:
            self._modules[self.family.shared] = _own_shared_expert(self.shared_expert)

    @property
    def family(self) -> Family:
        return FAMILIES[self.family_name]

    @property
    def router(self) -> Any:  # type: ignore[override]
        return self._modules[self.family.router]

    @property
    def shared_expert(self) -> Any:  # type: ignore[override]
        return self._modules.get(self.family.shared)

    @property
    def shared_expert_gate(self) -> Any:  # type: ignore[override]
        return self._modules.get(self.family.shared_gate)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, *, return_router_output: bool = False
    ) -> Any:
        """As `MoKLayer.forward`, with the family's noise on the input and its last step."""
        if self.training and self.family.jitter and (width := getattr(self, self.family.jitter)) > 0:
            hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(1.0 - width, 1.0 + width)
        output, routed = super().forward(hidden_states, padding_mask, return_router_output=True)
        if self.family.finish:
            output = self.family.finish(self, output)
        return (output, routed) if return_router_output else output

    def _route(self, x: Tensor, mask: Tensor | None) -> RouterOutput:
        routed = RouterOutput(*self.family.routing(self, x))
        if mask is not None:
            routed = routed._replace(top_experts=routed.top_experts.masked_fill(~mask[:, None], -1))
        return routed


def _child(module: nn.Module, name: str) -> nn.Module:
    child = module._modules[name]
    assert child is not None
    return child


def _own_experts(theirs: nn.Module, process_group: Any, config: MoKConfig | None) -> MoKExperts:
    """This rank's experts with the parameters of transformers' module: the same ones, or slices if there are ranks."""
    num_experts, hidden_size, intermediate_size = theirs.get_parameter("down_proj").shape
    ours = MoKExperts(
        num_experts,
        hidden_size,
        intermediate_size,
        swiglu_limit=swiglu_limit(theirs),
        process_group=process_group,
        config=config,
        device="meta",
    )
    for name, parameter in theirs.named_parameters(recurse=False):
        if ours.num_local_experts < num_experts:
            part = parameter.detach()[ours.first_expert :][: ours.num_local_experts].clone()
            parameter = nn.Parameter(part, parameter.requires_grad)
        setattr(ours, name, parameter)
    return ours.train(theirs.training)


def _own_shared_expert(theirs: nn.Module) -> nn.Module:
    """A shared expert with the linear layers of transformers' module; that module itself where it has biases."""
    layers = {name: theirs.get_submodule(name) for name in ("gate_proj", "up_proj", "down_proj")}
    if any(getattr(layer, "bias", None) is not None for layer in layers.values()):
        return theirs
    ours = MoKSharedExpert(
        *layers["down_proj"].get_parameter("weight").shape,
        swiglu_limit=getattr(theirs, "swiglu_limit", None),
        device="meta",
    )
    ours._modules.update(layers)
    return ours.train(theirs.training)


def convert(model: PreTrainedModel, *, process_group: Any = None, config: MoKConfig | None = None) -> PreTrainedModel:
    """Replace every MoE block of `model` by a `MoKLayer`, in place, and return the model.

    The parameters are the model's own, under the names they had. With a `process_group` of several ranks each keeps a
    copy of its slice of the experts and lets the rest go; `mok.hf.save_pretrained` then writes the whole. Call it
    before anything that wraps the model or its modules (DDP, FSDP, PEFT, hooks).

    Raises `ValueError`, on every rank and before anything is changed, that names the blocks it can not replace and why.
    """
    comm = as_communicator(process_group)
    blocks = [(name, block) for name, block in model.named_modules() if type(block).__name__ in FAMILIES]
    found = _obstacles(model, blocks, comm)
    error = ValueError("\n  ".join(["model: can not be converted:", *found])) if found else None
    comm.agree("convert", {"model": type(model).__name__, "number of MoE blocks": len(blocks)}, error)
    for name, block in blocks:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, ConvertedMoE(block, process_group, config))
    return model


def _obstacles(model: nn.Module, blocks: list[tuple[str, nn.Module]], comm: Communicator) -> list[str]:
    """Why `model` can not be converted, a line each."""
    if any(isinstance(module, MoKLayer) for module in model.modules()):
        return [f"{type(model).__name__} is converted already"]
    inside = {id(_child(block, "experts")) for _, block in blocks}
    foreign = [
        f"{name}: {type(module).__name__} belongs to no block that convert knows"
        for name, module in model.named_modules()
        if hasattr(module, "_apply_gate") and id(module) not in inside
    ]
    if not blocks and not foreign:
        return [f"{type(model).__name__}: no MoE block that convert knows; it knows {', '.join(sorted(FAMILIES))}"]
    reasons = ((name, type(block).__name__, _reason(block, comm)) for name, block in blocks)
    return foreign + [f"{name}: {block}: {reason}" for name, block, reason in reasons if reason]


def _reason(block: nn.Module, comm: Communicator) -> str | None:
    """Why a block of a known family can not be converted, None if it can."""
    experts = _child(block, "experts")
    try:
        swiglu_limit(experts)
    except ValueError as error:
        return str(error)
    weight = experts._parameters.get("gate_up_proj")
    if weight is None or not weight.is_floating_point() or isinstance(weight, DTensor):
        kind = "no plain parameters" if weight is None else f"{weight.dtype} {type(weight).__name__}"
        return f"its weights are {kind}; convert before anything that quantises, shards or adapts them"
    if weight.shape[0] % comm.size:
        return f"its {weight.shape[0]} experts can not be divided by {comm.size} ranks"
    if experts._forward_hooks or experts._forward_pre_hooks or any(hasattr(m, "_hf_hook") for m in block.modules()):
        return "hooks on its experts would be lost; convert before anything that sets them"
    return None
