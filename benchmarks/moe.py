"""Time of the MoE layer on one GPU, beside the dense matmuls of the same FLOPs, all in one run.

    python benchmarks/moe.py                      every shape, uniform routing
    python benchmarks/moe.py --shapes 0,2 --skew 1.0 --decode
    python benchmarks/moe.py --ep 4,8             the forward of as many virtual ranks instead, beside that of one rank
    python benchmarks/moe.py --backward           forward and backward together, and the memory that they take

Columns: milliseconds, useful TFLOP/s (6 T K H I), and the ratio to dense beside it: the cuBLAS matmuls
[T K / 4, H] x [H, 2I] and [T K / 4, I] x [I, H], four times. `mok` includes the schedule; `kernel` is forward alone;
`training` keeps gate and up for backward; these are replays of a CUDA graph, so that Python costs nothing, and `eager`
is `mok` without one. `grouped` is what transformers does (sort, `torch._grouped_mm`, index_add), `torch` mok's own
torch backend. With `--backward` FLOPs count three times, dense also has the two gradient matmuls of each of its own,
and MiB is the peak beyond what was allocated before the call.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mok import functional as F
from mok.config import MoKConfig
from mok.testing import VirtualGroup

# (T, H, I, E, K)
SHAPES = (
    (32768, 2048, 768, 128, 8),
    (32768, 4096, 1024, 128, 8),
    (8192, 4096, 14336, 8, 2),
    (8192, 7168, 2048, 32, 8),
    (16384, 4096, 1408, 128, 8),
)
DECODE_TOKENS = (1, 8, 64)


@dataclass
class Problem:
    x: Tensor
    gate_up: Tensor
    down: Tensor
    ids: Tensor
    weights: Tensor

    @staticmethod
    def make(tokens: int, hidden_size: int, width: int, num_experts: int, top_k: int, skew: float) -> Problem:
        """Random data; expert probabilities proportional to rank ** -skew (Zipf), by Gumbel top-k."""
        torch.manual_seed(0)
        ranks = torch.arange(1, num_experts + 1, device="cuda").float()
        gumbel = -torch.rand(tokens, num_experts, device="cuda").log_().neg_().log_()
        top, ids = (gumbel - skew * ranks.log()).topk(top_k, dim=-1)
        return Problem(
            torch.randn(tokens, hidden_size, device="cuda").bfloat16(),
            (torch.randn(num_experts, 2 * width, hidden_size, device="cuda") * hidden_size**-0.5).bfloat16(),
            (torch.randn(num_experts, hidden_size, width, device="cuda") * width**-0.5).bfloat16(),
            ids,
            top.softmax(-1),
        )

    def rank(self, rank: int, size: int) -> Problem:
        """What one of `size` ranks has: its share of the tokens and of the experts."""
        x, ids, weights = (tensor.chunk(size)[rank] for tensor in (self.x, self.ids, self.weights))
        gate_up, down = (tensor.chunk(size)[rank] for tensor in (self.gate_up, self.down))
        return Problem(x, gate_up, down, ids, weights)

    @property
    def flops(self) -> float:
        _, hidden_size, width = self.down.shape
        return 6.0 * self.ids.numel() * hidden_size * width


def elapsed_ms(fn: Callable[[], object], runs: int) -> float:
    """Mean of `runs` calls that follow each other."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(runs):
        fn()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / runs


