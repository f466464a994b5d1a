"""An interrupt during an import waits until it is done, and is not lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest
from places import skip_unless_runs

from nsa_tutorial.runtime import interrupts

FIRST_CALL = """
import os, signal, sys, threading, time
import torch
from nsa_tutorial import ops

x = torch.ones(1, 4, 1, 8)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

def interrupt():
    while "triton.language" not in sys.modules:  # half of Triton is there
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    ops.sliding_window_attention(x, x, x, window_size=2, backend="triton")
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted")
print(ops.sliding_window_attention(x, x, x, window_size=2, backend="triton").sum().item())
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a process cannot send itself SIGINT")
def test_an_interrupted_first_call_can_be_repeated() -> None:
    """Without care, half of Triton is left. PyTorch's compiler is not imported at all."""
    skip_unless_runs("triton", "cpu")
    run = [sys.executable, "-c", FIRST_CALL]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n") == ["interrupted", "32.0", "False", ""], done.stderr


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    found, seen = signal.signal(signal.SIGINT, signal.default_int_handler), []
    try:
        with pytest.raises(KeyboardInterrupt), interrupts.held_back():
            signal.raise_signal(signal.SIGINT)
            seen.append("the rest of the block")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, found)
    assert seen


def test_another_thread_changes_no_handler() -> None:
    """There Python refuses to set one."""
    seen = []

    def run() -> None:
        with interrupts.held_back():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
