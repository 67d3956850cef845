"""Expert parallelism: the bits of one rank, speed beside all-to-all, and ranks that differ, die or go on for long.

    torchrun --nproc-per-node 8 benchmarks/ep.py --out ep.json       a GPU for each rank (--device cpu: gloo)
    python benchmarks/ep.py --virtual 8                              8 threads on one GPU: all but the timing
    python benchmarks/ep.py --virtual 2 --device cpu --tokens 64 --hidden-size 64 --intermediate-size 32 \
        --num-experts 8 --top-k 2 --steps 20

Parts (`--parts`):

correctness   Small batches cut over 2, 4 and 8 ranks, evenly and not: output and every gradient have the bits of one
              rank with the whole batch. (The shared expert's weight gradients, of one rank's tokens each, have those
              of one rank with these tokens.)
speed         At (T per rank, H, I, E, K) of SHAPES: `mok`; `all-to-all`, which is sort, `torch.distributed`,
              `torch._grouped_mm` and a weighted sum; `no exchange`, the same with the rows already there; `mok alone`,
              mok on one rank with as many rows for as many experts. Milliseconds of the slowest rank; useful TFLOP/s of
              a GPU (6 T K H I in forward, three times that with backward); GB/s that come into a rank over its links,
              counting once in each direction a row that leaves its rank: two rows per such route in forward, four with
              backward.
sweep         `mok` for every number of communication SMs in COMM_SMS and every minibatch size in MINIBATCHES.
robustness    --steps steps of ever other numbers of tokens, always with the bits of the first time; a rank killed
              between schedule and forward; workspaces made and freed ten times.

Virtual ranks share a device, so a time is that of all of them together. They go through `mok.functional` by hand:
autograd runs the backward nodes of one CUDA device in one thread, where ranks can not wait for each other. NVLink
multicast stays off. A part that takes longer than --limit seconds ends the program with a traceback of every thread.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count, product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok import functional
from mok.comm import Communicator, as_communicator
from mok.config import MoKConfig
from mok.testing import VirtualGroup, assert_same_bits, relative_l2

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from moe_cases import Problem, make_problem

# (T per rank, H, I, E, K)
SHAPES = ((8192, 7168, 2048, 256, 8), (8192, 2048, 768, 128, 8))
# Of the whole batch, in correctness and robustness.
SMALL = {"cpu": (208, 64, 32, 16, 4), "cuda": (4096, 512, 256, 16, 4)}
COMM_SMS = (4, 8, 16, 32)
MINIBATCHES = (1024, 4096, 16384)
PARTS = ("correctness", "speed", "sweep", "robustness")
# NCCL alone has no CPU side, and what ranks tell each other's hosts would go through the GPU.
PROCESS_GROUPS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}

Results = dict[str, Tensor]


@dataclass
class Row:
    """One line of the table; `numbers` are for the log."""

    part: str
    what: str
    result: str
    passed: bool = True
    numbers: dict[str, Any] = field(default_factory=dict)


# Where ranks run


class Processes:
    """The ranks are the processes that torchrun started."""

    is_virtual = False

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        if device == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        dist.init_process_group(PROCESS_GROUPS[device])
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._groups = {self.size: dist.group.WORLD}

    def run(self, size: int, fn: Callable[[Any], Any]) -> list[Any]:
        """`fn(group)` on the first `size` ranks at the same time; every process gets the results, in rank order."""
        if size not in self._groups:
            self._groups[size] = dist.new_group(list(range(size)))
        result = fn(self._groups[size]) if self.rank < size else None
        results: list[Any] = [None] * self.size
        dist.all_gather_object(results, result)
        return results[:size]


class Threads:
    """The ranks are threads of this process, on one device."""

    is_virtual = True
    rank = 0

    def __init__(self, size: int, device: str, timeout_s: float) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.device = torch.device("cuda:0" if device == "cuda" else "cpu")

    def run(self, size: int, fn: Callable[[Any], Any]) -> list[Any]:
        return VirtualGroup(size, timeout_s=self.timeout_s).run(fn)


World = Processes | Threads


# One step of a rank


def make_workspace(problem: Problem, group: Any, config: MoKConfig, num_local_tokens: int) -> functional.MoKWorkspace:
    return functional.create_workspace(
        config,
        group,
        device=problem.x.device,
        num_local_tokens=num_local_tokens,
        hidden_size=problem.x.shape[1],
        topk=problem.top_experts.shape[1],
    )


def mok_step(problem: Problem, workspace: functional.MoKWorkspace, backward: bool) -> Results:
    """Output, and with `backward` the gradients, by name."""
    config, num_local_experts = workspace.config, problem.gate_up.shape[0]
    schedule = functional.build_schedule(workspace, config, problem.top_experts, num_local_experts=num_local_experts)
    call = (config, workspace, schedule)
    output, context = functional.forward(*call, *problem.tensors(), save_for_backward=backward)
    if not backward:
        return {"output": output}
    gradients = functional.backward(*call, context, problem.grad_output, *problem.tensors())
    return {"output": output} | {name: grad for name, grad in gradients._asdict().items() if grad is not None}


class AllToAll:
    """What one writes without mok: every token has K routes, none of them dropped, and no shared expert.

    communicate=False: the rows of an earlier step stand for those that an exchange would bring.
    """

    def __init__(self, problem: Problem, communicator: Communicator, communicate: bool) -> None:
        self.problem, self.communicator, self.communicate = problem, communicator, communicate
        self._received: dict[str, Tensor] = {}

    def exchange(self, what: str, rows: Tensor, send_counts: list[int], recv_counts: list[int]) -> Tensor:
        if self.communicate:
            return self.communicator.all_to_all_rows(rows, send_counts, recv_counts)
        if what not in self._received:
            self._received[what] = self.communicator.all_to_all_rows(rows, send_counts, recv_counts)
        return self._received[what]

    def __call__(self, backward: bool) -> Results:
        problem, size = self.problem, self.communicator.size
        ids, weights = problem.top_experts, problem.router_weights.to(problem.x.dtype)
        num_tokens, topk = ids.shape
        num_local_experts = problem.gate_up.shape[0]
        ones = [1] * size
        counts = torch.zeros(size * num_local_experts, dtype=torch.int64, device=ids.device)
        counts = counts.index_add_(0, ids.flatten(), torch.ones_like(ids).flatten()).view(size, num_local_experts)
        arriving = self.exchange("counts", counts, ones, ones)  # [source, expert]
        send, receive = counts.sum(1).tolist(), arriving.sum(1).tolist()
        # Sent in the order of experts; they arrive by source, and are put in the order of experts again.
        order = ids.flatten().argsort(stable=True)
        expert_of_row = torch.arange(num_local_experts, device=ids.device).repeat(size)
        expert_of_row = expert_of_row.repeat_interleave(arriving.flatten(), output_size=sum(receive))
        by_expert = expert_of_row.argsort(stable=True)
        offsets = arriving.sum(0).cumsum(0).int()

        def dispatch(what: str, routes: Tensor) -> Tensor:
            return self.exchange(what, routes, send, receive)[by_expert]

        def gather(what: str, rows: Tensor) -> Tensor:
            """`[T, K, H]`"""
            by_source = torch.empty_like(rows).index_copy_(0, by_expert, rows)
            routes = self.exchange(what, by_source, receive, send)
            return torch.empty_like(routes).index_copy_(0, order, routes).view(num_tokens, topk, -1)

        # The exchanges are left out of autograd: ranks that are threads could not wait for each other in there.
        rows = dispatch("x", problem.x[order // topk]).requires_grad_(backward)
        gate_up, down = (weight.detach().requires_grad_(backward) for weight in (problem.gate_up, problem.down))
        with torch.set_grad_enabled(backward):
            gate, up = torch._grouped_mm(rows, gate_up.mT, offs=offsets).chunk(2, dim=-1)
            y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.mT, offs=offsets)
        y_routes = gather("y", y.detach())
        output = (weights[:, None] @ y_routes).squeeze(1)
        if not backward:
            return {"output": output}
        d_output = problem.grad_output[:, None]
        d_y = dispatch("d_y", (weights[..., None] * d_output).flatten(0, 1)[order])
        d_rows, d_gate_up, d_down = torch.autograd.grad(y, [rows, gate_up, down], d_y)
        d_routed_gate, d_routed_up = d_gate_up.chunk(2, dim=1)
        return {
            "output": output,
            "d_x": gather("d_x", d_rows).sum(1),
            "d_router_weights": (d_output @ y_routes.mT).squeeze(1),
            "d_routed_gate": d_routed_gate,
            "d_routed_up": d_routed_up,
            "d_routed_down": d_down,
        }


# Correctness


def small_problem(device: torch.device, **options: Any) -> Problem:
    problem = make_problem(*SMALL[device.type], **options, dtype=torch.bfloat16)
    return problem.cuda() if device.type == "cuda" else problem


def small_problems(device: torch.device) -> dict[str, Problem]:
    num_tokens, _, _, num_experts, topk = SMALL[device.type]
    one_expert = torch.full((num_tokens, topk), num_experts - 1)
    return {
        "shared expert and clamp": small_problem(device, shared_width=48, swiglu_limit=1.0),
        "no shared expert": small_problem(device, shared_width=None, seed=1),
        "all on one expert": small_problem(device, shared_width=None, top_experts=one_expert),
        "nothing routed": small_problem(device, shared_width=48, top_experts=torch.full_like(one_expert, -1)),
    }


def ways_to_split(num_tokens: int, size: int) -> list[tuple[int, ...]]:
    """Evenly; ever more from rank to rank; none for rank 0; all for the last rank."""
    growing = [num_tokens * 2 * rank // (size * (size + 1)) for rank in range(1, size)]
    rest, left = divmod(num_tokens, size - 1)
    splits = (
        [num_tokens // size] * size,
        [*growing, num_tokens - sum(growing)],
        [0, *(rest + (rank < left) for rank in range(size - 1))],
        [0] * (size - 1) + [num_tokens],
    )
    return list(dict.fromkeys(map(tuple, splits)))


def one_rank(problem: Problem, config: MoKConfig) -> Results:
    return mok_step(problem, make_workspace(problem, None, config, problem.x.shape[0]), backward=True)


def own_part(problem: Problem, whole: Results, rank: int, splits: tuple[int, ...], config: MoKConfig) -> Results:
    """What `rank` must get, from the results of one rank."""
    tokens = slice(sum(splits[:rank]), sum(splits[: rank + 1]))
    num_local_experts = problem.gate_up.shape[0] // len(splits)
    experts = slice(rank * num_local_experts, (rank + 1) * num_local_experts)
    mine = {
        name: tensor[experts if "routed" in name else tokens] for name, tensor in whole.items() if "shared" not in name
    }
    if problem.shared[0] is None:
        return mine
    alone = problem.rank(rank, list(splits))
    alone.gate_up, alone.down = problem.gate_up, problem.down
    return mine | {name: tensor for name, tensor in one_rank(alone, config).items() if "shared" in name}


def check_rank(group: Any, problem: Problem, whole: Results, splits: tuple[int, ...], config: MoKConfig) -> str:
    """What is wrong on this rank, or nothing."""
    rank = group.rank()
    mine = problem.rank(rank, list(splits))
    workspace = make_workspace(mine, group, config, max(splits))
    actual = mok_step(mine, workspace, backward=True)
    functional.check(workspace)
    expected = own_part(problem, whole, rank, splits, config)
    try:
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert_same_bits(name, actual[name], tensor)
    except AssertionError as error:
        return f"rank {rank}: {error}"
    return ""


def correctness(world: World, options: argparse.Namespace) -> Iterator[Row]:
    for size in (2, 4, 8):
        if size > world.size:
            continue
        wrong, num_checks = [], 0
        for name, problem in small_problems(world.device).items():
            whole = one_rank(problem, options.config)
            for splits in ways_to_split(problem.x.shape[0], size):
                check = partial(check_rank, problem=problem, whole=whole, splits=splits, config=options.config)
                wrong += [f"{name}, {splits}: {error}" for error in world.run(size, check) if error]
                num_checks += 1
        verdict = f"the bits of one rank in all of {num_checks} batches" if not wrong else "; ".join(wrong[:2])
        yield Row("correctness", f"{size} ranks", verdict, not wrong, {"ranks": size, "wrong": wrong})


# Speed


def random_problem(shape: tuple[int, ...], rank: int, size: int, device: torch.device) -> Problem:
    """What one rank has: T tokens and E / size experts, routed uniformly."""
    num_tokens, hidden_size, width, num_experts, topk = shape
    generator = torch.Generator(device).manual_seed(rank)

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.bfloat16, device=device).mul_(scale)

    scores = torch.rand(num_tokens, num_experts, generator=generator, device=device)
    top, top_experts = scores.topk(topk, dim=-1)
    return Problem(
        top_experts,
        normal(num_tokens, hidden_size),
        normal(num_tokens, hidden_size),
        top.softmax(-1),
        (None, None, None),
        normal(num_experts // size, 2 * width, hidden_size, scale=hidden_size**-0.5),
        normal(num_experts // size, hidden_size, width, scale=width**-0.5),
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(
    steps: Mapping[str, Callable[[], object]],
    communicator: Communicator,
    device: torch.device,
    runs: int,
    rounds: int = 5,
) -> dict[str, float]:
    """The median over `rounds` of the mean of `runs` calls; the steps take turns, and ranks start together."""
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            synchronize(device)
            communicator.barrier()
            start = time.perf_counter()
            for _ in range(runs):
                step()
            synchronize(device)
            times[name].append((time.perf_counter() - start) / runs * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def speed_of_rank(group: Any, shape: tuple[int, ...], options: argparse.Namespace, device: torch.device) -> Any:
    """Milliseconds by pass and system; the largest difference between mok and all-to-all; rows from other ranks."""
    communicator = as_communicator(group)
    rank, size = communicator.rank, communicator.size
    problem = random_problem(shape, rank, size, device)
    workspace = make_workspace(problem, group, options.config, shape[0])
    alone = Problem(**vars(problem) | {"top_experts": problem.top_experts % problem.gate_up.shape[0]})
    workspace_alone = make_workspace(problem, None, options.config, shape[0])
    systems: dict[str, Callable[[bool], Results]] = {
        "mok": partial(mok_step, problem, workspace),
        "all-to-all": AllToAll(problem, communicator, communicate=True),
        "no exchange": AllToAll(problem, communicator, communicate=False),
        "mok alone": partial(mok_step, alone, workspace_alone),
    }
    expected = systems["all-to-all"](True)
    errors = {name: relative_l2(tensor, expected[name]) for name, tensor in systems["mok"](True).items()}
    del expected
    times = {
        ("forward+backward" if backward else "forward"): median_ms(
            {name: partial(system, backward) for name, system in systems.items()}, communicator, device, options.runs
        )
        for backward in (False, True)
    }
    # Routing is uniform, so as many routes come in from other ranks as go out to them.
    remote = int((problem.top_experts // problem.gate_up.shape[0] != rank).sum())
    return times, max(errors.values()), remote


def slowest(times: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(rank[name] for rank in times) for name in times[0]}


def speed(world: World, options: argparse.Namespace) -> Iterator[Row]:
    for shape in options.shapes:
        num_tokens, hidden_size, width, _, topk = shape
        measure = partial(speed_of_rank, shape=shape, options=options, device=world.device)
        times, errors, remote = zip(*world.run(world.size, measure), strict=True)
        yield Row(
            "speed",
            f"{shape}",
            f"mok and all-to-all differ by {max(errors):.1e} at most",
            max(errors) < 2e-2,
            {"shape": shape, "difference": max(errors)},
        )
        for kind, passes in (("forward", 1), ("forward+backward", 3)):
            ms = slowest([rank[kind] for rank in times])
            flops = 6.0 * passes * num_tokens * topk * hidden_size * width * (world.size if world.is_virtual else 1)
            num_bytes = (2 if passes == 1 else 4) * max(remote) * hidden_size * 2
            for system, value in ms.items():
                numbers = {"shape": shape, "pass": kind, "system": system, "ms": value, "tflops": flops / value / 1e9}
                result = f"{value:9.3f} ms {numbers['tflops']:7.1f} TFLOP/s"
                if not world.is_virtual and system in ("mok", "all-to-all"):
                    numbers["gigabytes_per_second"] = num_bytes / value / 1e6
                    result += f" {numbers['gigabytes_per_second']:6.1f} GB/s"
                if system != "no exchange":
                    result += f"  {ms['no exchange'] / value:.2f} of the speed of no exchange"
                yield Row("speed", f"{shape} {kind}: {system}", result, True, numbers)


def sweep_of_rank(group: Any, shape: tuple[int, ...], options: argparse.Namespace, device: torch.device) -> Any:
    communicator = as_communicator(group)
    problem = random_problem(shape, communicator.rank, communicator.size, device)
    times: dict[str, dict[str, float]] = {"forward": {}, "forward+backward": {}}
    for sms, minibatch in product(COMM_SMS, MINIBATCHES):
        settings = {"fwd_num_comm_sms": sms, "bwd_num_comm_sms": sms, "minibatch_size": minibatch}
        workspace = make_workspace(problem, group, MoKConfig(**settings, backend=options.backend), shape[0])
        for kind, backward in (("forward", False), ("forward+backward", True)):
            steps = {f"{sms} SMs, minibatch {minibatch}": partial(mok_step, problem, workspace, backward)}
            times[kind] |= median_ms(steps, communicator, device, options.runs, rounds=3)
    return times


def sweep(world: World, options: argparse.Namespace) -> Iterator[Row]:
    for shape in options.shapes:
        measure = partial(sweep_of_rank, shape=shape, options=options, device=world.device)
        times = world.run(world.size, measure)
        for kind in ("forward", "forward+backward"):
            ms = slowest([rank[kind] for rank in times])
            best, worst = min(ms, key=ms.__getitem__), max(ms, key=ms.__getitem__)
            result = f"{ms[best]:.3f} ms with {best}; {ms[worst]:.3f} ms with {worst}"
            yield Row("sweep", f"{shape} {kind}", result, True, {"shape": shape, "pass": kind, "ms": ms})


# Robustness


def steps_of_rank(group: Any, problem: Problem, config: MoKConfig, num_steps: int) -> str:
    """Steps of ever other numbers of tokens. What is wrong on this rank, or nothing."""
    communicator = as_communicator(group)
    num_tokens = problem.x.shape[0]
    workspace = make_workspace(problem, group, config, num_tokens)
    splits = ways_to_split(num_tokens, communicator.size) if communicator.size > 1 else [(num_tokens,)]
    first: dict[int, Results] = {}
    for step in range(num_steps):
        which = step % len(splits)
        actual = mok_step(problem.rank(communicator.rank, list(splits[which])), workspace, backward=True)
        for name, tensor in first.setdefault(which, actual).items():
            # To the host's eyes only now and then, so that steps follow each other as they do in training.
            if step % 10 < len(splits) and not torch.equal(actual[name], tensor):
                return f"rank {communicator.rank}, step {step}: other bits in {name}"
    functional.check(workspace)
    return ""


def many_steps(world: World, options: argparse.Namespace) -> Row:
    problem = small_problem(world.device, shared_width=48)
    start = time.perf_counter()
    run = partial(steps_of_rank, problem=problem, config=options.config, num_steps=options.steps)
    wrong = [error for error in world.run(world.size, run) if error]
    seconds = time.perf_counter() - start
    result = "; ".join(wrong) or f"no hang, always the same bits, {seconds:.1f} s"
    return Row("robustness", f"{options.steps} steps, ranks with unequal T", result, not wrong, {"seconds": seconds})


def memory_in_use(device: torch.device) -> int:
    """Bytes; on a GPU of everything there, because symmetric memory is not the allocator's."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rebuild_of_rank(group: Any, problem: Problem, config: MoKConfig, times: int) -> list[int]:
    communicator = as_communicator(group)
    num_tokens = problem.x.shape[0] // communicator.size
    mine = problem.rank(communicator.rank, [num_tokens] * communicator.size)
    used = []
    for _ in range(times):
        mok_step(mine, make_workspace(mine, group, config, num_tokens), backward=True)
        gc.collect()
        communicator.barrier()  # virtual ranks share their memory: all have freed theirs, and none makes a new one yet
        used.append(memory_in_use(mine.x.device))
        communicator.barrier()
    return used


