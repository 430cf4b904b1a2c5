"""PaTH attention (arXiv 2505.16381): the operators, a layer, and the interface of the public package flash-linear-attention.

>>> o = pathattn.path_attention(q, k, v, w, beta)        # [B, T, heads, width]; see its documentation for shapes
>>> layer = pathattn.PaTHAttention(hidden_size=256, num_heads=4)

The same operators are registered as ``torch.ops.pathattn.*``.
"""

from . import _library  # noqa: F401  loads the operators, so it comes first
from . import fla
from .attention import DecodingState, decode, path_attention, prefill
from .layer import LayerCache, PaTHAttention
from .stick_breaking import stick_breaking_attention

__all__ = ["DecodingState", "LayerCache", "PaTHAttention", "decode", "fla", "path_attention", "prefill", "stick_breaking_attention"]