def paired_ms(fn: Callable[[], object], baseline: Callable[[], object], rounds: int = 5) -> tuple[float, float]:
    """Medians of `fn` and of `baseline`, which take turns: the clock falls as the GPU warms up, for both alike."""
    fn(), fn(), baseline()
    runs = max(4, int(20 / elapsed_ms(fn, 1)))
    times = [(elapsed_ms(baseline, 4), elapsed_ms(fn, min(runs, 200))) for _ in range(rounds)]
    return sorted(t for _, t in times)[rounds // 2], sorted(t for t, _ in times)[rounds // 2]


def graphed(fn: Callable[[], object]) -> Callable[[], None]:
    """`fn` as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def dense(problem: Problem) -> Callable[[], None]:
    _, hidden_size, width = problem.down.shape
    rows = max(1, problem.ids.numel() // 4)
    x = torch.randn(rows, hidden_size, device="cuda").bfloat16()
    a = torch.randn(rows, width, device="cuda").bfloat16()

    def run() -> None:
        for _ in range(4):
            torch.mm(x, problem.gate_up[0].T)
            torch.mm(a, problem.down[0].T)

    return run


def grouped(problem: Problem) -> Callable[[], Tensor]:
    """The steps of transformers' `grouped_mm` experts."""

    def run() -> Tensor:
        top_k = problem.ids.shape[1]
        order = problem.ids.flatten().argsort()
        tokens = order // top_k
        counts = torch.histc(problem.ids.float(), problem.down.shape[0], 0, problem.down.shape[0] - 1)
        offsets = counts.cumsum(0).int()
        h = torch._grouped_mm(problem.x[tokens], problem.gate_up.mT, offs=offsets)
        gate, up = h.chunk(2, dim=-1)
        y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, problem.down.mT, offs=offsets)
        y = y * problem.weights.flatten()[order, None]
        return torch.zeros_like(problem.x).index_add_(0, tokens, y.to(problem.x.dtype))

    return run


class Mok:
    def __init__(self, problem: Problem, backend: str, group: Any = None) -> None:
        self.problem = problem
        self.config = MoKConfig(backend=backend)
        tokens, hidden_size = problem.x.shape
        self.workspace = F.create_workspace(
            self.config,
            group,
            device=problem.x.device,
            num_local_tokens=tokens,
            hidden_size=hidden_size,
            topk=problem.ids.shape[1],
        )
        self.ready = self.schedule()

    def schedule(self) -> F.MoKSchedule:
        return F.build_schedule(
            self.workspace, self.config, self.problem.ids, num_local_experts=self.problem.down.shape[0]
        )

    def weights(self) -> Any:
        p = self.problem
        width = p.down.shape[2]
        return None, None, None, p.gate_up[:, :width], p.gate_up[:, width:], p.down

    def forward(self, schedule: F.MoKSchedule, save: bool) -> Tensor:
        p = self.problem
        call = (self.config, self.workspace, schedule, p.x, p.weights, *self.weights())
        return F.forward(*call, save_for_backward=save)[0]

    def step(self) -> F.MoKGradients:
        """Forward and backward; x stands in for the gradient of the output."""
        p, schedule = self.problem, self.schedule()
        call = (self.config, self.workspace, schedule)
        _, context = F.forward(*call, p.x, p.weights, *self.weights())
        return F.backward(*call, context, p.x, p.x, p.weights, *self.weights())


def systems(problem: Problem) -> dict[str, Callable[[], object]]:
    kernels, anywhere = Mok(problem, "cuda"), Mok(problem, "torch")
    return {
        "mok": graphed(lambda: kernels.forward(kernels.schedule(), False)),
        "kernel": graphed(lambda: kernels.forward(kernels.ready, False)),
        "training": graphed(lambda: kernels.forward(kernels.schedule(), True)),
        "eager": lambda: kernels.forward(kernels.schedule(), False),
        "grouped": grouped(problem),
        "torch": lambda: anywhere.forward(anywhere.schedule(), False),
    }


