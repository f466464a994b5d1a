"""Compare a text over several processes with the same text on one.

    torchrun --nproc-per-node 2 -m nsa_tutorial.training.many_gpus --verify

It prints the largest errors, and its exit status is 0 if all are small enough. It takes a GPU for
each process where there are so many, and otherwise the CPU. `record` beside it measures.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist

from nsa_tutorial.training.many_gpus.meshes import make_mesh
from nsa_tutorial.training.many_gpus.verify import verify


def default_device() -> str:
    """ "cuda" where each process of this machine can have a GPU, otherwise "cpu"."""
    return "cuda" if torch.cuda.device_count() >= processes() else "cpu"


def processes() -> int:
    """How many torchrun started on this machine.

    Raises:
        SystemExit: where it started none, with a sentence.
    """
    if "RANK" not in os.environ:
        sys.exit(
            "start this by torchrun: torchrun --nproc-per-node 2 -m " + __package__ + " --verify"
        )
    return int(os.environ["LOCAL_WORLD_SIZE"])


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    p = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node 2 -m nsa_tutorial.training.many_gpus", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("--verify", action="store_true", required=True, help="compare, and print errors")
    p.add_argument("--device", choices=("cuda", "cpu"), help="the default is what there is")
    p.add_argument("--timeout", type=float, default=120.0, help="seconds that a rank is waited for")
    a = p.parse_args(arguments)
    device, ranks = a.device or default_device(), int(os.environ.get("WORLD_SIZE", 1))
    mesh = make_mesh(1, ranks, device, timeout=a.timeout)
    is_first, wrong = dist.get_rank() == 0, 0
    if is_first:
        print(f"{ranks} processes, {device}; the largest errors, and what they may be")
    for found in verify(mesh, device):
        wrong += not found.is_right
        if is_first:
            mark = "ok   " if found.is_right else "WRONG"
            print(f"{mark} {found.error:.1e} of {found.limit:.0e}  {found.what}", flush=True)
    if is_first:
        print("one process and several agree" if not wrong else f"{wrong} comparisons are wrong")
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    processes()
    sys.exit(main())
