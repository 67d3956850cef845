"""Small kernels with fixed inputs, each for one group of instructions.

A case gets something that can launch (the simulator, or a GPU in calibrate.py) and returns its outputs by name. Integer
and movement results must be the same bits everywhere; names that end in "~" are rounded differently by tensor cores or
approximate units and are compared with a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from simulator import KERNELS, compile_ptx
from torch import Tensor


class LaunchModule(Protocol):
    def launch(self, kernel: str, *, args: Sequence[object], **options: object) -> None: ...


class Launcher(Protocol):
    def load(self, ptx: str) -> LaunchModule: ...

    def tensor_map(self, tensor: Tensor, box: Sequence[int], *, swizzle: int = 0) -> object: ...


Case = Callable[[Launcher], dict[str, Tensor]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def kernel_module(launcher: Launcher, name: str) -> LaunchModule:
    return launcher.load(compile_ptx(KERNELS / f"{name}.cu"))


def random_bits(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)


def integer_inputs() -> list[Tensor]:
    special = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 255, 32, 31], dtype=torch.int32)
    a, b, c = (random_bits(seed, 128) for seed in range(3))
    a[:64], b[:64] = special.repeat_interleave(8), special.repeat(8)
    return [a, b, c]


@case
def integers(launcher: Launcher) -> dict[str, Tensor]:
    inputs = integer_inputs()
    inputs[1][inputs[1] == 0] = 3  # division by zero is unspecified
    out = torch.zeros(31, 128, dtype=torch.int32)
    kernel_module(launcher, "alu").launch("integers", args=[*inputs, out, 128], grid=2, block=64)
    return {"out": out}


def float_inputs() -> list[Tensor]:
    values = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        448.0,
        464.0,
        465.0,
        1e-9,
        3e38,
        0.5,
        1.5,
        2.5,
        -3.5,
        65519.0,
        65520.0,
        2.0**-9,
        2.0**-10,
    ]
    values += [
        2.0**-133,
        1 + 2.0**-8,
        1 + 3 * 2.0**-8,
        1 + 2.0**-8 + 2.0**-20,
        57344.0,
        61440.0,
        100.25,
        2.0**-16 * 1.5,
    ]
    values += [float("inf"), float("-inf"), float("nan"), 17.0, 19.0, 4e9, -4e9]
    special = torch.tensor(values, dtype=torch.float32)
    assert len(special) == 32
    generator = torch.Generator().manual_seed(5)
    spread = torch.randn(3, 256, generator=generator) * 2.0 ** torch.randint(-20, 20, (3, 256), generator=generator)
    spread[0, :32], spread[1, 32:64], spread[1, :32] = special, special, special.flip(0)
    return list(spread.contiguous())


@case
def floats(launcher: Launcher) -> dict[str, Tensor]:
    out = torch.zeros(20, 256, dtype=torch.int32)
    kernel_module(launcher, "alu").launch("floats", args=[*float_inputs(), out, 256], grid=2, block=128)
    return {"out": out}


def approximation_inputs() -> Tensor:
    return torch.linspace(-4, 4, 256) + 0.01


@case
def approximations(launcher: Launcher) -> dict[str, Tensor]:
    out = torch.zeros(5, 256)
    kernel_module(launcher, "alu").launch("approximations", args=[approximation_inputs(), out, 256], grid=1, block=256)
    return {"out~": out}


def warp_inputs() -> Tensor:
    return (random_bits(3, 32) % 1000).contiguous()


@case
def warp_exchange(launcher: Launcher) -> dict[str, Tensor]:
    out = torch.zeros(11, 32, dtype=torch.int32)
    kernel_module(launcher, "warp").launch("warp_exchange", args=[warp_inputs(), out])
    return {"out": out}


@case
def divergence(launcher: Launcher) -> dict[str, Tensor]:
    out = torch.zeros(3, 32, dtype=torch.int32)
    kernel_module(launcher, "warp").launch("divergence", args=[warp_inputs().abs() + 1, out])
    return {"out": out}


@case
def memory(launcher: Launcher) -> dict[str, Tensor]:
    values = random_bits(4, 128, 4)
    out, counters, sums = torch.zeros_like(values), torch.zeros(4, dtype=torch.int32), torch.zeros(8)
    kernel_module(launcher, "memory").launch(
        "memory", args=[values, out, counters, sums, 128], grid=2, block=64, shared=256
    )
    return {"out": out, "counters": counters, "sums": sums}


@case
def named_barriers(launcher: Launcher) -> dict[str, Tensor]:
    values, out = random_bits(5, 256) // 4, torch.zeros(384, dtype=torch.int32)
    kernel_module(launcher, "barriers").launch("named_barriers", args=[values, out], block=128)
    return {"values": values, "out": out}


@case
def ring(launcher: Launcher) -> dict[str, Tensor]:
    values, out = random_bits(6, 9, 32), torch.zeros(9, 32, dtype=torch.int32)
    kernel_module(launcher, "barriers").launch("ring", args=[values, out, 9], block=64)
    return {"values": values, "out": out}


@case
def cluster(launcher: Launcher) -> dict[str, Tensor]:
    out = torch.zeros(8, 2, 32, dtype=torch.int32)
    kernel_module(launcher, "barriers").launch("cluster", args=[out], grid=8, block=32, cluster=4)
    return {"out": out}


@case
def registers(launcher: Launcher) -> dict[str, Tensor]:
    out = torch.zeros(256, dtype=torch.int32)
    kernel_module(launcher, "barriers").launch("registers", args=[out], block=256)
    return {"out": out}


@case
def cp_async(launcher: Launcher) -> dict[str, Tensor]:
    values, out = random_bits(7, 180, 4), torch.zeros(192, 4, dtype=torch.int32)
    kernel_module(launcher, "copies").launch("cp_async", args=[values, out, 180], block=64)
    return {"values": values, "out": out}


@case
def bulk(launcher: Launcher) -> dict[str, Tensor]:
    values = (random_bits(8, 4, 256) % 1000).float()
    out, sums = torch.zeros_like(values), torch.zeros(256)
    kernel_module(launcher, "copies").launch("bulk", args=[values, out, sums], grid=4, block=64)
    return {"values": values, "out": out, "sums": sums}


# (swizzle, box width in int32, x, y): tiles inside, over each edge and outside of a [40, 36] tensor.
TILES = [
    (0, 8, 4, 3),
    (32, 8, 32, 38),
    (64, 16, -4, -2),
    (128, 32, 8, 30),
    (128, 16, 28, -3),
    (0, 64, -20, 50),
    (64, 12, 4, 5),
]


def store_at(x: int, y: int) -> tuple[int, int]:
    """Where a tile that was loaded at (x, y) is stored: elsewhere, at no negative coordinate."""
    return max(x - 4, 0), max(y + 1, 0)


def tensor_tile(index: int) -> Case:
    swizzle, width, x, y = TILES[index]

    def run(launcher: Launcher) -> dict[str, Tensor]:
        source = random_bits(20 + index, 40, 36)
        target, raw = torch.zeros(40, 36, dtype=torch.int32), torch.zeros(8, width, dtype=torch.int32)
        maps = [launcher.tensor_map(t, (width, 8), swizzle=swizzle) for t in (source, target)]
        args = [*maps, raw, x, y, *store_at(x, y), raw.numel() * 4]
        kernel_module(launcher, "copies").launch("tensor_tile", args=args, block=64, shared=8192)
        return {"source": source, "target": target, "raw": raw}

    return run


CASES |= {f"tensor_tile_{index}": tensor_tile(index) for index in range(len(TILES))}


@case
def multicast(launcher: Launcher) -> dict[str, Tensor]:
    source, out = random_bits(9, 32, 16), torch.zeros(2, 32, 16, dtype=torch.int32)
    args = [launcher.tensor_map(source, (16, 16)), out]
    kernel_module(launcher, "copies").launch("multicast", args=args, grid=2, block=32, cluster=2)
    return {"source": source, "out": out}


def random_bf16(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# name -> (A is MN-major, B is MN-major, swizzle in bytes)
WGMMAS = {
    "wgmma_kk_128": (False, False, 128),
    "wgmma_kk_64": (False, False, 64),
    "wgmma_kk_32": (False, False, 32),
    "wgmma_km_128": (False, True, 128),
    "wgmma_mk_128": (True, False, 128),
    "wgmma_mm_64": (True, True, 64),
    "wgmma_mm_32": (True, True, 32),
}


@case
def wgmma(launcher: Launcher) -> dict[str, Tensor]:
    module = kernel_module(launcher, "mma")
    a, b = random_bf16(1, 64, 64), random_bf16(2, 64, 64)
    results = {}
    for name, (trans_a, trans_b, swizzle) in WGMMAS.items():
        operands = [a.T.contiguous() if trans_a else a, b.T.contiguous() if trans_b else b]
        maps = [launcher.tensor_map(operand, (swizzle // 2, 64), swizzle=swizzle) for operand in operands]
        out = torch.zeros(64, 64)
        module.launch(name, args=[*maps, out], block=128, shared=16384)
        results[f"{name}~"] = out
    return {"a": a, "b": b, **results}


@case
def wgmma_registers(launcher: Launcher) -> dict[str, Tensor]:
    a, b, out = random_bf16(3, 64, 16), random_bf16(4, 64, 16), torch.zeros(64, 64)
    kernel_module(launcher, "mma").launch("wgmma_registers", args=[a, b, out], block=128)
    return {"a": a, "b": b, "out~": out}


@case
def fragments(launcher: Launcher) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    a, b = (
        torch.randint(-8, 8, shape, generator=generator).bfloat16() for shape in ((16, 16), (16, 8))
    )  # sums are exact
    out, exact = torch.zeros(16, 8, dtype=torch.bfloat16), torch.zeros(16, 8)
    kernel_module(launcher, "mma").launch("fragments", args=[a, b, out, exact])
    return {"a": a, "b": b, "out": out, "exact": exact}


def gemm_inputs() -> tuple[Tensor, Tensor]:
    return random_bf16(6, 192, 320), random_bf16(7, 128, 320)


def launch_gemm(launcher: Launcher, ptx: str, *, grid: int = 4) -> dict[str, Tensor]:
    a, b = gemm_inputs()
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    # `finished` and c share a buffer: the kernel finds c behind the first 16 bytes.
    buffer = torch.zeros(8 + m * n, dtype=torch.bfloat16)
    c = buffer[8:].view(m, n)
    ready = torch.zeros(1, dtype=torch.int32)
    maps = [launcher.tensor_map(t, (64, 64), swizzle=128) for t in (a, b)] + [launcher.tensor_map(c, (64, 64))]
    launcher.load(ptx).launch("gemm", args=[*maps, m, n, k, ready, buffer], grid=grid, block=160, shared=58 * 1024)
    return {"a": a, "b": b, "c~": c, "ready": ready}


@case
def gemm(launcher: Launcher) -> dict[str, Tensor]:
    return launch_gemm(launcher, compile_ptx(KERNELS / "gemm.cu"))
