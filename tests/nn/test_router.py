"""MoKRouter against transformers' own routers, and what transformers leaves open: ties, masks, balancing."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from mok.nn import MoKRouter, tokens_per_expert
from mok.nn.router import top_k
from mok.testing import VirtualGroup

T, H, E = 64, 12, 16

# model: (class, its config beyond the sizes, the same as MoKRouter options)
GROUPED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
OURS_GROUPED = {"num_groups": 4, "top_k_groups": 2, "scaling_factor": 2.5}
SIGMOID = {"score_function": "sigmoid", "use_correction_bias": True}
ROUTERS = {
    "mixtral": ("MixtralTopKRouter", {}, {"logits_dtype": None}),
    "qwen3_moe": ("Qwen3MoeTopKRouter", {"norm_topk_prob": True}, {"logits_dtype": None}),
    "olmoe": ("OlmoeTopKRouter", {"norm_topk_prob": False}, {"logits_dtype": None, "renormalize": False}),
    "qwen3_5_moe": ("Qwen3_5MoeTopKRouter", {}, {"logits_dtype": None}),
    "deepseek_v2": (
        "DeepseekV2TopkRouter",
        GROUPED | {"topk_method": "group_limited_greedy"},
        OURS_GROUPED | {"group_score": "max", "renormalize": False},
    ),
    "deepseek_v3": (
        "DeepseekV3TopkRouter",
        GROUPED | {"norm_topk_prob": True},
        SIGMOID | OURS_GROUPED | {"renormalize_eps": 1e-20},
    ),
    "glm4_moe": (
        "Glm4MoeTopkRouter",
        GROUPED | {"norm_topk_prob": False},
        SIGMOID | OURS_GROUPED | {"renormalize": False},
    ),
    "minimax_m2": ("MiniMaxM2TopKRouter", {}, SIGMOID | {"logits_dtype": None}),
    "hy_v3": ("HYV3TopKRouter", {"router_scaling_factor": 1.5}, SIGMOID | {"scaling_factor": 1.5}),
    "mistral4": (
        "Mistral4TopkRouter",
        GROUPED | {"norm_topk_prob": True},
        OURS_GROUPED | {"renormalize_eps": 1e-20, "logits_dtype": None},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeTopKRouter",
        {"moe_norm_min": 0.3, "moe_num_experts": E},
        {"use_correction_bias": True, "renormalize_min": 0.3},
    ),
    "lfm2_moe": (
        "Lfm2MoeTopKRouter",
        {"norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.5},
        SIGMOID | {"renormalize_eps": 1e-6, "scaling_factor": 1.5, "logits_dtype": None},
    ),
    "deepseek_v4": (
        "DeepseekV4TopKRouter",
        {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5},
        {
            "score_function": "sqrtsoftplus",
            "use_correction_bias": True,
            "renormalize_eps": 1e-20,
            "scaling_factor": 1.5,
            "logits_dtype": None,
        },
    ),
    "granitemoe": (
        "GraniteMoeTopKRouter",
        {},
        {"score_after_top_k": True, "renormalize": False, "logits_dtype": None},
    ),
}


def by_expert(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`[T, E]`: some of transformers' routers leave the order of the picks open."""
    return torch.zeros(ids.shape[0], E).scatter(1, ids, weights)


def theirs_and_ours(model: str, k: int):
    class_name, settings, options = ROUTERS[model]
    config = SimpleNamespace(num_experts=E, num_local_experts=E, num_experts_per_tok=k, hidden_size=H, **settings)
    theirs = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), class_name)(config)
    torch.manual_seed(0)
    ours = MoKRouter(H, E, k, **options)
    theirs.weight.data.copy_(ours.weight.data)
    arguments = ()
    if ours.e_score_correction_bias is not None:
        ours.e_score_correction_bias.uniform_(-0.2, 0.2)
        if hasattr(theirs, "e_score_correction_bias"):
            theirs.e_score_correction_bias.copy_(ours.e_score_correction_bias)
        elif hasattr(theirs, "moe_statics"):
            theirs.moe_statics.e_score_correction_bias.data.copy_(ours.e_score_correction_bias[None])
        else:
            arguments = (ours.e_score_correction_bias,)
    return theirs, ours, arguments


