import dataclasses

import pytest

from mok.config import MoKConfig


def test_fields_come_by_position_in_upstreams_order():
    config = MoKConfig(8, 12, 4096, 32768, 2.0, 1 << 20, backend="torch")
    assert dataclasses.astuple(config)[:6] == (8, 12, 4096, 32768, 2.0, 1 << 20)
    assert config.backend == "torch"
    with pytest.raises(TypeError):
        MoKConfig(8, 12, 4096, 32768, 2.0, 1 << 20, "torch")


def test_is_frozen_hashable_and_compares_by_value():
    assert MoKConfig(minibatch_size=4) == MoKConfig(minibatch_size=4) != MoKConfig()
    assert len({MoKConfig(), MoKConfig(), MoKConfig(backend="torch")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        MoKConfig().timeout_s = 1.0


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"fwd_num_comm_sms": 0}, ValueError, "fwd_num_comm_sms: expected a positive number, got 0"),
        ({"minibatch_size": 1.5}, TypeError, "minibatch_size: expected int, got float 1.5"),
        ({"macrobatch_size": True}, TypeError, "macrobatch_size: expected int, got bool True"),
        ({"schedule_capacity_multiplier": "2"}, TypeError, "schedule_capacity_multiplier: expected float, got str '2'"),
        (
            {"schedule_capacity_multiplier": float("nan")},
            ValueError,
            "schedule_capacity_multiplier: expected a positive",
        ),
        ({"timeout_s": None}, TypeError, "timeout_s: expected float, got NoneType"),
        ({"backend": "hip"}, ValueError, "backend: expected one of .*'torch', 'cuda'.* or None, got 'hip'"),
    ],
)
def test_bad_settings_are_named(options: dict, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        MoKConfig(**options)
