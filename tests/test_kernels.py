"""The CUDA kernels against the torch backend, the reference in float64 and themselves; on a GPU only."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mok import functional as F
from mok.config import MoKConfig
from mok.testing import VirtualGroup, assert_close_rel_l2, assert_same_bits, relative_l2

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"


@dataclass
class Case:
    x: Tensor
    gate_up: Tensor
    down: Tensor
    ids: Tensor
    weights: Tensor
    shared: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def gate(self) -> Tensor:
        return self.gate_up[:, : self.down.shape[2]]

    @property
    def up(self) -> Tensor:
        return self.gate_up[:, self.down.shape[2] :]


def make_case(
    T: int, H: int, width: int, E: int, K: int, *, shared: int = 0, skew: float = 0.0, drop: float = 0.0, seed: int = 0
) -> Case:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=DEVICE, generator=generator) * scale).bfloat16()

    ranks = torch.arange(1, E + 1, device=DEVICE).float()
    scores = torch.randn(T, E, device=DEVICE, generator=generator) - skew * ranks.log()
    weights, ids = scores.softmax(-1).topk(K, dim=-1)
    if drop:
        ids = torch.where(torch.rand(ids.shape, device=DEVICE, generator=generator) < drop, -1, ids)
    gate_up, down = normal(E, 2 * width, H, scale=H**-0.5), normal(E, H, width, scale=width**-0.5)
    case = Case(normal(T, H), gate_up, down, ids, weights.float())
    if shared:
        case.shared = (
            normal(shared, H, scale=H**-0.5),
            normal(shared, H, scale=H**-0.5),
            normal(H, shared, scale=shared**-0.5),
        )
    return case


@pytest.fixture(autouse=True)
def dirty_memory() -> Iterator[None]:
    """Fill what the caching allocator will hand out with NaN."""
    torch.cuda.empty_cache()
    blocks = [torch.full((size,), float("nan"), device=DEVICE) for size in (1 << 28, 1 << 24, 1 << 20, 1 << 12)]
    del blocks
    yield
    torch.cuda.synchronize()


def run(
    case: Case,
    backend: str = "cuda",
    group: object = None,
    *,
    save: bool = True,
    num_sms: int | None = None,
    limit: float | None = None,
    capacity: int | None = None,
) -> tuple[Tensor, F.MoKForwardContext, F.MoKSchedule]:
    config = MoKConfig(backend=backend, num_sms=num_sms, timeout_s=10.0)
    tokens = case.x.shape[0] if capacity is None else capacity
    workspace = F.create_workspace(
        config, group, device=DEVICE, num_local_tokens=tokens, hidden_size=case.x.shape[1], topk=case.ids.shape[1]
    )
    schedule = F.build_schedule(workspace, config, case.ids, num_local_experts=case.down.shape[0])
    output, context = F.forward(
        config,
        workspace,
        schedule,
        case.x,
        case.weights,
        *(case.shared or (None, None, None)),
        case.gate,
        case.up,
        case.down,
        limit,
        save_for_backward=save,
    )
    F.check(workspace)
    return output, context, schedule


def oracle(case: Case, limit: float | None = None) -> Tensor:
    """The formula of the layer in float64."""

    def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        g, u = x @ gate.double().T, x @ up.double().T
        if limit is not None:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return (torch.nn.functional.silu(g) * u) @ down.double().T

    x = case.x.double()
    y = mlp(x, *case.shared) if case.shared else torch.zeros_like(x)
    for expert in range(case.down.shape[0]):
        token, k = (case.ids == expert).nonzero(as_tuple=True)
        if len(token):
            rows = mlp(x[token], case.gate[expert], case.up[expert], case.down[expert])
            y.index_add_(0, token, rows * case.weights[token, k].double()[:, None])
    return y


def assert_right(case: Case, limit: float | None = None) -> None:
    """Error at most 1.1 times that of the torch backend, which runs torch's grouped matmul, in the same precision."""
    output, context, schedule = run(case, limit=limit)
    expected, expected_context, expected_schedule = run(case, "torch", limit=limit)
    for name in ("expert_offsets", "route_row", "route_rank"):
        assert_same_bits(name, getattr(schedule, name), getattr(expected_schedule, name))
    R = int(schedule.expert_offsets[-1])
    assert_same_bits("row_route", schedule.row_route[:R], expected_schedule.row_route[:R])
    assert (schedule.row_route[R:] == -1).all()
    assert_close_rel_l2("gate_up", context.gate_up[:R], expected_context.gate_up[:R], 1e-3)
    exact = oracle(case, limit)
    assert not output.isnan().any()
    assert relative_l2(output, exact) <= 1.1 * relative_l2(expected, exact) + 1e-7


