"""Layers: `MoKLayer` and its parts, router losses and statistics."""

from mok.nn._op import moe
from mok.nn.experts import MoKExperts, MoKSharedExpert
from mok.nn.layer import MoKLayer
from mok.nn.lora import add_lora, merge_lora, remove_lora
from mok.nn.losses import RouterLosses, load_balancing_loss, router_z_loss, tokens_per_expert
from mok.nn.router import MoKRouter, RouterOutput

__all__ = [
    "MoKExperts",
    "MoKLayer",
    "MoKRouter",
    "MoKSharedExpert",
    "RouterLosses",
    "RouterOutput",
    "add_lora",
    "load_balancing_loss",
    "merge_lora",
    "moe",
    "remove_lora",
    "router_z_loss",
    "tokens_per_expert",
]
