"""How Jupyter starts a kernel through `forked_kernels`."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

from nsa_tutorial.course import forked_kernels


class ForkedProvisioner(LocalProvisioner):
    """Forks a kernel where it can, and else starts it as Jupyter does."""

    async def launch_kernel(self, cmd: list[str], **options: object) -> KernelConnectionInfo:
        """Start the kernel with a command; returns how to reach it."""
        process = forked_kernels.fork(cmd, options.get("env", {}), options.get("cwd"))
        if process is None:
            return await super().launch_kernel(cmd, **options)
        self.process = process
        self.pid = self.pgid = process.pid
        return self.connection_info


def use() -> None:
    """From now on, in this process, fork the kernels that Jupyter starts."""
    if not forked_kernels.ENVIRONMENT:
        forked_kernels.ENVIRONMENT.update(os.environ)
    factory, group = KernelProvisionerFactory.instance(), KernelProvisionerFactory.GROUP_NAME
    place = f"{__name__}:{ForkedProvisioner.__name__}"
    factory.provisioners["forked"] = EntryPoint(name="forked", value=place, group=group)
    factory.default_provisioner_name = "forked"