@pytest.mark.parametrize("model", ROUTERS)
def test_equals_transformers_bit_for_bit(model):
    """With K = 2, where the order of the picks does not change their sum."""
    theirs, ours, arguments = theirs_and_ours(model, 2)
    x = torch.randn(T, H)
    expected = theirs(x, *arguments)
    logits, weights, ids = expected if expected[0].is_floating_point() else expected[::-1]
    output = ours(x)
    assert torch.equal(output.router_logits, logits)
    assert torch.equal(output.top_experts.sort(-1).values, ids.sort(-1).values)
    assert torch.equal(by_expert(output.router_weights, output.top_experts), by_expert(weights, ids))

    upstream = torch.rand(T, E)
    (expected_grad,) = torch.autograd.grad((by_expert(weights, ids) * upstream).sum(), theirs.weight)
    (grad,) = torch.autograd.grad((by_expert(*output[1:]) * upstream).sum(), ours.weight)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("model", ["deepseek_v3", "deepseek_v2", "lfm2_moe", "granitemoe"])
def test_equals_transformers_with_more_picks(model):
    theirs, ours, arguments = theirs_and_ours(model, 5)
    x = torch.randn(T, H)
    expected = theirs(x, *arguments)
    _, weights, ids = expected if expected[0].is_floating_point() else expected[::-1]
    output = ours(x)
    assert torch.equal(output.top_experts.sort(-1).values, ids.sort(-1).values)
    # The sum of five picks in another order may round otherwise.
    torch.testing.assert_close(by_expert(*output[1:]), by_expert(weights, ids), rtol=3e-7, atol=0)


def test_picks_come_best_first_and_weights_are_float32():
    router = MoKRouter(H, E, 4, dtype=torch.bfloat16)
    output = router(torch.randn(T, H, dtype=torch.bfloat16))
    assert output.router_weights.dtype == torch.float32 and output.top_experts.dtype == torch.int64
    assert output.router_logits.dtype == torch.float32
    assert (output.router_weights.diff(dim=-1) <= 0).all()
    assert MoKRouter(H, E, 4, dtype=torch.float64)(torch.randn(T, H).double()).router_weights.dtype == torch.float64


def test_ties_go_to_the_lowest_id():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        values = torch.randint(-2, 3, (500, E)).to(dtype)
        values[values == 0] *= torch.tensor([1.0, -1.0], dtype=dtype)[torch.randint(2, (int((values == 0).sum()),))]
        expected = torch.tensor([sorted(range(E), key=lambda e, row=row: (-row[e], e))[:6] for row in values.tolist()])
        assert torch.equal(top_k(values, 6), expected)


def test_extreme_scores_keep_their_order():
    scores = torch.tensor([[-float("inf"), 1e-45, float("inf"), -1e-45, 3e38, 0.0, -3e38]])
    assert top_k(scores, 7).tolist() == [[2, 4, 1, 5, 3, 6, 0]]
    with_nan = top_k(torch.tensor([[0.0, float("nan"), 1.0]]), 2)
    assert with_nan.tolist() == [[1, 2]]  # as torch.topk: NaN counts as the highest


def test_tied_groups_go_to_the_lowest_id():
    router = MoKRouter(H, E, 2, num_groups=4, top_k_groups=1)
    torch.nn.init.zeros_(router.weight)
    assert router(torch.randn(T, H)).top_experts.eq(torch.tensor([0, 1])).all()


def test_same_choice_in_every_pass():
    router = MoKRouter(H, E, 4)
    router.weight.data = router.weight.data[:1].repeat(E, 1)  # all experts tie
    x = torch.randn(T, H)
    picks = [router(x).top_experts, router(x.flip(0)).top_experts.flip(0), router(x[::2]).top_experts]
    assert all(pick.eq(torch.arange(4)).all() for pick in picks)


