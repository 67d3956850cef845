"""MoKLayer computes what it says, and survives what people do to modules."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from mok import functional
from mok.functional import MoKConfig, MoKForwardContext
from mok.nn import MoKExperts, MoKLayer, MoKRouter, MoKSharedExpert, RouterOutput
from mok.nn._saved import pack, unpack
from mok.testing import VirtualGroup, assert_close_rel_l2, assert_same_bits

H, I, E, K = 16, 8, 6, 2  # noqa: E741


def make_layer(**options) -> MoKLayer:
    torch.manual_seed(0)
    return MoKLayer(**{"hidden_size": H, "intermediate_size": I, "num_experts": E, "top_k": K} | options)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, limit: float | None) -> Tensor:
    g, u = F.linear(x, gate), F.linear(x, up)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return F.linear(F.silu(g) * u, down)


def plain(layer: MoKLayer, x: Tensor) -> Tensor:
    """The layer's formula with every expert for every token, by autograd; `[T, H]`."""
    _, router_weights, top_experts = layer.router(x)
    weights = torch.zeros(len(x), E, dtype=router_weights.dtype).scatter(1, top_experts, router_weights)
    limit = layer.experts.swiglu_limit
    total = torch.zeros_like(x)
    for e in range(E):
        gate, up = layer.experts.gate_up_proj[e].chunk(2)
        total = total + weights[:, e, None] * swiglu(x, gate, up, layer.experts.down_proj[e], limit)
    if layer.shared_expert is not None:
        projections = (layer.shared_expert.gate_proj, layer.shared_expert.up_proj, layer.shared_expert.down_proj)
        shared = swiglu(x, *(projection.weight for projection in projections), limit)
        if layer.shared_expert_gate is not None:
            shared = F.linear(x, layer.shared_expert_gate.weight).sigmoid() * shared
        total = total + shared
    return total


