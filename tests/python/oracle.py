"""What the Python tests compare with: the definition in torch's float64, differentiated by torch, and the golden files."""

import json
import struct
from pathlib import Path

import torch
import torch.nn.functional as F

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}
NAMES = ("q", "k", "v", "w", "beta", "g")


def read_safetensors(path):
    """(tensors by name, metadata)."""
    data = path.read_bytes()
    (header_size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_size])
    metadata = header.pop("__metadata__", {})
    body = bytearray(data[8 + header_size :])
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = torch.frombuffer(body[begin:end], dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors, metadata


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def random_inputs(batch, tokens, query_heads, key_heads, key_width, value_width, dtype=torch.float64, gate=True, seed=0):
    """q, k, v, w, beta, g as a dict, none of which requires a gradient; w of unit length, beta in [0, 2)."""
    random = torch.Generator().manual_seed(seed)
    compute = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*sizes):
        return torch.randn(*sizes, generator=random, dtype=torch.float64)

    inputs = {
        "q": normal(batch, tokens, query_heads, key_width).to(dtype),
        "k": normal(batch, tokens, key_heads, key_width).to(dtype),
        "v": normal(batch, tokens, key_heads, value_width).to(dtype),
        "w": F.normalize(normal(batch, tokens, key_heads, key_width), dim=-1).to(compute),
        "beta": (2 * torch.rand(batch, tokens, key_heads, generator=random, dtype=torch.float64)).to(compute),
    }
    if gate:
        inputs["g"] = F.logsigmoid(normal(batch, tokens, query_heads) + 4).to(compute)
    return inputs


def path_attention(q, k, v, w=None, beta=None, g=None, *, scale=None, cu_seqlens=None, gate_scaled=False):
    """(o, lse) in float64: every older key is rewritten by each new factor, then the new key is appended."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        parts = [
            path_attention(*(x if x is None else x[:, a:b] for x in (q, k, v, w, beta, g)), scale=scale, gate_scaled=gate_scaled)
            for a, b in zip(bounds, bounds[1:])
            if a < b
        ]
        return tuple(torch.cat(part, dim=1) for part in zip(*parts))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    q, g = (x if x is None else x.double() for x in (q, g))
    k, v, w, beta = (x if x is None else x.double().repeat_interleave(group, dim=2) for x in (k, v, w, beta))
    keys, gates, o, lse = k[:, :0], q.new_zeros(q.shape[0], 0, q.shape[2]), [], []
    for t in range(q.shape[1]):
        if w is not None:
            w_t = w[:, t : t + 1]
            keys = keys - (beta[:, t : t + 1] * (keys * w_t).sum(-1)).unsqueeze(-1) * w_t
        keys = torch.cat([keys, k[:, t : t + 1]], dim=1)
        gates = torch.cat([gates if g is None else gates + g[:, t : t + 1], gates.new_zeros(q.shape[0], 1, q.shape[2])], dim=1)
        scores = scale * (keys * q[:, t : t + 1]).sum(-1) + (scale if gate_scaled else 1) * gates
        o.append((scores.softmax(dim=1).unsqueeze(-1) * v[:, : t + 1]).sum(1))
        lse.append(scores.logsumexp(dim=1))
    return torch.stack(o, dim=1), torch.stack(lse, dim=1)


def stick_breaking_attention(q, k, v, *, scale=None, cu_seqlens=None):
    """(o, rest) in float64: every weight as a share of what the newer keys left."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        parts = [stick_breaking_attention(*(x[:, a:b] for x in (q, k, v)), scale=scale) for a, b in zip(bounds, bounds[1:]) if a < b]
        return tuple(torch.cat(part, dim=1) for part in zip(*parts))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, (k, v) = q.double(), (x.double().repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    o, rests = [], []
    for t in range(q.shape[1]):
        share = torch.sigmoid(scale * (k[:, :t] * q[:, t : t + 1]).sum(-1))
        left = (1 - share).flip(1).cumprod(1).flip(1)  # by a key and the newer ones
        ones = share.new_ones(q.shape[0], 1, q.shape[2])
        weights = share * torch.cat([left, ones], dim=1)[:, 1:]
        o.append((weights.unsqueeze(-1) * v[:, :t]).sum(1))
        rests.append(torch.cat([left, ones], dim=1)[:, 0])
    return torch.stack(o, dim=1), torch.stack(rests, dim=1)


def gradients(function, inputs, d_o, d_lse=None):
    """Gradients of sum(o * d_o) (+ sum(lse * d_lse)) by name; `function` returns (o, lse)."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    o, lse = function(**leaves)
    results, weights = ([o], [d_o.to(o.dtype)]) if d_lse is None else ([o, lse], [d_o.to(o.dtype), d_lse.to(lse.dtype)])
    return dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), weights)))