def rebuilds(world: World, options: argparse.Namespace, times: int = 10) -> Row:
    problem = small_problem(world.device, shared_width=48)
    used = world.run(world.size, partial(rebuild_of_rank, problem=problem, config=options.config, times=times))
    growth = max(rank[-1] - rank[1] for rank in used)
    # A workspace of these has 2 MB per rank on a CPU and 30 MB on a GPU.
    passed = growth < (8 << 20)
    result = f"memory grew by {growth / 2**20:.1f} MB from the second to the last"
    return Row("robustness", f"workspace made and freed {times} times", result, passed, {"bytes in use": used})


class Killed(Exception):
    """What a thread dies of."""


def doomed_steps(group: Any, problem: Problem, config: MoKConfig, die: Callable[[], None]) -> None:
    """Steps without end, of which rank 1 does not get through the third."""
    communicator = as_communicator(group)
    num_tokens = problem.x.shape[0] // communicator.size
    mine = problem.rank(communicator.rank, [num_tokens] * communicator.size)
    workspace = make_workspace(mine, group, config, num_tokens)
    for step in count():
        schedule = functional.build_schedule(
            workspace, config, mine.top_experts, num_local_experts=mine.gate_up.shape[0]
        )
        if step == 2 and communicator.rank == 1:
            die()
        call = (config, workspace, schedule)
        _, context = functional.forward(*call, *mine.tensors())
        functional.backward(*call, context, mine.grad_output, *mine.tensors())
        functional.check(workspace)


