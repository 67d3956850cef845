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
