"""What does the all-reduce of per-example norms cost? Two gloo ranks on this machine.

Every rank fills in what it sees of every example's squared norm: one number for each example of all
ranks and each group of clipping.
"""

from __future__ import annotations

import argparse
import statistics
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.harness import print_table


def _rank(rank: int, world_size: int, port: int, sizes: list[int], out: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    for size in sizes:
        squares = torch.ones(1, size)
        times = []
        for _ in range(200):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(squares)
            times.append((time.perf_counter() - start) * 1e3)
            squares.fill_(1.0)
        if rank == 0:
            out.send({"numbers": size, "median_ms": round(statistics.median(times), 3)})
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 4096, 65536])
    options = parser.parse_args()
    receive, send = mp.Pipe(duplex=False)
    arguments = (options.ranks, options.port, options.sizes, send)
    mp.spawn(_rank, args=arguments, nprocs=options.ranks)
    print_table([receive.recv() for _ in options.sizes])


if __name__ == "__main__":
    main()