def doomed_process(rank: int, size: int, store: str, device: torch.device, config: MoKConfig, pipe: Connection) -> None:
    """One rank of a group of its own: sends the error that it ends with."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.timeout_s)
    backend = PROCESS_GROUPS[device.type]
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    try:
        problem = small_problem(device, shared_width=48)
        doomed_steps(dist.group.WORLD, problem, config, lambda: os.kill(os.getpid(), signal.SIGKILL))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    os._exit(0)  # a group that lacks a rank can not be taken down in good order


def watch_doomed_process(group: Any, store: str, device: torch.device, config: MoKConfig) -> tuple[float, str | None]:
    """When this rank's process said its last word, and what: an error, or None if it died or hung."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    arguments = (group.rank(), group.size(), store, device, config, theirs)
    process = context.Process(target=doomed_process, args=arguments, daemon=True)
    process.start()
    theirs.close()
    report = None
    # Starting takes a while; after that a rank waits for others three times at most: host, kernel, process group.
    if ours.poll(60 + 3 * config.timeout_s):
        with contextlib.suppress(EOFError):  # it died
            report = ours.recv()
    end = time.time()
    process.kill()
    process.join()
    return end, report


def killed_process(world: Processes, config: MoKConfig) -> list[tuple[float, str | None]]:
    with tempfile.TemporaryDirectory() as folder:
        [store, *_] = world.run(world.size, lambda _: f"{folder}/store")  # rank 0's for all
        return world.run(world.size, partial(watch_doomed_process, store=store, device=world.device, config=config))


