"""From dense attention to Native Sparse Attention kernels in TileLang and Triton: the code behind
the notebooks.

    from nsa_tutorial import NativeSparseAttention, NativeSparseAttentionConfig, ops

Importing the package decides, before triton is first imported, whether its kernels are compiled or
interpreted. Triton and TileLang themselves are imported when a kernel is first called.
"""

import importlib

from nsa_tutorial.runtime import environment

environment.prepare()

__version__ = "0.1.0"
__all__ = ["NativeSparseAttention", "NativeSparseAttentionConfig", "ops"]


def __getattr__(name: str) -> object:
    """The operators, the layer and its configuration, imported when they are first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "ops":
        return importlib.import_module("nsa_tutorial.ops")
    return getattr(importlib.import_module("nsa_tutorial.layer"), name)
