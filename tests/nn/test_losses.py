"""Router losses against transformers', and that neither microbatches, masks nor ranks change them."""

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from mok.nn import MoKRouter, RouterLosses, RouterOutput, load_balancing_loss, router_z_loss, tokens_per_expert
from mok.testing import VirtualGroup

T, H, E, K = 60, 12, 8, 3


@pytest.fixture
def router() -> MoKRouter:
    torch.manual_seed(0)
    return MoKRouter(H, E, K)


def test_equals_transformers_bit_for_bit(router):
    outputs = [router(torch.randn(T, H)) for _ in range(3)]
    expected = load_balancing_loss_func(tuple(output.router_logits for output in outputs), E, K)
    assert torch.equal(load_balancing_loss(outputs), expected)
    single = load_balancing_loss_func((outputs[0].router_logits,), E, K)
    assert torch.equal(load_balancing_loss(outputs[0]), single)


def test_equals_transformers_with_a_mask(router):
    x, mask = torch.randn(4, T // 4, H), torch.rand(4, T // 4) > 0.4
    output = router(x.flatten(0, 1), mask.flatten())
    expected = load_balancing_loss_func((output.router_logits,), E, K, attention_mask=mask.long())
    assert torch.equal(load_balancing_loss(output), expected)


def test_gradient_equals_transformers(router):
    x = torch.randn(T, H)
    (grad,) = torch.autograd.grad(load_balancing_loss(router(x)), router.weight)
    expected = load_balancing_loss_func((router(x).router_logits,), E, K)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, router.weight)[0])


def test_z_loss(router):
    x, mask = torch.randn(T, H), torch.arange(T) < 40
    output = router(x, mask)
    expected = output.router_logits[mask].exp().sum(-1).log().square().mean()
    torch.testing.assert_close(router_z_loss(output), expected)


@pytest.mark.parametrize("sizes", [[T], [1, T - 1], [20, 20, 20], [0, 7, 53]])
def test_accumulated_losses_do_not_depend_on_microbatches(router, sizes):
    x, mask = torch.randn(T, H), torch.rand(T) > 0.3
    whole = router(x, mask)
    losses = RouterLosses(E)
    for part, part_mask in zip(x.split(sizes), mask.split(sizes), strict=True):
        losses.add(router(part, part_mask))
    for ours, expected in (
        (losses.load_balancing_loss(), load_balancing_loss(whole)),
        (losses.z_loss(), router_z_loss(whole)),
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
        grads = [torch.autograd.grad(loss, router.weight, retain_graph=True)[0] for loss in (ours, expected)]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)


def test_backward_after_each_microbatch_with_known_counts(router):
    x = torch.randn(T, H)
    with torch.no_grad():
        whole = RouterLosses(E)
        whole.add(router(x))
        counts = whole.counts()
    total = torch.zeros(())
    for part in x.split(25):
        losses = RouterLosses(E)
        losses.add(router(part))
        loss = losses.load_balancing_loss(counts) + losses.z_loss(counts)
        loss.backward()
        total += loss.detach()
    expected = load_balancing_loss(router(x)) + router_z_loss(router(x))
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(router.weight.grad, torch.autograd.grad(expected, router.weight)[0])


def test_parts_of_all_ranks_sum_to_the_loss(router):
    x = torch.randn(T, H)
    parts = x.split([13, 0, 47])

    def part(member):
        losses = RouterLosses(E, member)
        losses.add(router(parts[member.rank()]))
        return losses.load_balancing_loss(), losses.z_loss()

    balance, z = (sum(values) for values in zip(*VirtualGroup(3).run(part), strict=True))
    torch.testing.assert_close(balance, load_balancing_loss(router(x)))
    torch.testing.assert_close(z, router_z_loss(router(x)))


def test_masked_tokens_change_nothing(router):
    x, mask = torch.randn(T, H), torch.arange(T) < 40
    x[~mask] = 1e4
    masked, short = router(x, mask), router(x[mask])
    torch.testing.assert_close(load_balancing_loss(masked), load_balancing_loss(short))
    torch.testing.assert_close(router_z_loss(masked), router_z_loss(short))


def test_nothing_but_padding_costs_nothing(router):
    output = router(torch.randn(T, H), torch.zeros(T, dtype=torch.bool))
    assert load_balancing_loss(output) == 0 and router_z_loss(output) == 0


def test_counts_follow_the_choice_not_the_logits(router):
    """A correction bias changes what is routed, so it changes the loss."""
    logits = torch.zeros(T, E)
    chosen = torch.zeros(T, K, dtype=torch.int64) + torch.arange(K)
    loss = load_balancing_loss(RouterOutput(logits, torch.ones(T, K), chosen))
    torch.testing.assert_close(loss, torch.tensor(float(K)))


def test_tokens_per_expert():
    ids = torch.tensor([[0, 2], [2, -1], [-1, -1]])
    assert tokens_per_expert(ids, 4).tolist() == [1, 0, 2, 0]
    assert tokens_per_expert(ids[:0], 4).tolist() == [0, 0, 0, 0]


def test_no_outputs_is_an_error():
    with pytest.raises(ValueError, match="outputs: expected at least one router output"):
        load_balancing_loss([])