def killed_thread(world: Threads, config: MoKConfig) -> list[tuple[float, str | None]]:
    problem = small_problem(world.device, shared_width=48)
    reports: list[tuple[float, str | None]] = [(0.0, None)] * world.size

    def die() -> None:
        reports[1] = (time.time(), None)
        raise Killed

    def rank(member: Any) -> None:
        try:
            doomed_steps(member, problem, config, die)
        except Exception as error:
            if not isinstance(error, Killed):
                reports[member.rank()] = (time.time(), f"{type(error).__name__}: {error}")
            raise

    try:
        world.run(world.size, rank)
    except Exception:
        return reports
    raise AssertionError("a dead rank went unnoticed")


def killed_rank(world: World, options: argparse.Namespace) -> Row:
    config = MoKConfig(backend=options.backend, timeout_s=10.0)
    reports = killed_thread(world, config) if isinstance(world, Threads) else killed_process(world, config)
    death = reports[1][0]
    others = [report for rank, report in enumerate(reports) if rank != 1]
    errors = [error for _, error in others if error is not None]
    seconds = max(end for end, _ in others) - death
    passed = reports[1][1] is None and len(errors) == len(others) and seconds < 3 * config.timeout_s
    kinds = ", ".join(sorted({error.split(":")[0] for error in errors}))
    result = f"{len(errors)} of {len(others)} others raised ({kinds}), the last {seconds:.1f} s later"
    return Row("robustness", "rank 1 killed", result, passed, {"seconds": seconds, "errors": errors})