CRUEL = {
    "no token": (0, 64, 64, 4, 2, {}),
    "one token": (1, 2048, 768, 128, 8, {}),
    "127 tokens": (127, 256, 200, 8, 2, {"drop": 0.3}),
    "4097 tokens": (4097, 1024, 768, 64, 8, {"shared": 512}),
    "I = 8": (300, 256, 8, 8, 2, {}),
    "I = 200": (1000, 512, 200, 16, 4, {"skew": 1.0}),
    "H = 8": (257, 8, 64, 3, 1, {}),
    "H = 2880": (2048, 2880, 720, 32, 4, {"skew": 2.0, "drop": 0.1}),
    "H = 7168": (512, 7168, 256, 8, 2, {"shared": 136}),
    "one expert": (1000, 256, 128, 1, 1, {}),
    "512 experts": (3000, 256, 128, 512, 8, {}),
    "K = 32": (200, 128, 64, 64, 32, {}),
    "all dropped": (100, 128, 64, 4, 2, {"drop": 1.0, "shared": 64}),
}


@pytest.mark.parametrize("name", CRUEL)
def test_output_is_as_exact_as_torch(name: str) -> None:
    *sizes, options = CRUEL[name]
    assert_right(make_case(*sizes, **options))


def test_swiglu_limit() -> None:
    assert_right(make_case(500, 256, 128, 8, 2, shared=64), limit=0.5)


def test_one_expert_takes_all() -> None:
    case = make_case(3000, 256, 128, 16, 1)
    case.ids.fill_(11)
    assert_right(case)


