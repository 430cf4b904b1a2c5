"""PaTHAttention: the golden layer, packed documents, decoding, and what it refuses."""

import oracle
import pathattn
import pytest
import torch
import torch.nn.functional as F
from oracle import GOLDEN, relative_error


def random_layer(seed=0, **options):
    torch.manual_seed(seed)
    layer = pathattn.PaTHAttention(32, 4, 2, **options).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer


ALL_OPTIONS = dict(use_forget_gate=True, use_qk_norm=True, conv_size=4, conv_bias=True)
EVERY_KIND = pytest.mark.parametrize(
    "options", [{}, ALL_OPTIONS, dict(use_low_rank_w=False, use_w_shortconv=False), dict(conv_size=1, gate_scaled=True, use_forget_gate=True)]
)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-7), (torch.float32, 1e-4)])
def test_golden_layer(dtype, tolerance):
    tensors, _ = oracle.read_safetensors(GOLDEN / "layer_path_all_options.safetensors")
    layer = pathattn.PaTHAttention(32, 2, 1, **ALL_OPTIONS, gate_scaled=True).to(dtype)
    layer.load_state_dict({n.removeprefix("weight."): x.to(dtype) for n, x in tensors.items() if n.startswith("weight.")})
    x = tensors["x"].to(dtype).requires_grad_()
    y = layer(x)
    (y * tensors["dy"].to(dtype)).sum().backward()
    assert relative_error(y, tensors["y"]) < min(tolerance, 1e-12 if dtype == torch.float64 else 1)
    assert relative_error(x.grad, tensors["dx"]) < tolerance
    for name, parameter in layer.named_parameters():
        assert relative_error(parameter.grad, tensors[f"dweight.{name}"]) < tolerance, name


def test_the_gate_convention_matters():
    """P22: a layer obeys its option in every path; the other convention is far off."""
    x = torch.randn(1, 40, 32, dtype=torch.float64)
    layers = [random_layer(use_forget_gate=True, gate_scaled=scaled) for scaled in (False, True)]
    outputs = [layer(x) for layer in layers]
    assert relative_error(*outputs) > 0.05
    for layer, y in zip(layers, outputs):
        cache = layer.new_cache(1, 40)
        steps = torch.cat([layer(x[:, :39], cache=cache), layer(x[:, 39:], cache=cache)], dim=1)
        assert relative_error(steps, y) < 1e-12


