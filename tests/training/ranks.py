"""Processes that play the ranks of a mesh: they are started once, and each call of `run` is one
function on all of them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

# one process imports PyTorch, and the ranks are its copies
_CONTEXT = multiprocessing.get_context("forkserver")


class RankFailed(AssertionError):
    """What went wrong on a rank."""


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Ranks:
    """`size` processes with a process group over gloo, or NCCL on `device="cuda"`."""

    def __init__(self, size: int, device: str = "cpu", timeout: float = 60.0) -> None:
        _CONTEXT.set_forkserver_preload(
            ["nsa_tutorial.layer", "nsa_tutorial.training.many_gpus.verify"]
        )
        self.pipes, self.processes, port = [], [], free_port()
        for rank in range(size):
            pipe, end = _CONTEXT.Pipe()
            arguments = (end, rank, size, port, device, timeout)
            process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self.pipes.append(pipe)
            self.processes.append(process)

    def run(
        self, function: Callable, *arguments: object, patience: float = 120.0, **options: object
    ) -> list:
        """What `function(rank, *arguments, **options)` returns on each rank; None of one that dies.

        Raises:
            RankFailed: with the traceback of the first rank that raised.
        """
        for pipe in self.pipes:
            pipe.send((function, arguments, options))
        found = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(patience):
                raise RankFailed(f"rank {rank} did not answer in {patience} seconds")
            try:
                found.append(pipe.recv())
            except EOFError:
                found.append((True, None))  # it has died
        for rank, (is_right, result) in enumerate(found):
            if not is_right:
                raise RankFailed(f"rank {rank}: {result}")
        return [result for _, result in found]

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _serve(pipe: Connection, rank: int, size: int, port: int, device: str, timeout: float) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
                   "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}  # fmt: skip
    from nsa_tutorial.training.many_gpus import make_mesh

    make_mesh(1, size, device, timeout=timeout)
    while True:
        try:
            function, arguments, options = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(rank, *arguments, **options)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
