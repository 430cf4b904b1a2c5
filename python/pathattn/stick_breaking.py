"""Stick-breaking attention (Tan et al. 2024, arXiv 2410.17980) as a function.

    z_ij = scale * q_i k_j^T
    A_ij = sigmoid(z_ij) * (1 - sigmoid(z_i,j+1)) * ... * (1 - sigmoid(z_i,i-1))        (j < i, same document)
    o_i  = sum_j A_ij v_j,        rest_i = 1 - sum_j A_ij

Shapes, types, strides and devices are those of `pathattn.path_attention`; rest is shaped as its lse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import check_tensors


def stick_breaking_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    return_rest: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """From the newest key to the oldest, each breaks its share off what is left of a stick of length 1; differentiable once in every tensor.

    Args:
        q, k, v: queries, keys and values. A token does not see itself: a document's first has o = 0 and rest = 1.
        scale: of the logits z; K ** -0.5 unless given.
        cu_seqlens: int32 or int64 [documents + 1], from 0 to T, never decreasing: packed documents, with B = 1, as in `pathattn.path_attention`.
        return_rest: also return rest, float32 (float64 beside float64).

    Returns:
        o [B, T, HQ, V] in q's type, or (o, rest).

    Raises:
        ValueError, TypeError: a shape, type, device or cu_seqlens that does not fit; the message names the argument.
        NotImplementedError: at a second derivative.
    """
    check_tensors(dict(q=q, k=k, v=v), dict(cu_seqlens=cu_seqlens))
    o, rest = torch.ops.pathattn.stick_breaking_attention(q, k, v, scale=scale, cu_seqlens=cu_seqlens)
    return (o, rest) if return_rest else o
