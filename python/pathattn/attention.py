"""PaTH attention as functions: the whole sequence, or a prompt and then token by token.

    H_s  = I - beta_s w_s^T w_s
    s_ij = scale * q_i H_i ... H_{j+1} k_j^T  +  g_{j+1} + ... + g_i        (j <= i, same document)
    o_i  = sum_j softmax_j(s_ij) v_j,        lse_i = log sum_j exp(s_ij)

Shapes, B batch, T tokens, HQ query heads, H key heads (HQ a multiple of H), K and V widths in 1 ... 256:

    q [B, T, HQ, K]    k, w [B, T, H, K]    v, o [B, T, H or HQ, V]    beta [B, T, H]    g, lse [B, T, HQ]

q, k and v are float32, bfloat16, on CPUs float64, on CUDA devices float16, all alike. w, beta and g are converted to float32 (beside float64, to
float64) if they are another floating type; under ``torch.autocast`` q, k and v take its type or, beside a `DecodingState`, the state's. A last
dimension that is not contiguous is copied; any other stride is read as it is. On a CUDA device work is queued on the current stream and nothing waits
for it.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor


def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None = None,
    beta: Tensor | None = None,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    gate_scaled: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal softmax attention with PaTH's position encoding; differentiable once in every tensor.

    Args:
        q, k, v: queries, keys and values; the module's documentation has the shapes.
        w, beta: directions and strengths of the Householder factors, both or neither (then plain causal attention). w is used as given: normalise
            it. Results are guaranteed while ``0 <= beta * |w|^2 <= 2 + 2**-7``; outside for more than a few tokens of a document, or where
            ``|w|^2`` overflows, it is a ValueError (a CUDA device does not look: its results are then wrong or not finite).
        g: natural logarithm of the forget gate, at most 0 (PaTH-FoX).
        scale: of the scores; K ** -0.5 unless given.
        cu_seqlens: int32 or int64 [documents + 1], from 0 to T, never decreasing: packed documents, with B = 1. Nothing crosses their bounds.
            On the CPU, where malformed ones are refused, or on q's CUDA device, where they cannot be looked at without waiting: malformed ones
            give wrong numbers there, never an access outside the tensors. CUDA graphs and ``torch.compile`` need them beside q.
        gate_scaled: multiply the gates' sum by ``scale`` too, as flash-linear-attention's PaTH does; the paper does not.
        return_lse: also return lse, float32 (float64 beside float64).

    Returns:
        o [B, T, HQ, V] in q's type, or (o, lse).

    Raises:
        ValueError, TypeError: a shape, type, device or cu_seqlens that does not fit; the message names the argument.
        NotImplementedError: at a second derivative.
    """
    check_tensors(dict(q=q, k=k, v=v), dict(w=w, beta=beta, g=g, cu_seqlens=cu_seqlens))
    o, lse = torch.ops.pathattn.path_attention(
        q, k, v, *_in_compute_type(q, w, beta, g), scale=scale, cu_seqlens=cu_seqlens, gate_scaled=gate_scaled
    )
    return (o, lse) if return_lse else o


class DecodingState:
    """What sequences keep between decoding steps: keys, values, gates and the products that carry queries back.

    Keys of a closed chunk of 512 tokens are never written again. Memory: ``capacity`` (rounded up to whole chunks) rows of keys and values.
    A state is filled by `prefill` or `decode` in place; ``copy.deepcopy`` forks it.

    Args:
        sequences: how many sequences advance together.
        capacity: tokens that a sequence may reach.
        query_heads, key_heads, key_width, value_width: HQ, H, K and V.
        dtype: of q, k and v.
        has_w, has_gate: whether the calls will have w and beta, and g.
        device: of q, k and v; `to` moves a state to another.
    """

    def __init__(
        self,
        sequences: int,
        capacity: int,
        query_heads: int,
        key_heads: int,
        key_width: int,
        value_width: int,
        *,
        dtype: torch.dtype = torch.float32,
        has_w: bool = True,
        has_gate: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        self._tensors = torch.ops.pathattn.decoding_state(
            sequences, capacity, query_heads, key_heads, key_width, value_width, dtype, has_w, has_gate, device
        )

    def to(self, device: torch.device | str) -> DecodingState:
        """This state on another device, where its sequences go on; itself if it is there already."""
        moved = copy.copy(self)
        moved._tensors = [None if tensor is None else tensor.to(device) for tensor in self._tensors]
        return moved

    @property
    def lengths(self) -> Tensor:
        """Tokens so far, int64 [sequences]."""
        return self._tensors[-1]

    @property
    def capacity(self) -> int:
        """Tokens that a sequence may reach."""
        return self._tensors[0].shape[2]

    @torch.no_grad()
    def carried_keys(self, tokens: int | None = None) -> Tensor:
        """Every key as the last token sees it, H_t ... H_{j+1} k_j.

        Args:
            tokens: rows of the result; the longest sequence's length unless given.

        Returns:
            [sequences, tokens, H, K], float32 (float64 of a float64 state); rows at or beyond a sequence's length are zero.
        """
        if tokens is None:
            tokens = int(self.lengths.max()) if self.lengths.numel() else 0
        return torch.ops.pathattn.carried_keys(*self._tensors, tokens)


@torch.no_grad()
def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None = None,
    beta: Tensor | None = None,
    g: Tensor | None = None,
    *,
    state: DecodingState,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    gate_scaled: bool = False,
) -> Tensor:
    """`path_attention` over whole prompts that also fills an empty ``state``: document n becomes sequence n. No gradient flows.

    Arguments, result and errors are those of `path_attention`; an error leaves ``state`` as it was. On a CUDA device a used ``state`` is not refused
    but made anew, since its lengths cannot be looked at without waiting.
    """
    check_tensors(dict(q=q, k=k, v=v), dict(w=w, beta=beta, g=g, cu_seqlens=cu_seqlens))
    return torch.ops.pathattn.prefill(
        q, k, v, *_in_compute_type(q, w, beta, g), *state._tensors, scale=scale, cu_seqlens=cu_seqlens, gate_scaled=gate_scaled
    )


@torch.no_grad()
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None = None,
    beta: Tensor | None = None,
    g: Tensor | None = None,
    *,
    state: DecodingState,
    scale: float | None = None,
    gate_scaled: bool = False,
) -> Tensor:
    """T new tokens for each of ``state``'s sequences, B = sequences: these rows of `path_attention` over everything so far. No gradient flows.

    Arguments, result and errors are those of `path_attention`; an error (a full state among them) leaves ``state`` as it was, but for one: on a CPU,
    where each call sees only its own tokens' ``beta * |w|^2``, growth over many calls is a ValueError once the result is no longer finite though the
    call's inputs are, and ``state`` is then spoilt. On a CUDA device a full state is not refused: tokens that do not fit are not kept, and their rows
    are NaN.
    """
    check_tensors(dict(q=q, k=k, v=v), dict(w=w, beta=beta, g=g))
    return torch.ops.pathattn.decode(q, k, v, *_in_compute_type(q, w, beta, g), *state._tensors, scale=scale, gate_scaled=gate_scaled)


def check_tensors(required: dict[str, Tensor], optional: dict[str, Tensor | None]) -> None:
    """Raises a TypeError that names the first argument that is no tensor; optional ones may be None."""
    for name, value in (required | optional).items():
        if not isinstance(value, Tensor) and not (value is None and name in optional):
            raise TypeError(f"{name} must be a tensor, got {value if value is None else type(value).__name__}")


def _in_compute_type(q: Tensor, *tensors: Tensor | None) -> list[Tensor | None]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return [tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor for tensor in tensors]
