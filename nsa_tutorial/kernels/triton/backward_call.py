"""What a backward in Triton begins with: contiguous tensors, and the numbers of each row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.triton.launch_options import tile_sizes
from nsa_tutorial.kernels.triton.selected import backward
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows


@dataclass(frozen=True, kw_only=True)
class BackwardCall:
    """One backward: what the forward was given and gave, contiguous, and the rows' numbers.

    Attributes:
        delta, lse2: what `selected.backward.delta_kernel` writes, `[R, H, G]`.
    """

    d_o: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    rows: QueryRows
    scale: float
    delta: Tensor
    lse2: Tensor

    @classmethod
    def of(
        cls, d_o: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor,
        lse: Tensor, rows: QueryRows, *, numbers: tuple[Tensor, Tensor] | None = None,
        **others: object,
    ) -> BackwardCall:  # fmt: skip
        """The call whose gradients of outputs are `d_o` and `d_lse`; `numbers` are `delta` and
        `lse2`, which `delta_kernel` computes if they are not given."""
        R, H, G, DV = len(rows.first_key), k.shape[2], q.shape[2] // k.shape[2], v.shape[3]
        d_o, q, k, v, lse = (x.contiguous() for x in (d_o, q, k, v, lse))
        delta, lse2 = numbers or (q.new_empty(R, H, G, dtype=torch.float32) for _ in range(2))
        if numbers is None:
            tiles = tile_sizes(G, q.shape[3], DV)
            backward.delta_kernel[(R, H)](
                o.contiguous(), d_o, lse, d_lse.contiguous(), delta, lse2, H,
                G=G, DV=DV, GT=tiles["GT"], DVT=tiles["DVT"], num_warps=1,
            )  # fmt: skip
        found = {"d_o": d_o, "q": q, "k": k, "v": v, "lse": lse, "delta": delta, "lse2": lse2}
        return cls(**found, rows=rows, **others)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The kernels' `G, D, DV`."""
        (HQ, D), (H, DV) = self.q.shape[2:], self.v.shape[2:]
        return {"G": HQ // H, "D": D, "DV": DV}

    @cached_property
    def tiles(self) -> dict[str, int]:
        """The kernels' `GT, DT, DVT`."""
        return tile_sizes(**self.sizes)

    @cached_property
    def widths(self) -> dict[str, int]:
        """The kernels' `DT, DVT`."""
        return {name: self.tiles[name] for name in ("DT", "DVT")}

    @cached_property
    def memory(self) -> dict[str, int]:
        """What the choice of options needs besides the sizes."""
        itemsize = self.q.element_size()
        return {"itemsize": itemsize, "shared_memory": shared_memory(self.q.device)}

    @cached_property
    def scales(self) -> tuple[float, float]:
        """The kernels' `scale, scale_log2`."""
        return self.scale, self.scale * LOG2_E
