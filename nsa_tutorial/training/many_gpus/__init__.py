"""Context-parallel Native Sparse Attention: the tokens of a text are cut over ranks, queries stay
where they are, and keys and values travel, on `torch.distributed` (chapter 18).

    mesh = make_mesh(data=1, context=2, device="cuda")  # under torchrun
    cut = cut_of(mesh, tokens=131_072)
    o = native_sparse_attention(q, k, v, g_cmp, g_slc, g_swa, mesh=mesh, cut=cut)  # of my tokens

The layer takes a mesh, too: `layer(x, mesh=mesh, cut=cut)`. To see it right and fast on a machine:

    torchrun --nproc-per-node 2 -m nsa_tutorial.training.many_gpus --verify
"""

from nsa_tutorial.training.many_gpus.agreement import RanksDisagree
from nsa_tutorial.training.many_gpus.collectives import RankLost, counted
from nsa_tutorial.training.many_gpus.cuts import Cut
from nsa_tutorial.training.many_gpus.meshes import (
    context_of,
    cut_of,
    make_mesh,
    positions,
    shard,
    unshard,
)
from nsa_tutorial.training.many_gpus.operators import (
    compress,
    native_sparse_attention,
    three_branches,
)

__all__ = [
    "Cut",
    "RankLost",
    "RanksDisagree",
    "compress",
    "context_of",
    "counted",
    "cut_of",
    "make_mesh",
    "native_sparse_attention",
    "positions",
    "shard",
    "three_branches",
    "unshard",
]
