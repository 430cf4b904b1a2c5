"""A transformer's attention layer with PaTH, parameters named as in the public package's layer.

Shape suffixes: B batch, T tokens, D hidden size, H key heads, Q query heads, K head width, C = H * K channels, N sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import DecodingState, check_tensors, decode, path_attention, prefill

LOW_RANK = 32  # inner size of the low-rank projection to w
NORM_EPSILON = 1e-5  # of the query and key norms
MOST_HEAD_WIDTH = 256  # of the kernels
UNIT_EPSILON = 1e-6  # added to |w|^2: a zero w stays zero


class LayerCache:
    """What one layer keeps between decoding steps: the attention's `DecodingState` and the convolution's last inputs. Made by `PaTHAttention.new_cache`."""

    def __init__(self, attention: DecodingState, conv_inputs: Tensor | None) -> None:
        self.attention = attention
        self.conv_inputs_NTC = conv_inputs


class PaTHAttention(nn.Module):
    """Multi-head attention with PaTH's data-dependent position encoding (arXiv 2505.16381).

    w is the L2-normalised SiLU of a causal depthwise convolution of a projection, beta is 2 * sigmoid of a projection, the gate a log-sigmoid.

    Args:
        hidden_size: D, a multiple of ``num_heads``; heads are at most 256 wide.
        num_heads, num_kv_heads: query heads, and key heads (as many unless given).
        use_forget_gate: PaTH-FoX.
        use_qk_norm: RMS norm of each query and key head.
        use_low_rank_w: project to w through 32 channels, instead of by one matrix.
        use_w_shortconv: the convolution and SiLU on w; without it w may have any sign, which exact swaps need.
        conv_size, conv_bias: taps of that convolution, and whether it has a bias.
        gate_scaled: `pathattn.path_attention`'s; True for weights trained with flash-linear-attention.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        num_kv_heads: int | None = None,
        use_forget_gate: bool = False,
        use_qk_norm: bool = False,
        use_low_rank_w: bool = True,
        use_w_shortconv: bool = True,
        conv_size: int = 3,
        conv_bias: bool = False,
        gate_scaled: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if hidden_size < 1 or num_heads < 1 or hidden_size % num_heads:
            raise ValueError(f"hidden_size must be a positive multiple of num_heads, got {hidden_size} and {num_heads}")
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        if conv_size < 1:
            raise ValueError(f"conv_size must be at least 1, got {conv_size}")
        self.head_dim = hidden_size // num_heads
        if self.head_dim > MOST_HEAD_WIDTH:
            raise ValueError(f"hidden_size / num_heads, the heads' width, must be at most {MOST_HEAD_WIDTH}, got {self.head_dim}")
        self.use_forget_gate = use_forget_gate
        self.use_w_shortconv = use_w_shortconv
        self.gate_scaled = gate_scaled
        channels = self.num_kv_heads * self.head_dim

        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, channels, bias=False)
        self.v_proj = nn.Linear(hidden_size, channels, bias=False)
        if use_low_rank_w:
            self.w_proj = nn.Sequential(nn.Linear(hidden_size, LOW_RANK, bias=False), nn.Linear(LOW_RANK, channels, bias=False))
        else:
            self.w_proj = nn.Linear(hidden_size, channels, bias=False)
        if use_w_shortconv:
            self.w_conv1d = CausalConv(channels, channels, conv_size, groups=channels, bias=conv_bias)
        self.bt_proj = nn.Linear(hidden_size, self.num_kv_heads)
        if use_forget_gate:
            self.g_proj = nn.Linear(hidden_size, num_heads)
        self.maybe_q_norm = nn.RMSNorm(self.head_dim, eps=NORM_EPSILON) if use_qk_norm else nn.Identity()
        self.maybe_k_norm = nn.RMSNorm(self.head_dim, eps=NORM_EPSILON) if use_qk_norm else nn.Identity()
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def new_cache(self, sequences: int, capacity: int) -> LayerCache:
        """An empty cache for ``sequences`` sequences of at most ``capacity`` tokens."""
        weight = self.k_proj.weight
        state = DecodingState(
            sequences, capacity, self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim,
            dtype=weight.dtype, has_gate=self.use_forget_gate, device=weight.device,
        )
        if not self.use_w_shortconv:
            return LayerCache(state, None)
        return LayerCache(state, weight.new_zeros(sequences, self.w_conv1d.kernel_size[0] - 1, weight.shape[0]))

    def forward(
        self, hidden_states: Tensor, *, cu_seqlens: Tensor | None = None, cache: LayerCache | None = None, attention_mask: None = None
    ) -> Tensor:
        """Attention over whole sequences or, with a filled ``cache``, of new tokens over everything so far.

        Args:
            hidden_states: [B, T, D].
            cu_seqlens: packed documents, as `pathattn.path_attention` takes them.
            cache: from `new_cache`; an empty one is filled by this call (document n becomes sequence n), a filled one is advanced by T tokens of
                each sequence. No gradient flows then.
            attention_mask: not supported; anything but None is refused.

        Returns:
            [B, T, D].

        Raises:
            ValueError, TypeError: from `pathattn.path_attention`, and for an attention mask; an error leaves ``cache`` as it was.
        """
        if attention_mask is not None:
            raise ValueError("attention_mask is not supported: pack sequences of different lengths with cu_seqlens instead")
        check_tensors(dict(hidden_states=hidden_states), dict(cu_seqlens=cu_seqlens))
        if hidden_states.dim() != 3 or hidden_states.shape[-1] != self.q_proj.in_features:
            raise ValueError(f"hidden_states must be [B, T, {self.q_proj.in_features}], got a tensor of sizes {list(hidden_states.shape)}")
        if cu_seqlens is not None and (cu_seqlens.dim() != 1 or len(cu_seqlens) == 0):
            raise ValueError(f"cu_seqlens must be [documents + 1], got a tensor of sizes {list(cu_seqlens.shape)}")
        if cu_seqlens is not None and cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
        if cache is None:
            o_BTD, _ = self._attend(hidden_states, cu_seqlens, None)
            return o_BTD
        with torch.no_grad():
            o_BTD, conv_inputs = self._attend(hidden_states, cu_seqlens, cache)
        cache.conv_inputs_NTC = conv_inputs
        return o_BTD

    def _attend(self, x_BTD: Tensor, cu_seqlens: Tensor | None, cache: LayerCache | None) -> tuple[Tensor, Tensor | None]:
        compute = torch.float64 if x_BTD.dtype == torch.float64 else torch.float32
        filled = cache is not None and bool(cache.attention.lengths.any())
        v_BTHK = self.v_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        q_BTQK = self.maybe_q_norm(self.q_proj(x_BTD).unflatten(-1, (-1, self.head_dim))).to(v_BTHK.dtype)
        k_BTHK = self.maybe_k_norm(self.k_proj(x_BTD).unflatten(-1, (-1, self.head_dim))).to(v_BTHK.dtype)

        w_BTC, conv_inputs = self.w_proj(x_BTD), None
        if self.use_w_shortconv:
            w_BTC, conv_inputs = self.w_conv1d(w_BTC, cu_seqlens, cache.conv_inputs_NTC if filled else None)
        w_BTHK = w_BTC.unflatten(-1, (-1, self.head_dim)).to(compute)
        w_BTHK = w_BTHK * (w_BTHK.square().sum(-1, keepdim=True) + UNIT_EPSILON).rsqrt()
        beta_BTH = 2 * self.bt_proj(x_BTD).to(compute).sigmoid()
        g_BTQ = F.logsigmoid(self.g_proj(x_BTD).to(compute)) if self.use_forget_gate else None

        inputs = (q_BTQK, k_BTHK, v_BTHK, w_BTHK, beta_BTH, g_BTQ)
        if cache is None:
            o_BTQK = path_attention(*inputs, cu_seqlens=cu_seqlens, gate_scaled=self.gate_scaled)
        elif not filled:
            o_BTQK = prefill(*inputs, state=cache.attention, cu_seqlens=cu_seqlens, gate_scaled=self.gate_scaled)
        elif cu_seqlens is not None:
            raise ValueError("cu_seqlens goes with an empty cache: a filled one is advanced by the same number of tokens in each sequence")
        else:
            o_BTQK = decode(*inputs, state=cache.attention, gate_scaled=self.gate_scaled)
        return self.o_proj(o_BTQK.flatten(-2)), conv_inputs


