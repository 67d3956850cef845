"""Adapters of experts in PEFT's files: what is trained here loads there, and the other way round.

PEFT wraps a module once for each parameter that it adapts, so keys tell the two parameters by their depth only: the
last one's factors are `<experts>.lora_A.weight`, those of the one before `<experts>.base_layer.lora_A.weight`. Their
layout, for E experts: lora_A `[E*r, in]`, expert by expert; lora_B `[out, r*E]`, in which the expert counts fastest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mok.comm import Communicator
from mok.hf.checkpoint import _communicator, writes_files
from mok.nn import MoKExperts
from mok.nn.lora import TARGETS, ExpertLora, adapters, add_lora, check_adaptable, experts_in

_ROOT = "base_model.model."  # the model, in PEFT's names
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def save_lora(model: nn.Module, path: str | PathLike[str]) -> None:
    """Write the adapters of all experts of `model` to the folder `path`, in PEFT's format:
    `PeftModel.from_pretrained(transformers_model, path)` reads them.

    Collective: every rank of the EP group (and of FSDP2's) must call it. Global rank 0 writes, and the files are
    complete when the call returns on any rank of its EP group. Raises `ValueError`, on all of these, if writing fails;
    also if there are no adapters, or if `model` is itself the experts, which PEFT has no name for.
    """
    comm = _communicator(model)
    tensors: dict[str, Tensor] = {}
    loras: dict[str, ExpertLora] = {}
    for name, experts in _named_experts(model):
        own = dict(adapters(experts))
        loras |= {f"{name}.{target}": lora for target, lora in own.items()}
        for key, lora in zip(_keys(name, len(own)), own.values(), strict=True):
            factors = _whole(lora.lora_A, comm).flatten(0, 1), _whole(lora.lora_B, comm).permute(1, 2, 0).flatten(1, 2)
            tensors |= dict(zip(key, factors, strict=True))
    if not loras:
        raise ValueError(f"model: expected experts with adapters in it, got none in {type(model).__name__}")
    failure = None
    if writes_files(comm):
        try:
            folder = Path(path)
            folder.mkdir(parents=True, exist_ok=True)
            save_file(
                {key: tensor.contiguous() for key, tensor in tensors.items()}, folder / _WEIGHTS, {"format": "pt"}
            )
            (folder / _CONFIG).write_text(json.dumps(_config(model, loras), indent=2, sort_keys=True) + "\n")
        except Exception as error:  # whatever it is, the other ranks wait for word of it
            failure = ValueError(f"path: writing {path} failed: {error!r}")
    comm.agree("save_lora", {}, failure)


def load_lora(model: nn.Module, path: str | PathLike[str]) -> list[nn.Parameter]:
    """`mok.nn.add_lora` with the options and the values that PEFT (or `save_lora`) has written to the folder `path`, of
    this rank's experts only; returns the adapters' parameters.

    Raises `ValueError`, on every rank of the EP group and before anything is changed: for files that can not be read,
    missing keys, wrong shapes, adapters of other modules; also where `add_lora` would.
    """
    plan: list[_Planned] = []
    failure = None
    try:
        plan = _plan(model, Path(path))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        failure = ValueError(f"path: {path} can not be loaded into {type(model).__name__}: {error}")
    _communicator(model).agree("load_lora", {}, failure)
    return [parameter for planned in plan for parameter in planned.add()]


@dataclass
class _Planned:
    """An adapter to be. lora_A, lora_B: as on file, of all experts."""

    experts: MoKExperts
    target: str
    r: int
    lora_alpha: float
    use_rslora: bool
    lora_A: Tensor
    lora_B: Tensor

    @torch.no_grad()
    def add(self) -> list[nn.Parameter]:
        parameters = add_lora(
            self.experts, self.r, self.lora_alpha, target_parameters=[self.target], use_rslora=self.use_rslora
        )
        own = slice(self.experts.first_expert, self.experts.first_expert + self.experts.num_local_experts)
        lora_A = self.lora_A.unflatten(0, (-1, self.r))
        lora_B = self.lora_B.unflatten(1, (self.r, -1)).permute(2, 0, 1)
        for parameter, factor in zip(parameters, (lora_A, lora_B), strict=True):
            parameter.copy_(factor[own])
        return parameters


def _plan(model: nn.Module, folder: Path) -> list[_Planned]:
    """All that is to be added; everything is checked, nothing is changed."""
    config = json.loads((folder / _CONFIG).read_text())
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type: expected LORA, got {config.get('peft_type')}")
    tensors = load_file(folder / _WEIGHTS)
    plan = []
    for name, experts in _named_experts(model):
        targets = [
            target for target in TARGETS if _is_target(f"{name}.{target}", config.get("target_parameters") or [])
        ]
        check_adaptable(name, experts, targets)
        for target, keys in zip(targets, _keys(name, len(targets)), strict=True):
            r = _by_pattern(config.get("rank_pattern"), f"{name}.{target}", config["r"])
            lora_alpha = _by_pattern(config.get("alpha_pattern"), f"{name}.{target}", config["lora_alpha"])
            _, num_rows, num_columns = experts.get_parameter(target).shape
            shapes = (experts.num_experts * r, num_columns), (num_rows, r * experts.num_experts)
            factors = []
            for key, shape in zip(keys, shapes, strict=True):
                factor = tensors.pop(key, None)
                if factor is None or factor.shape != shape:
                    got = "no such key" if factor is None else list(factor.shape)
                    raise ValueError(f"{key}: expected {list(shape)}, got {got}")
                factors.append(factor)
            plan.append(_Planned(experts, target, r, lora_alpha, config.get("use_rslora", False), *factors))
    if not plan:
        raise ValueError(f"target_parameters: expected names of experts, got {config.get('target_parameters')}")
    if tensors:
        raise ValueError(f"expected adapters of experts only, got {', '.join(sorted(tensors))}")
    return plan


def _config(model: nn.Module, loras: Mapping[str, ExpertLora]) -> dict[str, Any]:
    """PEFT's `LoraConfig` of adapters by name of their parameter."""
    first = next(iter(loras.values()))
    use_rslora = all(lora.use_rslora for lora in loras.values())
    # PEFT has one formula for all: where they differ, alpha makes up for it.
    alphas = {
        name: lora.lora_alpha if lora.use_rslora == use_rslora else lora.scaling * lora.r
        for name, lora in loras.items()
    }
    alpha = next(iter(alphas.values()))
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": getattr(getattr(model, "config", None), "_name_or_path", None),
        "r": first.r,
        "rank_pattern": {name: lora.r for name, lora in loras.items() if lora.r != first.r},
        "lora_alpha": alpha,
        "alpha_pattern": {name: other for name, other in alphas.items() if other != alpha},
        "use_rslora": use_rslora,
        "target_modules": [],
        "target_parameters": _targets(model, list(loras)),
        "inference_mode": True,
    }