def robustness(world: World, options: argparse.Namespace) -> Iterator[Row]:
    yield many_steps(world, options)
    yield rebuilds(world, options)
    if world.size > 1:
        yield killed_rank(world, options)


# The program


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--virtual", type=int, metavar="N", help="N ranks as threads; none: torchrun's processes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=("torch", "cuda"), help="of mok; default: mok chooses")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    for name in ("tokens", "hidden-size", "intermediate-size", "num-experts", "top-k"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help="in the place of that of both shapes")
    parser.add_argument("--runs", type=int, metavar="N", default=4, help="calls a measurement; default: %(default)s")
    parser.add_argument("--steps", type=int, metavar="N", default=1000, help="of robustness; default: %(default)s")
    parser.add_argument("--limit", type=float, metavar="S", default=900, help="seconds a part; default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON log")
    options = parser.parse_args()
    if unknown := set(options.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: expected some of {PARTS}, got {unknown}")
    if options.virtual is None and "WORLD_SIZE" not in os.environ:
        parser.error("start it by torchrun, or give --virtual N")
    own = (options.tokens, options.hidden_size, options.intermediate_size, options.num_experts, options.top_k)
    options.shapes = list(
        dict.fromkeys(tuple(mine or size for mine, size in zip(own, shape, strict=True)) for shape in SHAPES)
    )
    options.config = MoKConfig(backend=options.backend)
    return options


def report(world: World, options: argparse.Namespace, rows: list[Row]) -> None:
    if options.out is not None:
        device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
        machine = {"ranks": world.size, "virtual": world.is_virtual, "device": device, "torch": torch.__version__}
        options.out.write_text(json.dumps({**machine, "rows": [asdict(row) for row in rows]}, indent=1))
    kind = "virtual ranks on one device" if world.is_virtual else "processes"
    print(f"\n{world.size} {kind}, {world.device.type}")
    width = max(len(row.what) for row in rows)
    for row in rows:
        print(f"{'ok ' if row.passed else 'BAD'} {row.part:11} {row.what:{width}}  {row.result}")


def main() -> int:
    options = parse_arguments()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    world: World = (
        Processes(options.device)
        if options.virtual is None
        else Threads(options.virtual, options.device, timeout_s=options.limit)
    )
    parts = {"correctness": correctness, "speed": speed, "sweep": sweep, "robustness": robustness}
    rows = []
    for part in options.parts.split(","):
        faulthandler.dump_traceback_later(options.limit, exit=True)
        for row in parts[part](world, options):
            rows.append(row)
            if world.rank == 0:
                print(f"{part}: {row.what}", file=sys.stderr, flush=True)
    faulthandler.cancel_dump_traceback_later()
    if world.rank == 0:
        report(world, options, rows)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
