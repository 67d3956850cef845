"""The settings of the layer."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields

_BACKENDS = ("torch", "cuda")


@dataclass(frozen=True)
class MoKConfig:
    """Settings of one workspace. None: the backend chooses, from the GPU and the problem.

    fwd_num_comm_sms, bwd_num_comm_sms: SMs that only move tokens, in the forward and in the backward kernel.
    minibatch_size: routed rows that a kernel dispatches and hands on at a time.
    macrobatch_size: routed rows that are in memory at a time; bounds the routed buffers whatever the imbalance.
    schedule_capacity_multiplier: room for routed rows on a rank, in units of `num_local_tokens * topk`. More rows than
        that is an error. None: room for the worst case.
    all_gather_top_experts_chunk_bytes: bytes per message of the expert-id exchange.
    backend: "torch"; "cuda", which raises for what the kernels can not do; None: picked from device, dtype and layout.
    num_sms: SMs that the kernels may use; None: all.
    timeout_s: how long a rank waits for its peers before it raises.

    Raises TypeError or ValueError, naming the setting.
    """

    fwd_num_comm_sms: int | None = None
    bwd_num_comm_sms: int | None = None
    minibatch_size: int | None = None
    macrobatch_size: int | None = None
    schedule_capacity_multiplier: float | None = None
    all_gather_top_experts_chunk_bytes: int | None = None
    _: KW_ONLY
    backend: str | None = None
    num_sms: int | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "backend":
                if value is not None and value not in _BACKENDS:
                    raise ValueError(f"backend: expected one of {_BACKENDS} or None, got {value!r}")
            elif value is not None or field.name == "timeout_s":
                _check_positive(field.name, value, float if "float" in field.type else int)


def _check_positive(name: str, value: object, kind: type) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise TypeError(f"{name}: expected {kind.__name__}, got {type(value).__name__} {value!r}")
    if not value > 0:
        raise ValueError(f"{name}: expected a positive number, got {value!r}")
