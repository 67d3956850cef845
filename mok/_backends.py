"""Which backend serves a device.

A backend is a module with these functions; `mok.torch_backend` is the model. Arguments are checked before they come.

    REPORTS_BAD_EXPERT_IDS: whether build_schedule takes any id, and reports a bad one by itself
    SUPPORTS_LORA: whether forward, recompute_forward_context and backward take `lora`, and backward `lora_grads`, two
        `LoraFactors`; false where it is absent
    make_buffers(workspace) -> whatever it keeps in `workspace.buffers`; collective
    check(workspace): wait for the device and raise what it has reported
    build_schedule(workspace, top_experts, num_local_experts) -> MoKSchedule
    forward(workspace, schedule, x, router_weights, weights, swiglu_limit, save_for_backward) -> (output, context)
    recompute_forward_context(workspace, schedule, x, weights, swiglu_limit) -> context
    backward(workspace, schedule, context, grad_output, x, router_weights, weights, swiglu_limit, main_grads,
             needs_grad) -> MoKGradients

`mok.cuda_backend` also has `problem(device) -> str | None`, the reason why it can not serve a CUDA device.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch


def backend_problem(name: str, device: torch.device) -> str | None:
    """Why the backend `name` can not serve `device`; None if it can."""
    if name == "torch":
        return None
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type}"
    try:
        cuda_backend = importlib.import_module("mok.cuda_backend")
    except ImportError as error:
        return f"mok was installed without its kernels ({error})"
    return cuda_backend.problem(device)


def pick_backend(name: str | None, device: torch.device) -> ModuleType:
    """The backend of `MoKConfig.backend`; for None the kernels where they can serve `device`, else torch.

    Raises ValueError if the backend that was asked for can not serve `device`.
    """
    problem = backend_problem("cuda", device) if name != "torch" else "not wanted"
    if name == "cuda" and problem is not None:
        raise ValueError(f'backend: expected one that can serve {device}, got "cuda": {problem}')
    return importlib.import_module("mok.torch_backend" if problem is not None else "mok.cuda_backend")
