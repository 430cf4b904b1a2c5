"""The interface of flash-linear-attention's PaTH operator, so that code written for it runs on ours."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import DecodingState, path_attention, prefill


def parallel_path_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    use_cache: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """PaTH attention in that package's convention: the gates' sum is multiplied by ``scale``. Any width up to 256, on CPUs and CUDA devices.

    Args:
        q, k, v, w, beta, g: as `pathattn.path_attention` takes them.
        scale: of scores and gates; K ** -0.5 unless given.
        cu_seqlens: int [documents + 1], packed documents in one batch row.
        use_cache: also return the keys that decoding by rewriting goes on from. No gradient flows through them.

    Returns:
        (o [B, T, HQ, V], k_cache [B, T, H, K] in k's type or None); row j of k_cache is key j carried to its document's last token.
    """
    options = dict(scale=scale, cu_seqlens=cu_seqlens, gate_scaled=True)
    o = path_attention(q, k, v, w, beta, g, **options)
    return o, _key_cache(q, k, v, w, beta, cu_seqlens) if use_cache else None


@torch.no_grad()
def _key_cache(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    batch, tokens, heads, width = k.shape
    if tokens == 0:
        return torch.empty_like(k)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    state = DecodingState(sequences, tokens, q.shape[2], heads, width, v.shape[3], dtype=k.dtype, device=k.device)
    prefill(q, k, v, w, beta, state=state, cu_seqlens=cu_seqlens)
    keys = state.carried_keys(tokens)
    if cu_seqlens is not None:
        keys = torch.cat([row[:length] for row, length in zip(keys, state.lengths.tolist())]).unsqueeze(0)
    return keys.to(k.dtype)