def gradients(layer: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


def assert_same_results(layer: nn.Module, other: nn.Module, x: Tensor) -> None:
    assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"router": MoKRouter(H, E, 1, renormalize=False, dtype=torch.float64)},
        {"top_k": E},
        {"swiglu_limit": 0.2},
        {"shared_intermediate_size": 4},
        {"shared_intermediate_size": 4, "swiglu_limit": 0.2},
        {"shared_intermediate_size": 4, "shared_expert_gate": True},
        {"shared_intermediate_size": 4, "shared_expert_gate": True, "swiglu_limit": 0.2},
    ],
    ids=str,
)
def test_output_and_gradients(options):
    layer = make_layer(dtype=torch.float64, **options)
    x = torch.randn(3, 5, H, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(3, 5, H, dtype=torch.float64)
    y = layer(x)
    y.backward(upstream)
    results = gradients(layer) | {"x": x.grad, "y": y.detach()}
    layer.zero_grad()
    x.grad = None
    expected = plain(layer, x.flatten(0, 1)).view_as(x)
    expected.backward(upstream)
    for name, tensor in (gradients(layer) | {"x": x.grad, "y": expected.detach()}).items():
        assert_close_rel_l2(name, results[name], tensor, 1e-12)


def test_gradcheck():
    layer = make_layer(dtype=torch.float64, shared_intermediate_size=4)
    x = torch.randn(7, H, dtype=torch.float64, requires_grad=True)
    ids, weights = torch.tensor([[0, 1], [2, 3], [5, -1], [-1, -1], [4, 0], [0, 5], [1, 0]]), torch.rand(7, K).double()
    shared = layer.shared_expert.plain_weights()

    def call(x: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(
            layer.experts,
            dict(zip(("gate_up_proj", "down_proj"), parameters, strict=True)),
            (x, ids, weights),
            {"shared": shared},
        )

    parameters = [parameter.detach().requires_grad_() for parameter in layer.experts.parameters()]
    torch.autograd.gradcheck(call, (x, weights.requires_grad_(), *parameters), fast_mode=True)


def test_transformers_router_fits_in_the_slot():
    class Config:
        num_experts_per_tok, num_experts, norm_topk_prob, hidden_size = K, E, True, H

    router = Qwen3MoeTopKRouter(Config())
    layer = make_layer(router=router)
    router.weight.data.normal_()
    x, mask = torch.randn(9, H), torch.arange(9) < 6
    torch.testing.assert_close(layer(x), plain(layer, x))
    masked, output = layer(x, mask, return_router_output=True)
    assert isinstance(output, RouterOutput) and (output.top_experts[6:] == -1).all()
    assert torch.equal(masked[:6], layer(x[:6])) and (masked[6:] == 0).all()


def test_router_output_is_there_for_whoever_asks():
    layer = make_layer()
    seen = []
    layer.router.register_forward_hook(lambda module, arguments, output: seen.append(output))
    x = torch.randn(3, 5, H)
    y, output = layer(x, return_router_output=True)
    assert y.shape == x.shape and output.router_logits.shape == (15, E)
    assert all(torch.equal(a, b) for a, b in zip(seen[0], output, strict=True))


def test_padding_is_not_computed():
    layer = make_layer(shared_intermediate_size=4)
    x, mask = torch.randn(3, 5, H), torch.rand(3, 5) > 0.5
    real = layer(x[mask])
    x[~mask] = float("nan")
    x.requires_grad_()
    y = layer(x, mask)
    torch.testing.assert_close(y[mask], real)
    assert (y[~mask] == 0).all()
    y.square().sum().backward()
    assert (x.grad[~mask] == 0).all() and all(grad.isfinite().all() for grad in gradients(layer).values())


def test_adapter_on_the_shared_expert_is_not_passed_by():
    """The fused computation reads weights only, so it must step aside for a projection that is more than a linear."""

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    layer = make_layer(shared_intermediate_size=4)
    x = torch.randn(5, H)
    without = layer(x) - layer.shared_expert(x)
    layer.shared_expert.down_proj.__class__ = Doubled
    torch.testing.assert_close(layer(x), without + layer.shared_expert(x))
    layer.shared_expert.down_proj.__class__ = nn.Linear
    layer.shared_expert.up_proj.register_forward_hook(lambda module, arguments, output: output * 0)
    torch.testing.assert_close(layer(x), without)


# Survival


def test_state_dict_round_trip():
    layer, other = make_layer(shared_intermediate_size=4, shared_expert_gate=True), None
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    torch.manual_seed(1)
    other = MoKLayer(H, I, E, K, shared_intermediate_size=4, shared_expert_gate=True)
    x = torch.randn(5, H)
    assert not torch.equal(layer(x), other(x))
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert_same_results(layer, other, x)
    assert list(layer.state_dict()) == [
        "router.weight",
        "experts.gate_up_proj",
        "experts.down_proj",
        "shared_expert.gate_proj.weight",
        "shared_expert.up_proj.weight",
        "shared_expert.down_proj.weight",
        "shared_expert_gate.weight",
    ]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies(duplicate):
    layer = make_layer(shared_intermediate_size=4)
    x = torch.randn(5, H)
    layer(x).sum().backward()  # what a call leaves behind must not get in the way
    other = duplicate(layer)
    assert_same_results(layer, other, x)
    other.experts.down_proj.data.zero_()
    assert layer.experts.down_proj.abs().sum() > 0
    other(x).sum().backward()


def test_deepcopy_keeps_the_process_group_and_pickle_says_no():
    member = VirtualGroup(2).member(1)
    experts = MoKExperts(E, H, I, process_group=member)
    assert copy.deepcopy(experts).process_group is member
    with pytest.raises(TypeError, match="process_group: expected None to pickle"):
        pickle.dumps(experts)


def test_meta_device_then_load():
    layer = make_layer(shared_intermediate_size=4)
    with torch.device("meta"):
        empty = make_layer(shared_intermediate_size=4)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert_same_results(layer, empty, torch.randn(5, H))


def test_meta_device_then_reset():
    torch.manual_seed(3)
    direct = MoKExperts(E, H, I)
    late = MoKExperts(E, H, I, device="meta").to_empty(device="cpu")
    torch.manual_seed(3)
    late.reset_parameters()
    assert torch.equal(direct.gate_up_proj, late.gate_up_proj) and torch.equal(direct.down_proj, late.down_proj)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_moves(dtype):
    layer = make_layer(router=MoKRouter(H, E, K, use_correction_bias=True), shared_intermediate_size=4)
    x = torch.randn(64, H, dtype=dtype)
    exact = plain(copy.deepcopy(layer).to(dtype).double(), x.double())
    layer.router.e_score_correction_bias.fill_(0.1)
    moved = layer.to(dtype)
    assert torch.equal(moved.router.e_score_correction_bias, torch.full((E,), 0.1))
    y = moved(x)
    assert y.dtype == dtype
    assert_close_rel_l2("y", y, exact, 4 * torch.finfo(dtype).eps)
    y.float().sum().backward()
    assert all(grad.dtype == dtype for grad in gradients(moved).values())


def test_autocast_computes_in_bfloat16():
    layer = make_layer(shared_intermediate_size=4)
    x = torch.randn(64, H, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, output = layer(x, return_router_output=True)
    y.float().sum().backward()
    lower = copy.deepcopy(layer.experts).bfloat16()
    shared = tuple(weight.bfloat16() for weight in layer.shared_expert.plain_weights())
    expected = lower(x.bfloat16(), output.top_experts, output.router_weights, shared=shared)
    assert torch.equal(y, expected) and y.dtype == torch.bfloat16
    assert torch.equal(output.router_logits, F.linear(x, layer.router.weight))
    assert all(grad.dtype == torch.float32 for grad in gradients(layer).values()) and x.grad.dtype == torch.float32


def test_no_grad_and_inference_mode():
    layer = make_layer()
    x = torch.randn(5, H)
    y = layer(x)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            silent = layer(x)
        assert torch.equal(silent, y) and silent.grad_fn is None


def test_non_contiguous_input():
    layer = make_layer(shared_intermediate_size=4)
    wide = torch.randn(5, 3, 2 * H)
    x = wide.transpose(0, 1)[..., ::2].requires_grad_()
    assert not x.is_contiguous()
    dense = x.detach().contiguous().requires_grad_()
    y, expected = layer(x), layer(dense)
    assert torch.equal(y, expected)
    upstream = torch.randn(3, H, 5).transpose(1, 2)
    y.backward(upstream)
    expected.backward(upstream.contiguous())
    assert torch.equal(x.grad, dense.grad)


def test_gradient_accumulation():
    layer = make_layer(dtype=torch.float64)
    x = torch.randn(12, H, dtype=torch.float64)
    layer(x).square().sum().backward()
    whole = gradients(layer)
    layer.zero_grad()
    for part in x.split([5, 0, 7]):
        layer(part).square().sum().backward()
    for name, grad in gradients(layer).items():
        assert_close_rel_l2(name, grad, whole[name], 1e-14)


def test_several_forwards_then_backwards_in_any_order():
    layer = make_layer()
    xs = [torch.randn(n, H, requires_grad=True) for n in (5, 40, 3)]
    expected = [torch.autograd.grad(layer(x).square().sum(), x)[0] for x in xs]
    outputs = [layer(x) for x in xs]
    for i in (1, 2, 0):
        assert torch.equal(torch.autograd.grad(outputs[i].square().sum(), xs[i])[0], expected[i])


@pytest.mark.parametrize("shape", [(0, H), (2, 0, H)])
def test_no_tokens(shape):
    layer = make_layer(shared_intermediate_size=4)
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == shape
    assert all((grad == 0).all() for grad in gradients(layer).values())


def test_one_vector():
    layer = make_layer()
    x = torch.randn(H)
    assert torch.equal(layer(x), layer(x[None])[0])


def test_experts_without_tokens_get_zero_gradients():
    experts = MoKExperts(E, H, I)
    x = torch.randn(9, H)
    experts(x, torch.full((9, 1), 4), torch.ones(9, 1)).sum().backward()
    for grad in (experts.gate_up_proj.grad, experts.down_proj.grad):
        assert (grad[4] != 0).any() and (grad[torch.arange(E) != 4] == 0).all()
    experts.zero_grad()
    experts(x, torch.full((9, 1), -1), torch.ones(9, 1)).sum().backward()
    assert (experts.gate_up_proj.grad == 0).all() and (experts.down_proj.grad == 0).all()


def test_stride_zero_gradient():
    layer = make_layer()
    x = torch.randn(5, H, requires_grad=True)
    layer(x).sum().backward()
    expected = torch.autograd.grad(layer(x), x, torch.ones(5, H))[0]
    assert torch.equal(x.grad, expected)


def test_backward_twice():
    layer = make_layer(shared_intermediate_size=4)
    y = layer(torch.randn(5, H)).square().sum()
    y.backward(retain_graph=True)
    once = {name: grad.clone() for name, grad in gradients(layer).items()}
    y.backward()
    assert all(torch.equal(grad, 2 * once[name]) for name, grad in gradients(layer).items())


@pytest.mark.parametrize(
    "frozen", ["router.weight", "experts.gate_up_proj", "experts.down_proj", "x", "all but router"]
)
def test_only_gradients_that_are_needed(frozen, monkeypatch):
    layer = make_layer()
    x = torch.randn(5, H, requires_grad=frozen not in ("x", "all but router"))
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name != frozen and (frozen != "all but router" or name == "router.weight"))
    asked = []
    backward = functional.backward

    def spy(*arguments, **keywords):
        asked.append(keywords["needs_grad"])
        return backward(*arguments, **keywords)

    monkeypatch.setattr(functional, "backward", spy)
    layer(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    assert (x.grad is not None) == x.requires_grad
    gate_up, down = layer.experts.gate_up_proj.requires_grad, layer.experts.down_proj.requires_grad
    needs_weights = layer.router.weight.requires_grad or x.requires_grad
    assert asked == [[x.requires_grad, needs_weights, gate_up, gate_up, down, False, False, False]]


def test_nothing_is_saved_when_nothing_needs_a_gradient():
    layer = make_layer().requires_grad_(False)
    assert layer(torch.randn(5, H)).grad_fn is None


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph(backend):
    layer = make_layer(shared_intermediate_size=4)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for shape in ((3, 5, H), (2, 9, H)):
        x = torch.randn(shape, requires_grad=True)
        mask = torch.rand(shape[:-1]) > 0.2
        results = []
        for module in (layer, compiled):
            layer.zero_grad()
            x.grad = None
            y = module(x, mask)
            y.square().sum().backward()
            results.append(gradients(layer) | {"x": x.grad, "y": y.detach()})
        for name, expected in results[0].items():
            assert_close_rel_l2(name, results[1][name], expected, 1e-6)


def test_op_is_a_good_citizen():
    experts = MoKExperts(E, H, I)
    x, ids = torch.randn(5, H, requires_grad=True), torch.randint(-1, E, (5, K))
    arguments = (x, ids, torch.rand(5, K, requires_grad=True), experts.gate_up_proj, experts.down_proj)
    torch.library.opcheck(
        torch.ops.mok.moe.default,
        (*arguments, None, None, None, None, 0, True, None, None, None, None),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_fields_on_the_cpu_travel_in_the_header():
    """As `split_sizes` does when x is on a GPU, whose part the meta device plays here."""
    ids = torch.tensor([[0, 1], [2, -1]])
    config = MoKConfig()
    workspace = functional.create_workspace(config, None, device="cpu", num_local_tokens=2, hidden_size=H, topk=K)
    schedule = functional.build_schedule(workspace, config, ids, num_local_experts=E)
    context = MoKForwardContext(torch.empty(0, 2, device="meta"), torch.empty(0, device="meta"))
    header, saved = pack(schedule, context, 2, torch.device("meta"), given=ids)
    assert all(tensor.numel() == 0 for tensor in saved)
    again, empty, num_local_tokens = unpack(header, saved, type(schedule), type(context))
    assert num_local_tokens == 2 and empty.gate_up.shape == (0, 2)
    for name, value in vars(schedule).items():
        assert_same_bits(name, getattr(again, name), value)


def test_config_reaches_the_op():
    layer = make_layer(config=MoKConfig(backend="cuda"))
    with pytest.raises(ValueError, match='backend: expected one that can serve cpu, got "cuda"'):
        layer(torch.randn(5, H))


def test_representation():
    group = VirtualGroup(2)
    text = repr(make_layer(process_group=group.member(1), swiglu_limit=7.0, shared_intermediate_size=4))
    assert f"num_experts={E}, hidden_size={H}, intermediate_size={I}, local_experts=3..5, swiglu_limit=7.0" in text
    assert f"top_k={K}" in text and "score_function='softmax'" in text
    router = MoKRouter(H, E, K, num_groups=3, top_k_groups=2, scaling_factor=2.5)
    assert "num_groups=3, top_k_groups=2, scaling_factor=2.5" in repr(router)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_same_initial_weights_for_every_ep_size(size):
    torch.manual_seed(5)
    whole = MoKLayer(H, I, E, K, shared_intermediate_size=4)
    after = torch.rand(())
    shards = []
    for rank in range(size):
        torch.manual_seed(5)
        shards.append(MoKLayer(H, I, E, K, shared_intermediate_size=4, process_group=VirtualGroup(size).member(rank)))
        assert torch.rand(()) == after
    for name, expected in whole.named_parameters():
        parts = [shard.get_parameter(name) for shard in shards]
        if name.startswith("experts."):
            assert torch.equal(torch.cat(parts), expected)
            assert expected.std() > 0.1 and not torch.equal(expected[0], expected[1])
        else:
            assert all(torch.equal(part, expected) for part in parts)


# Bad input


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "top_k: expected at most num_experts = 6, got 7", {"top_k": 7}),
        (ValueError, "num_experts: expected at least 1, got 0", {"num_experts": 0}),
        (TypeError, "hidden_size: expected int, got float 16.0", {"hidden_size": 16.0}),
        (ValueError, "intermediate_size: expected at least 1", {"intermediate_size": 0}),
        (ValueError, "intermediate_size: expected at least 1", {"shared_intermediate_size": 0}),
        (
            ValueError,
            "shared_expert_gate: expected False without shared_intermediate_size",
            {"shared_expert_gate": True},
        ),
        (
            ValueError,
            "num_experts: expected a multiple of the 4 ranks, got 6",
            {"process_group": VirtualGroup(4).member(0)},
        ),
        (TypeError, "group: expected a ProcessGroup, None or a VirtualGroup member, got str", {"process_group": "ep"}),
    ],
)
def test_bad_options_are_named(error, message, options):
    with pytest.raises(error, match=message):
        make_layer(**options)


def test_bad_calls_are_named():
    layer = make_layer()
    x = torch.randn(3, 5, H)
    with pytest.raises(ValueError, match=r"hidden_states: expected \[..., 16\], got torch.float32 \[3, 5, 15\]"):
        layer(x[..., 1:])
    with pytest.raises(ValueError, match=r"hidden_states: expected \[..., 16\], got torch.float32 \[\]"):
        layer(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"padding_mask: expected torch.bool \[3, 5\].*got torch.bool \[3, 4\]"):
        layer(x, torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"padding_mask: expected torch.bool \[3, 5\].*got torch.int64 \[3, 5\]"):
        layer(x, torch.ones(3, 5, dtype=torch.int64))
    with pytest.raises(TypeError, match="padding_mask: expected a tensor"):
        layer(x, [True])


def test_bad_expert_calls_are_named():
    experts = MoKExperts(E, H, I)
    x, ids, weights = torch.randn(5, H), torch.zeros(5, K, dtype=torch.int64), torch.rand(5, K)
    with pytest.raises(ValueError, match=r"hidden_states: expected .*\[T, H\], got torch.float32 \[1, 5, 16\]"):
        experts(x[None], ids, weights)
    with pytest.raises(ValueError, match=r"top_experts: expected .*\[5, K\].* got torch.int64 \[4, 2\]"):
        experts(x, ids[1:], weights)
    with pytest.raises(ValueError, match=r"top_experts: expected torch.int64 or torch.int32.* got torch.float32"):
        experts(x, weights, weights)
    with pytest.raises(ValueError, match=r"top_experts: expected ids from -1 \(dropped\) to 5, got 0 to 6"):
        experts(x, ids + 6 * (torch.arange(K) == 1), weights)
    with pytest.raises(
        ValueError, match=r"router_weights: expected torch.float32 \[5, 2\].* got torch.float32 \[4, 2\]"
    ):
        experts(x, ids, weights[1:])
    with pytest.raises(ValueError, match=r"gate_up_proj: expected torch.bfloat16 .* got torch.float32"):
        experts(x.bfloat16(), ids, weights)


def test_shared_expert_alone():
    shared = MoKSharedExpert(H, 4, swiglu_limit=0.1, dtype=torch.float64)
    x = torch.randn(5, H, dtype=torch.float64)
    weights = (shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight)
    torch.testing.assert_close(shared(x), swiglu(x, *weights, 0.1))
