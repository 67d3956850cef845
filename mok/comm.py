"""The few collectives that expert parallelism needs, over torch.distributed, over nothing, or over threads (tests)."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Communicator(ABC):
    """One rank's view of its group. Every method but `agree` at size 1 is collective."""

    rank: int
    size: int

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank is here."""

    @abstractmethod
    def all_gather_object(self, obj: Any) -> list[Any]:
        """The `obj` of every rank, in rank order; picklable."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """`[size, *tensor.shape]`: the tensor of every rank; shapes and dtypes must be equal."""

    @abstractmethod
    def all_to_all_rows(self, tensor: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        """`tensor [sum(send_counts), ...]`, sorted by destination -> `[sum(recv_counts), ...]`, sorted by source."""

    @abstractmethod
    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """A new tensor, the sum over ranks."""

    def agree(self, call: str, facts: Mapping[str, object], error: Exception | None = None) -> None:
        """Go on together or fail together: raise the same error on every rank if one has an `error`, or if `facts`
        (values that must be equal everywhere) differ. Costs one exchange of 16 bytes when all is well.

        Ranks may meet here in different calls (one is still making its workspace, say); that, too, is an error.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return
        digest = zlib.crc32(repr((call, sorted(facts.items()))).encode())
        seen = self.all_gather(torch.tensor([digest, error is not None], device=self._host_device())).tolist()
        if all(other == [digest, 0] for other in seen):
            return
        mine = None if error is None else (type(error) is TypeError, str(error))
        raise _disagreement(self.all_gather_object((call, dict(facts), mine))) from error

    def _host_device(self) -> torch.device:
        """Where a tensor must be that is exchanged for the host's eyes only."""
        return torch.device("cpu")


def _disagreement(reports: Sequence[tuple[str, Mapping[str, object], tuple[bool, str] | None]]) -> Exception:
    """The error that every rank raises, from what each rank reported."""
    names = dict.fromkeys(name for _, facts, _ in reports for name in facts)
    values = {name: [facts.get(name) for _, facts, _ in reports] for name in names}
    # A call goes last: ranks that disagree on a size come to be in different calls.
    calls = {"call": [call for call, _, _ in reports]}
    errors = [error for _, _, error in reports]
    for name, seen in (values | ({} if any(errors) else calls)).items():
        known = [value for value in seen if value is not None]
        if any(value != known[0] for value in known):
            return ValueError(f"{name}: expected the same on every rank, got {_by_rank(seen)}")
    kind = TypeError if all(error is None or error[0] for error in errors) else ValueError
    return kind(_by_rank([None if error is None else error[1] for error in errors]))


def _by_rank(values: Sequence[object]) -> str:
    """`rank 0, 2: 64; rank 1: 128`, leaving out None."""
    distinct = [value for i, value in enumerate(values) if value is not None and value not in values[:i]]
    ranks = {str(value): [str(rank) for rank, other in enumerate(values) if other == value] for value in distinct}
    return "; ".join(f"rank {', '.join(where)}: {value}" for value, where in ranks.items())


class SingleCommunicator(Communicator):
    """A group of one."""

    rank = 0
    size = 1

    def barrier(self) -> None:
        pass

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj]

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)

    def all_to_all_rows(self, tensor: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        return tensor

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


class ProcessGroupCommunicator(Communicator):
    """A `torch.distributed` process group; gloo and NCCL alike."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        # `init_process_group()` without a backend gives "cpu:gloo,cuda:nccl"; NCCL alone has no CPU side.
        self._has_cpu = "cpu:" in dist.get_backend_config(group)

    def _host_device(self) -> torch.device:
        return torch.device("cpu") if self._has_cpu else torch.device("cuda", torch.cuda.current_device())

    def barrier(self) -> None:
        dist.barrier(self.group)

    def all_gather_object(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, obj, group=self.group)
        return gathered

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather_into_tensor(gathered.view(-1), tensor.contiguous().view(-1), group=self.group)
        return gathered

    def all_to_all_rows(self, tensor: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        received = tensor.new_empty(sum(recv_counts), *tensor.shape[1:])
        # As bytes, because gloo does not know every dtype.
        dist.all_to_all_single(
            _as_bytes(received), _as_bytes(tensor.contiguous()), list(recv_counts), list(send_counts), group=self.group
        )
        return received

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total


def _as_bytes(tensor: Tensor) -> Tensor:
    """`[N, ...]` contiguous -> the same memory as uint8 `[N, bytes per row]`."""
    return tensor.view(tensor.shape[0], tensor.shape[1:].numel()).view(torch.uint8)


def as_communicator(group: Any) -> Communicator:
    """The communicator of `group`: None (one rank), a ProcessGroup, or a member of a `mok.testing.VirtualGroup`.

    Raises TypeError for anything else.
    """
    if group is None:
        return SingleCommunicator()
    if isinstance(group, dist.ProcessGroup):
        return SingleCommunicator() if group.size() == 1 else ProcessGroupCommunicator(group)
    communicator = getattr(group, "communicator", None)
    if isinstance(communicator, Communicator):
        return communicator
    raise TypeError(f"group: expected a ProcessGroup, None or a VirtualGroup member, got {type(group).__name__}")