def test_padding_mask():
    router = MoKRouter(H, E, 2, scaling_factor=3.0)
    x, mask = torch.randn(T, H), torch.arange(T) % 3 > 0
    output, whole = router(x, mask), router(x)
    assert (output.top_experts[~mask] == -1).all() and (output.router_weights[~mask] == 0).all()
    assert torch.equal(output.top_experts[mask], whole.top_experts[mask])
    assert torch.equal(output.router_weights[mask], whole.router_weights[mask])
    assert tokens_per_expert(output.top_experts, E).sum() == 2 * mask.sum()


def test_logits_stay_float32_under_autocast_unless_told_otherwise():
    x = torch.randn(T, H)
    torch.manual_seed(0)
    router = MoKRouter(H, E, 2)
    with torch.autocast("cpu", torch.bfloat16):
        logits = router(x).router_logits
    assert torch.equal(logits, F.linear(x, router.weight))
    router.logits_dtype = None
    with torch.autocast("cpu", torch.bfloat16):
        assert router(x).router_logits.dtype == torch.bfloat16


def test_replay_decides_ids_and_weights_follow():
    router = MoKRouter(H, E, 2, renormalize=False)
    x = torch.randn(T, H)
    given = torch.stack([torch.arange(T) % E, (torch.arange(T) + 3) % E], dim=1)
    output = router(x, replay=lambda own: given)
    assert output.top_experts is given
    assert torch.equal(output.router_weights, F.linear(x, router.weight).softmax(-1).gather(1, given))


def test_update_bias_moves_towards_the_mean_load_of_all_ranks():
    group = VirtualGroup(2)
    loads = torch.tensor([[9, 0, 1, 2], [1, 0, 5, 6]])  # together 10, 0, 6, 8; mean 6

    def update(member):
        router = MoKRouter(H, 4, 2, use_correction_bias=True)
        router.update_bias(loads[member.rank()], 0.1, member)
        return router.e_score_correction_bias

    for bias in group.run(update):
        torch.testing.assert_close(bias, torch.tensor([-0.1, 0.1, 0.0, -0.1]))


def test_update_bias_balances():
    torch.manual_seed(0)
    router = MoKRouter(H, E, 2, score_function="sigmoid", use_correction_bias=True)
    x = torch.randn(512, H) + 1.0
    before = tokens_per_expert(router(x).top_experts, E)
    for _ in range(200):
        router.update_bias(tokens_per_expert(router(x).top_experts, E), 0.01)
    after = tokens_per_expert(router(x).top_experts, E)
    assert before.max() > 2 * before.float().mean() and after.max() < 1.3 * after.float().mean()
    assert not router.e_score_correction_bias.requires_grad


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("top_k: expected at most num_experts = 16, got 17", {"top_k": 17}),
        ("top_k: expected at least 1, got 0", {"top_k": 0}),
        ("score_function: expected one of", {"score_function": "relu"}),
        ("group_score: expected one of", {"group_score": "mean"}),
        ("num_groups: expected a divisor of num_experts = 16", {"num_groups": 5}),
        ("num_groups: .*groups of two at least", {"num_groups": 16, "top_k_groups": 16}),
        ("top_k_groups: expected at most num_groups = 4", {"num_groups": 4, "top_k_groups": 5}),
        ("top_k_groups: .*enough groups of 4 for top_k = 5, got 1", {"num_groups": 4, "top_k": 5}),
    ],
)
def test_bad_options_are_named(message, options):
    arguments = {"hidden_size": H, "num_experts": E, "top_k": 2} | options
    with pytest.raises(ValueError, match=message):
        MoKRouter(**arguments)


def test_bad_calls_are_named():
    router = MoKRouter(H, E, 2)
    x = torch.randn(T, H)
    with pytest.raises(ValueError, match=r"x: expected .*\[T, 12\], got torch.float32 \[64, 11\]"):
        router(x[:, 1:])
    with pytest.raises(ValueError, match=r"padding_mask: expected torch.bool \[64\].*got torch.bool \[63\]"):
        router(x, torch.ones(T - 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="use_correction_bias: expected True for update_bias"):
        router.update_bias(torch.zeros(E, dtype=torch.int64), 0.1)
    with pytest.raises(ValueError, match=r"tokens_per_expert: expected .*\[16\]"):
        MoKRouter(H, E, 2, use_correction_bias=True).update_bias(torch.zeros(3, dtype=torch.int64), 0.1)
