"""Kernels for `pytest --nbval` that need not import PyTorch, TileLang and Matplotlib each: a
process that has imported them, and nothing of this package, forks one for every chapter.

    forked_provisioner.use()      from now on, in this process, for every Jupyter kernel

Run as a program, this module is that process. It has one thread, reads what to start from its
standard input, a line for each kernel, and answers with the kernel's process number. A kernel of
another interpreter or with other environment variables starts as it always does; so does every
kernel where this process has more than one thread, which a fork would lose, and where there is no
`pidfd_open` (Linux has it).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys

# What chapters import, and what PyTorch imports when an operator or an optimizer is first used.
PRELOADED = (
    "torch", "torch._dynamo", "matplotlib.backends.backend_agg", "matplotlib.figure", "PIL.Image",
    "ipykernel.kernelapp", "ipywidgets", "anywidget", "tqdm.auto", "pygments", "markdown_it",
    "triton.language", "tilelang",
)  # fmt: skip
LAUNCHER = "ipykernel_launcher"
ENVIRONMENT: dict[str, str] = {}  # that the process had first, filled by who uses this


# -- in the process that runs tests --


class Forked:
    """A kernel that another process forked, with as much of `subprocess.Popen` as Jupyter asks
    for. Its exit status is not known, and taken to be 0."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._descriptor: int | None = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended
            self._descriptor = None

    def poll(self) -> int | None:
        """None while it runs."""
        return self._ended_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: after `timeout` seconds.
        """
        if self._ended_within(timeout) is None:
            raise subprocess.TimeoutExpired(LAUNCHER, timeout)
        return 0

    def _ended_within(self, seconds: float | None) -> int | None:
        if self._descriptor is not None:
            if not select.select([self._descriptor], [], [], seconds)[0]:
                return None
            os.close(self._descriptor)
            self._descriptor = None
        return 0

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def _is_alike(variables: dict[str, str], imported: dict[str, str]) -> bool:
    """Whether a kernel with these variables finds what the server found: TileLang sets some when
    it is imported, `imported`, and Jupyter and pytest name each kernel and test."""
    named = ("JPY_", "PYTEST_CURRENT_TEST")
    names = {n for n in {*variables, *imported, *ENVIRONMENT} if not n.startswith(named)}
    known = ((ENVIRONMENT.get(n), imported.get(n)) for n in names)
    return all(variables.get(n) in values for n, values in zip(names, known, strict=True))


@functools.cache
def _server() -> tuple[subprocess.Popen, dict[str, str]] | None:
    """The process that forks, ready to, and its variables; None where it cannot fork."""
    command = [sys.executable, __file__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True, **pipes)
    atexit.register(_end, server)
    variables = json.loads(server.stdout.readline() or "null")
    return variables and (server, variables)


def _end(server: subprocess.Popen) -> None:
    with contextlib.suppress(BrokenPipeError):
        server.stdin.close()
    server.wait()


def fork(command: list[str], environment: dict[str, str], folder: str | None) -> Forked | None:
    """A kernel of this interpreter, forked; None where it has to start by itself.

    Args:
        command: what would start it: `[python, "-m", "ipykernel_launcher", "-f", ...]`.
        environment: its variables.
        folder: where it runs, by default here.
    """
    if command[0] != sys.executable or LAUNCHER not in command or not hasattr(os, "pidfd_open"):
        return None
    found = _server()
    if found is None or not _is_alike(environment, found[1]):
        return None
    server, _ = found
    told = {
        "argv": command[command.index(LAUNCHER) :],
        "folder": str(folder or os.getcwd()),
        "environment": environment,
    }
    try:
        server.stdin.write(json.dumps(told).encode() + b"\n")
        server.stdin.flush()
    except BrokenPipeError:  # it has ended, for want of memory for one
        return None
    pid = server.stdout.readline()
    return Forked(int(pid)) if pid else None


# -- in the process that forks --


def _become_kernel(told: dict) -> None:
    """In a forked process: be what `python -m ipykernel_launcher` is."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.chdir(told["folder"])
    os.environ.clear()
    # Jupyter names its own process, and a kernel ends with its parent; ipykernel reads the variable
    # when it is imported
    os.environ.update(told["environment"], JPY_PARENT_PID=str(os.getppid()))
    sys.argv = [*told["argv"], f"--IPKernelApp.parent_handle={os.getppid()}"]
    sys.modules["ipykernel.kernelapp"].launch_new_instance()


def _bury(*_: object) -> None:
    """Kernels that have ended leave nothing behind."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def serve() -> None:
    """Fork a kernel for each line of the standard input, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what an import prints is no answer
    del sys.path[0]  # the folder of this file
    for module in PRELOADED:
        with contextlib.suppress(ImportError):  # not everything is there on every machine
            importlib.import_module(module)
    is_ready = len(os.listdir("/proc/self/task")) == 1
    print(json.dumps(dict(os.environ) if is_ready else None), file=answers, flush=True)
    signal.signal(signal.SIGCHLD, _bury)
    gc.collect()
    gc.freeze()
    while is_ready and (line := sys.stdin.buffer.readline()):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                answers.close()
                _become_kernel(json.loads(line))
                status = 0
            finally:
                os._exit(status)
        with contextlib.suppress(OSError):  # the kernel may have done it, or have ended
            os.setpgid(pid, pid)
        print(pid, file=answers, flush=True)


if __name__ == "__main__":
    serve()