@EVERY_KIND
def test_P16_documents_are_kept_apart(options):
    layer, x = random_layer(**options), torch.randn(1, 70, 32, dtype=torch.float64)
    bounds = [0, 0, 1, 3, 3, 64, 70]
    packed = layer(x, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    alone = torch.cat([layer(x[:, a:b]) for a, b in zip(bounds, bounds[1:]) if a < b], dim=1)
    assert relative_error(packed, alone) < 1e-12


def test_P16_an_attention_mask_is_refused():
    with pytest.raises(ValueError, match="attention_mask is not supported: pack"):
        random_layer()(torch.randn(1, 6, 32, dtype=torch.float64), cu_seqlens=torch.tensor([0, 3, 6]), attention_mask=torch.ones(1, 6))


@EVERY_KIND
@pytest.mark.parametrize(
    "cu_seqlens, error",
    [
        (torch.tensor([0, 80]), ValueError),
        (torch.tensor([0, 2**40]), ValueError),
        (torch.tensor([0, -80, 70]), ValueError),
        (torch.tensor([0, 50, 20, 70]), ValueError),
        (torch.tensor([3, 70]), ValueError),
        (torch.tensor([], dtype=torch.int64), ValueError),
        (torch.tensor(70), ValueError),
        (torch.tensor([[0, 70]]), ValueError),
        (torch.tensor([0.0, 70.0]), TypeError),
    ],
)
def test_K10_malformed_offsets(options, cu_seqlens, error):
    with pytest.raises(error, match="cu_seqlens"):
        random_layer(**options)(torch.randn(1, 70, 32, dtype=torch.float64), cu_seqlens=cu_seqlens)


@EVERY_KIND
@pytest.mark.parametrize("prompt", [1, 2, 3, 63])
def test_P21_G10_prefill_and_decoding_continue_the_forward(options, prompt):
    layer, x = random_layer(**options), torch.randn(2, 70, 32, dtype=torch.float64)
    cache = layer.new_cache(2, 70)
    parts = [layer(x[:, a:b], cache=cache) for a, b in ((0, prompt), (prompt, prompt + 1), (prompt + 1, 68), (68, 69), (69, 70))]
    assert relative_error(torch.cat(parts, dim=1), layer(x)) < 1e-12
    assert cache.attention.lengths.tolist() == [70, 70]


def test_packed_prompts_are_decoded_together():
    layer, x = random_layer(**ALL_OPTIONS), torch.randn(1, 30, 32, dtype=torch.float64)
    new = torch.randn(4, 3, 32, dtype=torch.float64)
    bounds = [0, 1, 1, 4, 30]
    cache = layer.new_cache(4, 40)
    layer(x, cu_seqlens=torch.tensor(bounds), cache=cache)
    continued = layer(new, cache=cache)
    for n, (a, b) in enumerate(zip(bounds, bounds[1:])):
        whole = layer(torch.cat([x[:, a:b], new[n : n + 1]], dim=1))
        assert relative_error(continued[n : n + 1], whole[:, b - a :]) < 1e-12


def test_a_refused_step_leaves_the_cache():
    layer, x = random_layer(), torch.randn(2, 9, 32, dtype=torch.float64)
    cache = layer.new_cache(2, 9)
    layer(x[:, :8], cache=cache)
    with pytest.raises(ValueError, match="cu_seqlens goes with an empty cache"):
        layer(x[:, 8:], cu_seqlens=torch.tensor([0, 1]), cache=cache)
    with pytest.raises(RuntimeError):
        layer(x[:1, 8:], cache=cache)  # one sequence of two
    assert relative_error(layer(x[:, 8:], cache=cache), layer(x)[:, 8:]) < 1e-12


def test_P28_a_zero_w_is_the_identity_and_has_no_gradient():
    layer, x = random_layer(use_low_rank_w=False, use_w_shortconv=False), torch.randn(1, 50, 32, dtype=torch.float64)
    torch.nn.init.zeros_(layer.w_proj.weight)
    layer(x).sum().backward()
    assert layer.w_proj.weight.grad.abs().max() <= 1e-5 * layer.k_proj.weight.grad.abs().max()
    q, k, v = (projection(x).unflatten(-1, (-1, 8)).transpose(1, 2) for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert relative_error(layer(x), layer.o_proj(plain.transpose(1, 2).flatten(-2))) < 1e-12


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_bfloat16_follows_float64():
    layer = random_layer(**ALL_OPTIONS).bfloat16()
    x = torch.randn(1, 100, 32).bfloat16()
    y = layer(x)
    assert y.dtype == torch.bfloat16
    layer.maybe_q_norm.float(), layer.maybe_k_norm.float()  # norms kept in float32 are fine beside bfloat16 projections
    assert torch.equal(layer(x), y)
    assert relative_error(y, layer.double()(x.double())) < 3e-2


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@EVERY_KIND
def test_decoding_under_autocast(options, dtype):
    layer, x = random_layer(**options).to(dtype), torch.randn(2, 20, 32).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        whole = layer(x)
        cache = layer.new_cache(2, 20)
        parts = torch.cat([layer(x[:, a:b], cache=cache) for a, b in ((0, 17), (17, 18), (18, 20))], dim=1)
    assert cache.attention._tensors[0].dtype == dtype
    assert parts.dtype == whole.dtype and relative_error(parts, whole) < 3e-2


def test_compiles_and_trains():
    layer, x = random_layer(**ALL_OPTIONS), torch.randn(1, 40, 32, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 13, 40])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y = compiled(x, cu_seqlens=cu_seqlens)
    y.square().sum().backward()
    actual = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(x, cu_seqlens=cu_seqlens).square().sum().backward()
    assert all(relative_error(a, p.grad) < 1e-10 for a, p in zip(actual, layer.parameters()))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(hidden_size=30, num_heads=4), "hidden_size must be a positive multiple of num_heads, got 30 and 4"),
        (dict(hidden_size=0, num_heads=4), "hidden_size must be a positive multiple of num_heads, got 0 and 4"),
        (dict(hidden_size=-32, num_heads=4), "hidden_size must be a positive multiple of num_heads, got -32 and 4"),
        (dict(hidden_size=32, num_heads=0), "hidden_size must be a positive multiple of num_heads, got 32 and 0"),
        (dict(hidden_size=1024, num_heads=1), "the heads' width, must be at most 256, got 1024"),
        (dict(hidden_size=32, num_heads=4, num_kv_heads=3), "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        (dict(hidden_size=32, num_heads=4, conv_size=0), "conv_size must be at least 1, got 0"),
    ],
)
def test_wrong_options(arguments, message):
    with pytest.raises(ValueError, match=message):
        pathattn.PaTHAttention(**arguments)


@pytest.mark.parametrize("sizes", [(6, 32), (1, 6, 31), (1, 1, 6, 32)])
def test_inputs_of_another_shape_are_refused(sizes):
    with pytest.raises(ValueError, match=rf"hidden_states must be \[B, T, 32\], got a tensor of sizes \[{', '.join(map(str, sizes))}\]"):
        random_layer()(torch.randn(*sizes, dtype=torch.float64))


def test_offsets_that_are_no_tensor_are_refused():
    with pytest.raises(TypeError, match="cu_seqlens must be a tensor, got list"):
        random_layer()(torch.randn(1, 6, 32, dtype=torch.float64), cu_seqlens=[0, 6])