def test_non_contiguous_input_and_strided_weights() -> None:
    case = make_case(300, 256, 128, 8, 2)
    wide = torch.randn(300, 512, device=DEVICE).bfloat16()
    wide[:, ::2] = case.x
    room = torch.full((8, 3 * 128 + 8, 256), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    room[:, : 2 * 128] = case.gate_up
    expected = run(case)[0]
    case.x, case.gate_up = wide[:, ::2], room[:, : 2 * 128]
    assert not case.x.is_contiguous() and not case.gate_up.is_contiguous()
    assert_same_bits("output", run(case)[0], expected)


def test_every_pattern_of_empty_experts() -> None:
    for pattern in range(1, 256):
        live = [e for e in range(8) if pattern >> e & 1]
        case = make_case(96, 64, 64, 8, 1, seed=pattern)
        case.ids = torch.tensor(live, device=DEVICE)[torch.arange(96, device=DEVICE)[:, None] % len(live)]
        error = relative_l2(run(case)[0], oracle(case))
        assert error < 1e-2, (pattern, error)


def test_every_small_number_of_tokens() -> None:
    for tokens in range(1, 258):
        case = make_case(tokens, 64, 64, 4, 2, seed=tokens)
        error = relative_l2(run(case)[0], oracle(case))
        assert error < 1e-2, (tokens, error)


def test_same_bits_on_every_run_and_any_number_of_sms() -> None:
    case = make_case(4000, 512, 384, 32, 4, shared=256, skew=1.0)
    output, context, schedule = run(case)
    R = int(schedule.expert_offsets[-1])
    for num_sms in [None] * 19 + [2, 50, 130]:
        again, other_context, _ = run(case, num_sms=num_sms)
        assert_same_bits(f"output with {num_sms} SMs", again, output)
        assert_same_bits("gate_up", other_context.gate_up[:R], context.gate_up[:R])
    assert_same_bits("inference", run(case, save=False)[0], output)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("everything_on", [None, 3])
def test_expert_parallel_gives_the_same_bits(size: int, everything_on: int | None) -> None:
    case = make_case(2048, 256, 128, 32, 4, drop=0.1)
    if everything_on is not None:
        case.ids.fill_(everything_on)
    expected, _, whole = run(case)
    lengths = [2048 // size] * size
    lengths[0], lengths[-1] = lengths[0] + lengths[-1], 0  # one rank has none

    def rank(member: object) -> tuple[Tensor, F.MoKSchedule]:
        r = member.rank()
        local = slice(sum(lengths[:r]), sum(lengths[: r + 1]))
        mine = slice(r * 32 // size, (r + 1) * 32 // size)
        part = Case(case.x[local], case.gate_up[mine], case.down[mine], case.ids[local], case.weights[local])
        output, _, schedule = run(part, group=member, capacity=max(lengths))
        return output, schedule

    results = VirtualGroup(size).run(rank)
    assert_same_bits("output", torch.cat([output for output, _ in results]), expected)
    rows = sum(int(schedule.expert_offsets[-1]) for _, schedule in results)
    assert rows == int(whole.expert_offsets[-1])


def test_nan_reaches_only_the_tokens_of_its_expert() -> None:
    case = make_case(700, 256, 128, 8, 2)
    clean = run(case)[0]
    case.down[5].fill_(float("nan"))
    case.gate_up[5].fill_(float("nan"))
    output = run(case)[0]
    hit = (case.ids == 5).any(-1)
    assert hit.any() and not hit.all()
    assert output[hit].isnan().all()
    assert_same_bits("other tokens", output[~hit], clean[~hit])


def test_expert_id_out_of_range_raises_and_the_workspace_goes_on() -> None:
    case = make_case(64, 64, 64, 4, 2)
    good = run(case)[0]
    config = MoKConfig(backend="cuda", timeout_s=10.0)
    workspace = F.create_workspace(config, None, device=DEVICE, num_local_tokens=64, hidden_size=64, topk=2)
    bad = case.ids.clone()
    bad[7, 1] = 4
    F.build_schedule(workspace, config, bad, num_local_experts=4)
    with pytest.raises(ValueError, match=r"top_experts: expected ids from -1 \(dropped\) to 3; token 7"):
        F.check(workspace)
    schedule = F.build_schedule(workspace, config, case.ids, num_local_experts=4)
    output, _ = F.forward(
        config, workspace, schedule, case.x, case.weights, None, None, None, case.gate, case.up, case.down
    )
    assert_same_bits("output", output, good)


def test_too_small_a_schedule_raises() -> None:
    case = make_case(64, 64, 64, 4, 2)
    config = MoKConfig(schedule_capacity_multiplier=0.5, backend="cuda")
    workspace = F.create_workspace(config, None, device=DEVICE, num_local_tokens=64, hidden_size=64, topk=2)
    F.build_schedule(workspace, config, case.ids, num_local_experts=4)
    with pytest.raises(
        ValueError, match="schedule_capacity_multiplier: expected at most 64 routed rows on rank 0, got 128"
    ):
        F.check(workspace)


def test_a_captured_graph_follows_changed_routing() -> None:
    case = make_case(512, 256, 128, 16, 2)
    config = MoKConfig(backend="cuda")
    workspace = F.create_workspace(config, None, device=DEVICE, num_local_tokens=512, hidden_size=256, topk=2)

    def step() -> Tensor:
        schedule = F.build_schedule(workspace, config, case.ids, num_local_experts=16)
        return F.forward(
            config, workspace, schedule, case.x, case.weights, None, None, None, case.gate, case.up, case.down
        )[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    for ids in (torch.full_like(case.ids, 3), case.ids.flip(0), torch.full_like(case.ids, -1)):
        case.ids.copy_(ids)
        output.fill_(float("nan"))
        graph.replay()
        F.check(workspace)
        assert_same_bits("output", output, run(case)[0])


@pytest.mark.parametrize("sizes", [(135168, 2048, 1024, 64, 8), (1024, 4096, 1024, 512, 4)])
def test_more_than_2_to_31_elements(sizes: tuple[int, int, int, int, int]) -> None:
    T, H, width, E, K = sizes
    assert max(T * K * 2 * width, E * 2 * width * H) > 2**31
    case = make_case(T, H, width, E, K)
    output = run(case)[0]
    some = torch.arange(0, T, max(1, T // 512), device=DEVICE)
    part = Case(case.x[some], case.gate_up, case.down, case.ids[some], case.weights[some])
    assert relative_l2(output[some], oracle(part)) < 6e-3
