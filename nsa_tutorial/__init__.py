"""From dense attention to Native Sparse Attention kernels in TileLang and Triton: the code behind
the notebooks.

    from nsa_tutorial import NativeSparseAttention, NativeSparseAttentionConfig, ops

Importing the package changes nothing in the process. Triton and TileLang are imported when a kernel
is first called; `runtime.environment.prepare` then decides whether Triton's kernels are compiled or
interpreted.
"""

import importlib

__version__ = "0.1.0"
__all__ = ["NativeSparseAttention", "NativeSparseAttentionConfig", "ops"]


def __getattr__(name: str) -> object:
    """The operators, the layer and its configuration, imported when they are first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "ops":
        return importlib.import_module("nsa_tutorial.ops")
    return getattr(importlib.import_module("nsa_tutorial.layer"), name)
