"""The order of the kernel's tiles (csrc/common/task_order.h), compiled as plain C++: each tile comes once, and workers
that take tasks in order can always go on."""

import ctypes
import itertools
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "csrc" / "common" / "task_order.h"
GLUE = f"""
#include "{SOURCE}"
extern "C" int tasks(int blocks, int chunk, int group, int gate_up, int down, int* out) {{
    mok::TaskOrder const order{{blocks, chunk, group, gate_up, down}};
    for (int task = 0; task < order.num_tasks(); ++task) {{
        auto const tile = order.at(task);
        *out++ = static_cast<int>(tile.kind);
        *out++ = tile.block;
        *out++ = tile.column;
    }}
    return order.num_tasks();
}}
"""
GATE_UP, DOWN = 0, 1


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("task_order")
    (folder / "glue.cpp").write_text(GLUE)
    command = ["g++", "-std=c++20", "-shared", "-fPIC", "-Wall", "-Werror", "glue.cpp", "-o", "glue.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "glue.so"))


def tasks(library: ctypes.CDLL, blocks: int, chunk: int, group: int, gate_up: int, down: int) -> list[tuple[int, ...]]:
    room = (ctypes.c_int * (3 * blocks * (gate_up + down) + 1))()
    count = library.tasks(blocks, chunk, group, gate_up, down, room)
    assert count == blocks * (gate_up + down)
    return [tuple(room[3 * i : 3 * i + 3]) for i in range(count)]


def shapes() -> list[tuple[int, int, int, int, int]]:
    small = itertools.product(range(0, 20), (1, 2, 3, 7), (1, 2, 8), (1, 3), (1, 2))
    return [*small, (133, 11, 11, 6, 8), (97, 8, 8, 8, 16), (64, 8, 8, 112, 16), (50, 33, 8, 1, 32)]


def test_every_tile_comes_once(library: ctypes.CDLL) -> None:
    for shape in shapes():
        blocks, _, _, gate_up, down = shape
        expected = [
            (kind, block, column)
            for kind, columns in ((GATE_UP, gate_up), (DOWN, down))
            for block in range(blocks)
            for column in range(columns)
        ]
        assert sorted(tasks(library, *shape)) == expected, shape


def test_what_a_task_waits_for_comes_before_it(library: ctypes.CDLL) -> None:
    """Down tiles wait for all gate+up tiles of their block; gate+up tiles for the down tiles of the block that had
    their place in a ring of three chunks. If both come earlier, the first unfinished task is always held by a worker
    that can run it, whatever the number of workers."""
    for shape in shapes():
        blocks, chunk, _, gate_up, down = shape
        done = {(kind, block): 0 for kind in (GATE_UP, DOWN) for block in range(blocks)}
        for kind, block, _ in tasks(library, *shape):
            if kind == DOWN:
                assert done[GATE_UP, block] == gate_up, shape
            elif block >= 3 * chunk:
                assert done[DOWN, block - 3 * chunk] == down, shape
            done[kind, block] += 1


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 64, 66, 131, 160])
def test_workers_never_wait_for_each_other_in_a_circle(library: ctypes.CDLL, workers: int) -> None:
    """Replays the dynamic order: each worker holds a task in work and one more, and starts the first when ready."""
    blocks, chunk, gate_up, down = 40, 6, 3, 4
    order = iter(tasks(library, blocks, chunk, chunk, gate_up, down))
    done = {(kind, block): 0 for kind in (GATE_UP, DOWN) for block in range(blocks)}
    held: list[list[tuple[int, ...]]] = [[] for _ in range(workers)]

    def ready(kind: int, block: int) -> bool:
        if kind == DOWN:
            return done[GATE_UP, block] == gate_up
        return block < 3 * chunk or done[DOWN, block - 3 * chunk] == down

    finished = 0
    while finished < blocks * (gate_up + down):
        for queue in held:
            while len(queue) < 2 and (task := next(order, None)) is not None:
                queue.append(task)
        runnable = [queue for queue in held if queue and ready(*queue[0][:2])]
        assert runnable, f"all of {workers} workers wait"
        # The least favourable progress: only the last worker that could run does.
        kind, block, _ = runnable[-1].pop(0)
        done[kind, block] += 1
        finished += 1
