"""Kernels that are forked: fresh, mortal, and of the same environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning import KernelProvisionerFactory

from nsa_tutorial.course import forked_kernels, forked_provisioner

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="kernels are not forked here"
)
SEEN = """import os, sys, threading
ours = [name for name in sys.modules if name.startswith("nsa_tutorial")]
print(os.getppid(), "torch" in sys.modules, ours, os.getcwd(), os.environ["MARK"])"""
# the thread that ends a kernel whose parent has ended
MORTAL = """
watched = [getattr(thread, "parent_pid", None) for thread in threading.enumerate()]
print(os.getppid() in watched)"""


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelManager]:
    factory = KernelProvisionerFactory.instance()
    monkeypatch.setattr(factory, "default_provisioner_name", "")
    forked_provisioner.use()
    manager = KernelManager()
    yield manager
    manager.shutdown_kernel(now=True)


def said(manager: KernelManager, code: str) -> str:
    """What a kernel prints."""
    client, told = manager.client(), []
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        client.execute_interactive(
            code, timeout=60, output_hook=lambda m: told.append(m["content"].get("text", ""))
        )
    finally:
        client.stop_channels()
    return "".join(told).strip()


def test_it_has_imported_what_is_not_ours(
    manager: KernelManager, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it sees what a kernel sees, and ends when it is told to."""
    monkeypatch.setenv("JPY_OF_A_TEST", "mark")  # Jupyter's own names do not count
    code = SEEN.replace("MARK", "JPY_OF_A_TEST")
    manager.start_kernel(cwd=str(tmp_path))
    server, _ = forked_kernels._server()
    assert said(manager, code + MORTAL) == f"{server.pid} True [] {tmp_path} mark\nTrue"
    kernel = manager.provisioner.process
    assert kernel.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        kernel.wait(0.01)
    kernel.kill()
    assert kernel.wait(30) == 0
    assert kernel.poll() == 0 and not manager.is_alive()


def test_with_other_variables_it_starts_by_itself(manager: KernelManager, tmp_path: object) -> None:
    """What is imported may depend on them."""
    manager.start_kernel(cwd=str(tmp_path), env={**os.environ, "MARK": "other"})
    assert said(manager, SEEN) == f"{os.getpid()} False [] {tmp_path} other"