def _targets(model: nn.Module, names: list[str]) -> list[str]:
    """The ends of `names` if no other parameter ends so, else `names`."""
    ends = sorted({".".join(name.split(".")[-2:]) for name in names})
    matched = {name.removeprefix(_ROOT) for name, _ in model.named_parameters() if _is_target(name, ends)}
    return ends if matched == set(names) else names


def _is_target(name: str, target_parameters: list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in target_parameters)


def _by_pattern(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """As PEFT: the value of the first pattern that the end of `name` matches."""
    return next((v for key, v in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", name)), default)


def _named_experts(model: nn.Module) -> Iterator[tuple[str, MoKExperts]]:
    """Names in the model that PEFT wraps, whether or not it does so already."""
    for name, experts in experts_in(model):
        if not name:
            raise ValueError("model: expected a module that has the experts in it, got the experts")
        yield name.removeprefix(_ROOT), experts


def _keys(name: str, num_targets: int) -> list[tuple[str, str]]:
    """Of lora_A and lora_B, for each of the targets in turn."""
    wrappers = [_ROOT + name + ".base_layer" * depth for depth in reversed(range(num_targets))]
    return [(f"{wrapper}.lora_A.weight", f"{wrapper}.lora_B.weight") for wrapper in wrappers]


def _whole(factor: Tensor, comm: Communicator) -> Tensor:
    """`[E, ...]` on the CPU. Collective."""
    factor = factor.detach()
    if isinstance(factor, DTensor):
        factor = factor.full_tensor()
    return comm.all_gather(factor).flatten(0, 1).cpu()