def dense_step(problem: Problem) -> Callable[[], None]:
    """The matmuls of `dense` and, for each, the two of its gradients."""
    _, hidden_size, width = problem.down.shape
    rows = max(1, problem.ids.numel() // 4)
    x, h, a = (torch.randn(rows, n, device="cuda").bfloat16() for n in (hidden_size, 2 * width, width))
    gate_up, down = problem.gate_up[0], problem.down[0]

    def run() -> None:
        for _ in range(4):
            torch.mm(x, gate_up.T), torch.mm(a, down.T)
            torch.mm(x, down), torch.mm(x.T, a)  # x also stands for the gradient of the output
            torch.mm(h, gate_up), torch.mm(h.T, x)

    return run


def grouped_step(problem: Problem) -> Callable[[], object]:
    leaves = [problem.x, problem.gate_up, problem.down, problem.weights]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    forward = grouped(Problem(leaves[0], leaves[1], leaves[2], problem.ids, leaves[3]))

    return lambda: torch.autograd.grad(forward(), leaves, problem.x)


def training_systems(problem: Problem) -> dict[str, Callable[[], object]]:
    kernels, anywhere = Mok(problem, "cuda"), Mok(problem, "torch")
    return {
        "mok": graphed(kernels.step),
        "eager": kernels.step,
        "grouped": grouped_step(problem),
        "torch": anywhere.step,
    }


def peak_mib(fn: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def report(name: str, problem: Problem, trains: bool = False) -> None:
    baseline = dense_step(problem) if trains else dense(problem)
    found = training_systems(problem) if trains else systems(problem)
    flops = problem.flops * (3 if trains else 1)
    times = {key: paired_ms(fn, baseline) for key, fn in found.items()}
    dense_ms = sorted(base for _, base in times.values())[len(times) // 2]
    cells = [f"{key} {ms:.3f} ms {flops / ms / 1e9:.0f} ({base / ms:.3f})" for key, (ms, base) in times.items()]
    if trains:  # a graph's memory is its own, from when it was captured
        cells += [f"{key} {peak_mib(fn):.0f} MiB" for key, fn in found.items() if key != "mok"]
    print(f"{name}: dense {dense_ms:.3f} ms {flops / dense_ms / 1e9:.0f} | " + " | ".join(cells), flush=True)


def report_virtual_ranks(name: str, problem: Problem, size: int, calls: int = 8) -> None:
    """Forward on `size` virtual ranks. They share the GPU and meet on the host, so the time is that of all together."""
    whole, group = Mok(problem, "cuda"), VirtualGroup(size)
    ranks = group.run(lambda member: Mok(problem.rank(member.rank(), size), "cuda", member))

    def repeat(mok: Mok) -> None:
        for _ in range(calls):  # so that the start of the threads does not count
            mok.forward(mok.schedule(), False)

    ms, one_ms = paired_ms(lambda: group.run(lambda member: repeat(ranks[member.rank()])), lambda: repeat(whole))
    ms, one_ms = ms / calls, one_ms / calls
    print(
        f"{name}, EP {size}: {ms:.3f} ms, {ms / size:.3f} a rank, {problem.flops / ms / 1e9:.0f} TFLOP/s | "
        f"EP 1 {one_ms:.3f} ms ({one_ms / ms:.3f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="0,1,2,3,4", help="indices into the list of shapes")
    parser.add_argument("--skew", type=float, default=0.0, help="Zipf exponent of the expert probabilities")
    parser.add_argument("--decode", action="store_true", help="T = 1, 8 and 64 instead")
    parser.add_argument("--backward", action="store_true", help="forward and backward")
    parser.add_argument("--ep", default="", help="numbers of virtual ranks, such as 4,8")
    arguments = parser.parse_args()
    for index in map(int, arguments.shapes.split(",")):
        tokens, hidden_size, width, num_experts, top_k = SHAPES[index]
        for count in DECODE_TOKENS if arguments.decode else (tokens,):
            sizes = (count, hidden_size, width, num_experts, top_k)
            problem = Problem.make(*sizes, arguments.skew)
            for size in map(int, filter(None, arguments.ep.split(","))):
                report_virtual_ranks(str(sizes), problem, size)
            if not arguments.ep:
                report(str(sizes), problem, arguments.backward)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
