"""Groups of processes that run case after case, and whole weights from their pieces."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from tests.same_weights.cases import Case, all_cases, write_counts
from tests.same_weights.recipes import write_data

Weights = dict[str, Tensor]
Result = Weights | str
"""Weights by name, or why there are none: "refused", or "failed" with a reason."""


def run_cases(cases: list[Case], folder: Path) -> dict[str, Result]:
    """Run the cases in `folder`, those with the same ranks in the same processes."""
    (folder / "results").mkdir()
    if any(case.name.startswith("recipe/") for case in cases):
        write_data(folder / "data")
    write_counts(str(folder / "counts.npz"))
    results: dict[str, Result] = {}
    for (world_size, hosts), group in itertools.groupby(
        sorted(cases, key=_ranks_of), key=_ranks_of
    ):
        names, begin = [case.name for case in group], time.monotonic()
        results |= _run_group(names, world_size, hosts, folder)
        took = time.monotonic() - begin
        print(f"{len(names)} cases on {world_size} ranks, {hosts} hosts: {took:.0f} s", flush=True)
    return results


def _ranks_of(case: Case) -> tuple[int, int]:
    return case.world_size, case.hosts


def _run_group(names: list[str], world_size: int, hosts: int, folder: Path) -> dict[str, Result]:
    """Start the ranks, and start them again after a case that failed."""
    results: dict[str, Result] = {}
    while len(results) < len(names):
        waiting, failure = names[len(results) :], "no result"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        try:
            args = (waiting, world_size, hosts, port, folder)
            mp.spawn(_serve, args=args, nprocs=world_size)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            failure = str(error).strip().splitlines()[-1]
            print((folder / "log.0.txt").read_text()[-2000:], error, sep="\n", file=sys.stderr)
        for name in waiting:
            files = [_result_file(folder, name, rank) for rank in range(world_size)]
            if not all(file.is_file() for file in files):
                results[name] = f"failed: {failure}"
                break
            results[name] = _assemble([torch.load(file) for file in files])
    return results


def _result_file(folder: Path, name: str, rank: int) -> Path:
    return folder / "results" / f"{name.replace('/', ' ')}.{rank}.pt"


def _serve(
    rank: int, names: list[str], world_size: int, hosts: int, port: int, folder: Path
) -> None:
    """Run the cases on one rank, and leave its pieces of their weights in files."""
    per_host = world_size // hosts
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank % per_host),
        LOCAL_WORLD_SIZE=str(per_host),
        GROUP_RANK=str(rank // per_host),
        TORCHELASTIC_RUN_ID="same_weights",
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with (folder / f"log.{rank}.txt").open("a") as log:  # gloo prints too, past sys.stdout
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    cases = {case.name: case for case in all_cases()}
    for name in names:
        here = folder / "cases" / f"{name.replace('/', ' ')}"
        here.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            for shared in ("data", "counts.npz"):
                (here / shared).symlink_to(folder / shared)
        dist.barrier()
        os.chdir(here)
        pieces: Any = "refused"
        try:
            pieces = _pieces(cases[name].run())
        except ValueError as error:
            print(f"{name} was refused: {error}", flush=True)
        torch.save(pieces, _result_file(folder, name, rank))
        dist.barrier()
    dist.destroy_process_group()


def _pieces(module: nn.Module) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
    """What this rank has of each weight: its name, the whole's shape, where, and the piece."""
    found = []
    for name, value in module.state_dict().items():
        shape = tuple(value.size())
        if hasattr(value, "local_shards"):
            for shard in value.local_shards():
                corner = tuple(shard.metadata.shard_offsets)
                found.append((name, shape, corner, shard.tensor.detach().clone()))
        else:
            found.append((name, shape, (), value.detach().clone()))
    return found


def _assemble(ranks: list[Any]) -> Result:
    """Whole weights from the pieces of all ranks."""
    if any(isinstance(pieces, str) for pieces in ranks):
        return ranks[0] if all(pieces == ranks[0] for pieces in ranks) else "refused by some ranks"
    whole: Weights = {}
    for rank, pieces in enumerate(ranks):
        for name, shape, corner, piece in pieces:
            if corner:
                table = whole.setdefault(name, piece.new_full(shape, torch.nan))
                table[tuple(slice(a, a + n) for a, n in zip(corner, piece.shape))] = piece
            elif not same_bits(whole.setdefault(name, piece), piece):
                whole[f"{name} of rank {rank}"] = piece
    return whole


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are of one type and shape, and every byte is the same."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
