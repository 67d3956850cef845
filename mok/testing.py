"""What tests of expert parallelism need: several ranks in one process, and comparisons that say where they fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mok.comm import Communicator

_Result = TypeVar("_Result")


class VirtualGroup:
    """`size` ranks in one process on one device, each with its own tensors; they meet on the host.

    run(fn): call `fn(member)` in one thread per rank. member(r) goes wherever a process group is asked for.
    """

    def __init__(self, size: int, *, timeout_s: float = 60.0) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self._members = [VirtualMember(self, rank) for rank in range(size)]
        self._slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def member(self, rank: int) -> VirtualMember:
        return self._members[rank]

    def run(self, fn: Callable[[VirtualMember], _Result]) -> list[_Result]:
        """The results in rank order. If ranks raise, the others' waits end at once and the lowest rank's error is
        raised here."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException | None] = [None] * self.size
        self._barrier.reset()

        def call(rank: int) -> None:
            try:
                results[rank] = fn(self.member(rank))
            except BaseException as error:
                errors[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        raised = [error for error in errors if error is not None]
        for error in sorted(raised, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return results

    def wait(self) -> None:
        """Return once every rank is here; raises BrokenBarrierError if one has failed or does not come in time."""
        self._barrier.wait(self.timeout_s)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """The `value` of every rank; the caller must `wait()` before it lets another rank reuse memory of its own."""
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # ranks may use different streams
        self._slots[rank] = value
        self.wait()
        values = list(self._slots)
        self.wait()
        return values


class VirtualMember:
    """One rank of a `VirtualGroup`."""

    def __init__(self, group: VirtualGroup, rank: int) -> None:
        self.group = group
        self.communicator = VirtualCommunicator(group, rank)

    def rank(self) -> int:
        return self.communicator.rank

    def size(self) -> int:
        return self.communicator.size


class VirtualCommunicator(Communicator):
    def __init__(self, group: VirtualGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.size = group.size

    def barrier(self) -> None:
        self.group.wait()

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self.group.exchange(self.rank, obj)

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = torch.stack(self.group.exchange(self.rank, tensor))
        self.group.exchange(self.rank, None)
        return gathered

    def all_to_all_rows(self, tensor: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        sent = self.group.exchange(self.rank, tensor.split(list(send_counts)))
        received = torch.cat([pieces[self.rank] for pieces in sent])
        self.group.exchange(self.rank, None)
        assert received.shape[0] == sum(recv_counts)
        return received

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return self.all_gather(tensor).sum(0)


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """`|actual - expected| / |expected|` in float64; the absolute error where `expected` is zero."""
    expected = expected.double()
    error, scale = (actual.double() - expected).norm().item(), expected.norm().item()
    return error / scale if scale > 0 else error


def assert_close_rel_l2(name: str, actual: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    """Same shape, NaN and inf at the same places, and a relative L2 error of at most `tolerance` over the rest."""
    if actual is None or expected is None:
        assert actual is expected, f"{name}: expected {_kind(expected)}, got {_kind(actual)}"
        return
    assert actual.shape == expected.shape, f"{name}: expected {list(expected.shape)}, got {list(actual.shape)}"
    for what, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(actual) != test(expected)
        if wrong.any():
            where = wrong.nonzero()[0].tolist()
            raise AssertionError(f"{name}: {int(wrong.sum())} elements differ in being {what}, the first at {where}")
    finite = torch.isfinite(expected)
    error = relative_l2(actual[finite], expected[finite])
    if error > tolerance:
        distance = torch.where(finite, (actual.double() - expected.double()).abs(), 0)
        raise AssertionError(
            f"{name}: relative L2 error {error:.3g} > {tolerance:.3g}; {_worst(distance, actual, expected)}"
        )


def assert_same_bits(name: str, actual: Tensor, expected: Tensor) -> None:
    """Same shape, dtype and bits (so that NaN equals NaN and 0 differs from -0)."""
    kinds = (actual.dtype, actual.shape), (expected.dtype, expected.shape)
    assert kinds[0] == kinds[1], f"{name}: expected {kinds[1]}, got {kinds[0]}"
    # Contiguous first: the flat view of an expanded tensor may have stride 0, which can not be viewed as bytes.
    actual_bytes, expected_bytes = (t.contiguous().view(-1).view(torch.uint8) for t in (actual, expected))
    differs = actual_bytes != expected_bytes
    if differs.any():
        distance = (actual.double() - expected.double()).abs()
        count = int((actual != expected).sum())
        raise AssertionError(f"{name}: {count} of {actual.numel()} differ; {_worst(distance, actual, expected)}")


def _kind(value: object) -> str:
    return "None" if value is None else "a tensor"


def _worst(distance: Tensor, actual: Tensor, expected: Tensor) -> str:
    where = [int(index) for index in torch.unravel_index(distance.argmax(), distance.shape)]
    at = tuple(where)
    return f"worst at {where}: expected {expected[at].item()}, got {actual[at].item()}"
