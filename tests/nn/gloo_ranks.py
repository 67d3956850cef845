"""Processes that run functions as the ranks of a gloo group; started once and reused, because starting is slow."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_TIMEOUT_S = 120.0


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=_TIMEOUT_S / 2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    while (request := pipe.recv()) is not None:
        function, arguments = request
        try:
            pipe.send((True, function(rank, *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    def __init__(self, size: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, str(folder / "store"), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(rank, *arguments)` on every rank; the results. Any error or a rank that does not answer fails."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_TIMEOUT_S):
                self.stop()
                raise AssertionError(f"rank {rank} did not answer within {_TIMEOUT_S} s")
            results.append(pipe.recv())
        errors = [f"rank {rank}: {result}" for rank, (succeeded, result) in enumerate(results) if not succeeded]
        assert not errors, "\n".join(errors)
        return [result for _, result in results]

    def stop(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