class CausalConv(nn.Conv1d):
    """Depthwise convolution over time, then SiLU: the last tap is the current token, and zeros come before a document's first."""

    def forward(self, x_BTC: Tensor, cu_seqlens: Tensor | None, previous_BTC: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the result [B, T, C] and the last inputs of each document [documents, taps - 1, C], which are `previous_BTC` of its next tokens."""
        num_tokens, num_previous = x_BTC.shape[1], self.kernel_size[0] - 1
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.to(x_BTC.device, non_blocking=True)
        if previous_BTC is None:
            previous_BTC = x_BTC.new_zeros(x_BTC.shape[0], num_previous, x_BTC.shape[2])
        padded_BTC = torch.cat([previous_BTC, x_BTC], dim=1)
        position_T = None if cu_seqlens is None else _positions(cu_seqlens, num_tokens)
        y_BTC = 0 if self.bias is None else self.bias
        for tap, weight_C in enumerate(self.weight[:, 0].unbind(-1)):
            input_BTC = padded_BTC[:, tap : tap + num_tokens]
            if position_T is not None:
                input_BTC = input_BTC.masked_fill((position_T < num_previous - tap)[:, None], 0)
            y_BTC = y_BTC + input_BTC * weight_C
        if cu_seqlens is None:
            return F.silu(y_BTC), padded_BTC[:, num_tokens:]
        ends_N = cu_seqlens[1:, None]
        rows_NT = ends_N + torch.arange(num_previous, device=x_BTC.device)
        before_NT = rows_NT - num_previous < cu_seqlens[:-1, None]
        rows_NT = rows_NT.clamp(0, padded_BTC.shape[1] - 1)  # bounds outside of the tokens are the operator's to refuse
        return F.silu(y_BTC), padded_BTC[0][rows_NT].masked_fill(before_NT[..., None], 0)


def _positions(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Of each token in its document, [T]."""
    token_T = torch.arange(num_tokens, device=cu_seqlens.device)
    document_T = torch.bucketize(token_T, cu_seqlens[1:], right=True)
    return token_T - cu_seqlens[document_T]
