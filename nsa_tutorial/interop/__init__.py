"""Other libraries and the operators: their arguments as ours, and ours inside their models.

    o = ops.native_sparse_attention(**interop.from_fla(q, k, v, g_cmp, g_slc))

    from nsa_tutorial.interop import transformers
    transformers.register()

`libraries` has the arguments of three libraries, and needs none of them. `transformers` puts the
operators into models of Hugging Face, and is imported when it is asked for.
"""

from nsa_tutorial.interop.libraries import (
    EJKERNEL,
    FLA,
    LUCIDRAINS,
    from_ejkernel,
    from_fla,
    from_lucidrains,
    heads_first,
    selection_only,
)

__all__ = [
    "EJKERNEL",
    "FLA",
    "LUCIDRAINS",
    "from_ejkernel",
    "from_fla",
    "from_lucidrains",
    "heads_first",
    "selection_only",
]
