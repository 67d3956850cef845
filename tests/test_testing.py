"""The comparisons of `mok.testing`."""

import pytest
import torch

from mok.testing import assert_same_bits


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_same_bits(shape: tuple[int, ...]) -> None:
    value = torch.full(shape, float("nan"))
    assert_same_bits("value", value, value.clone())
    with pytest.raises(AssertionError, match="value: "):
        assert_same_bits("value", torch.zeros(shape), torch.ones(shape))


def test_same_bits_of_an_expanded_tensor() -> None:
    for shape in ((2, 3), (1, 2, 3)):
        assert_same_bits("value", torch.ones(shape), torch.ones(1).expand(shape))
        with pytest.raises(AssertionError, match="value"):
            assert_same_bits("value", torch.zeros(shape), torch.ones(1).expand(shape))
