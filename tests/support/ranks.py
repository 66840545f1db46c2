"""Real gloo ranks that stay up and run one test function after another.

A rank needs TorchRec and Lightning, and importing them takes four seconds. So a server imports them
once, and ranks are forked from it. What forked ranks share, the seeds of `hash` and of NumPy, ranks
on different machines do not: `own_interpreters` starts each of them anew.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

FORKED, _SPAWNED = get_context("forkserver"), get_context("spawn")
FORKED.set_forkserver_preload(["tests.support.tiny_model"])
_PATIENCE = 120.0  # seconds for the slowest rank of one case
_GRACE = 5.0  # seconds for the other ranks once one has failed


class Ranks:
    """`run(fn, ...)` calls fn on every rank of one process group and returns their results."""

    def __init__(
        self,
        world_size: int,
        ranks_per_host: int | None = None,
        *,
        own_interpreters: bool = False,
    ) -> None:
        self.world_size = world_size
        self._context: Any = _SPAWNED if own_interpreters else FORKED
        self._ranks_per_host = ranks_per_host or world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Results in rank order; the first rank's exception is raised here."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((fn, args, kwargs))
        answers: dict[int, tuple[str, Any]] = {}
        patience = _PATIENCE
        while len(answers) < self.world_size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, timeout=patience)
            if not ready:
                answers.setdefault(-1, ("hang", f"no answer from ranks within {patience} s"))
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = ("died", f"rank {rank} died")
                if answers[rank][0] != "ok":
                    patience = _GRACE  # the others may be waiting for this one
        failures = {rank: answer for rank, answer in answers.items() if answer[0] != "ok"}
        if failures:
            if len(failures) < self.world_size or any(a[0] != "error" for a in failures.values()):
                self.stop()  # a rank was left in the middle of a conversation
            rank, (_, failure) = sorted(failures.items(), key=lambda item: item[1][0] != "error")[0]
            if isinstance(failure, BaseException):
                raise failure
            raise RuntimeError(f"rank {rank}: {failure}")
        return [answers[rank][1] for rank in range(self.world_size)]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world_size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve,
                args=(rank, self.world_size, self._ranks_per_host, port, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, world_size: int, per_host: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank % per_host),
        LOCAL_WORLD_SIZE=str(per_host),
        GROUP_RANK=str(rank // per_host),
        TORCHELASTIC_RUN_ID="tests",
        OMP_NUM_THREADS="1",
    )
    import numpy as np
    import torch
    import torch.distributed as dist
    from lightning.pytorch.utilities import rank_zero_only

    torch.set_num_threads(1)
    np.random.seed()  # forked ranks have one state
    rank_zero_only.rank = rank  # Lightning reads it from the environment when it is imported
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    while True:
        try:
            fn, args, kwargs = pipe.recv()
        except EOFError:
            return
        os.environ.pop("PL_GLOBAL_SEED", None)  # what an earlier case left
        try:
            pipe.send(("ok", fn(*args, **kwargs)))
        except BaseException as error:
            text = traceback.format_exc()
            print(text, file=sys.stderr)
            try:
                error.add_note(text) if hasattr(error, "add_note") else None
                pipe.send(("error", error))
            except Exception:
                pipe.send(("error", RuntimeError(text)))
