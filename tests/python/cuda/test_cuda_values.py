"""path_attention on a CUDA device: values against the CPU's in float64, sizes, memory, bits. Without a device every test is skipped, and counted."""

import pathattn
import pytest
import torch
from device_calls import FORMATS, bounds, device_inputs, expect_close, in_float64_on_cpu, on_device, results_and_gradients
from operator_calls import attend, equal
from oracle import NAMES, gradients, random_inputs, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

GIB = 1 << 30

# Values


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    "sizes, names, options",
    [
        ((2, 300, 4, 2, 64, 64), NAMES, {}),
        ((1, 300, 4, 4, 128, 128), NAMES[:5], {}),
        ((2, 130, 6, 2, 24, 40), NAMES, dict(scale=0.3, gate_scaled=True)),
        ((1, 130, 2, 1, 200, 256), NAMES, dict(gate_scaled=False, scale=0.1)),
        ((2, 200, 4, 1, 64, 96), ("q", "k", "v"), {}),
        ((2, 200, 4, 2, 32, 64), ("q", "k", "v", "g"), {}),
        ((1, 700, 4, 2, 64, 64), NAMES, dict(cu_seqlens=torch.tensor([0, 15, 15, 333, 700]))),
        ((1, 700, 4, 2, 64, 64), ("q", "k", "v"), dict(cu_seqlens=torch.tensor([0, 1, 65, 700], dtype=torch.int32))),
        ((1, 1, 4, 2, 64, 64), NAMES, {}),
        ((3, 63, 1, 1, 7, 1), NAMES, {}),
    ],
)
def test_values_and_gradients(sizes, names, options, dtype):
    inputs = {name: x for name, x in random_inputs(*sizes, dtype=dtype).items() if name in names}
    batch, tokens, query_heads, _, _, value_width = sizes
    d_o, d_lse = torch.randn(batch, tokens, query_heads, value_width).to(dtype), torch.randn(batch, tokens, query_heads)
    actual = results_and_gradients(on_device(inputs), d_o.cuda(), d_lse.cuda(), **options)
    expected = in_float64_on_cpu(inputs, d_o, d_lse, **options)
    if tokens == 1:  # no factor and no gate acts: these gradients are zero
        for name in ("dw", "dbeta", "dg"):
            assert actual.pop(name).abs().max() <= 1e-4, name
    for name, x in inputs.items():
        assert "d" + name not in actual or actual["d" + name].dtype == x.dtype
    expect_close(actual, expected, bounds(dtype))


@pytest.mark.parametrize("seed", range(20))
def test_P08_strong_factors(seed):
    inputs = device_inputs(1, 4000, 4, 4, 128, 128, torch.bfloat16, strong=True, seed=seed)
    d_o = torch.randn_like(inputs["v"])
    actual = results_and_gradients(inputs, d_o)
    assert all(x.isfinite().all() for x in actual.values())
    if seed < 2:  # the CPU takes seconds for each
        expect_close(actual, in_float64_on_cpu(inputs, d_o), bounds(torch.bfloat16))


@pytest.mark.parametrize("dtype, exponents, names", [(torch.bfloat16, (-20, 40), NAMES), (torch.float16, (-10,), ("w", "beta", "g"))])
def test_P09_any_size_of_gradient(dtype, exponents, names):
    inputs, d_o = random_inputs(1, 300, 2, 1, 64, 64, dtype=dtype), torch.randn(1, 300, 2, 64).to(dtype)

    def errors(exponent):
        scaled = d_o * 2.0**exponent  # in float16 some become subnormal: both sides see what that left
        actual, expected = gradients(attend, on_device(inputs), scaled.cuda()), in_float64_on_cpu(inputs, scaled)
        return {name: relative_error(actual[name].cpu(), expected["d" + name]) for name in names}

    plain = errors(0)
    for exponent in exponents:
        assert all(error <= 1.1 * plain[name] for name, error in errors(exponent).items()), exponent


def test_K07_gates_keep_their_accuracy_in_long_sequences():
    for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 8e-3)):
        inputs = device_inputs(1, 131072, 1, 1, 64, 64, dtype)
        inputs["g"] = -0.5 - torch.rand_like(inputs["g"])
        whole = pathattn.path_attention(**inputs)
        end = pathattn.path_attention(**{name: x[:, -1024:] for name, x in inputs.items()})
        assert (whole[:, -64:].double() - end[:, -64:].double()).abs().max() <= bound


# Sizes


def expect_single_token_results(actual, inputs, d_o):
    """A token that sees itself alone: o = v, dv = the sum of its group's d_o, everything else is zero."""
    group = d_o.shape[2] // inputs["v"].shape[2]
    assert torch.equal(actual["o"], inputs["v"].repeat_interleave(group, dim=2))
    torch.testing.assert_close(actual["dv"], d_o.unflatten(2, (-1, group)).float().sum(3).to(d_o.dtype), atol=1e-5, rtol=1e-5)
    for name in ("dq", "dk", "dw", "dbeta", "dg"):
        assert actual[name].abs().max() <= 1e-4, name


@pytest.mark.parametrize("batch, query_heads, key_heads, key_width", [(2100, 32, 8, 64), (8300, 16, 16, 128)])
def test_K14_F05_more_rows_of_heads_than_a_grid_has(batch, query_heads, key_heads, key_width):
    inputs = device_inputs(batch, 1, query_heads, key_heads, key_width, key_width)
    d_o = torch.randn(batch, 1, query_heads, key_width, device="cuda")
    expect_single_token_results(results_and_gradients(inputs, d_o), inputs, d_o)


def test_K14_70000_documents():
    inputs, d_o = device_inputs(1, 70000, 4, 4, 64, 64), torch.randn(1, 70000, 4, 64, device="cuda")
    options = dict(cu_seqlens=torch.arange(70001, device="cuda"))
    expect_single_token_results(results_and_gradients(inputs, d_o, **options), inputs, d_o)


def test_F05_many_batch_rows():
    inputs, d_o = device_inputs(15000, 64, 1, 1, 128, 128, torch.bfloat16), torch.randn(15000, 64, 1, 128, device="cuda", dtype=torch.bfloat16)
    whole = results_and_gradients(inputs, d_o)
    for first in range(0, 15000, 3750):
        rows = slice(first, first + 3750)
        part = results_and_gradients({name: x[rows] for name, x in inputs.items()}, d_o[rows])
        assert equal(part.values(), [x[rows] for x in whole.values()])


def test_P04_offsets_past_2_to_the_31():
    """q, k, v, w, o and all their gradients have more than 2^31 elements; short documents keep it quick."""
    if torch.cuda.mem_get_info()[0] < 80 * GIB:
        pytest.skip("needs 80 GiB of device memory")
    tokens, length = 524352, 1024
    inputs = device_inputs(1, tokens, 32, 32, 128, 128, torch.bfloat16)
    d_o = torch.randn(1, tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([*range(0, tokens, length), tokens], device="cuda")
    assert inputs["q"].numel() > 1 << 31
    whole = results_and_gradients(inputs, d_o, cu_seqlens=cu_seqlens)
    for first, last in ((0, length), (cu_seqlens[-2].item(), tokens)):
        alone = results_and_gradients({name: x[:, first:last] for name, x in inputs.items()}, d_o[:, first:last])
        for name, value in alone.items():
            assert relative_error(whole[name][:, first:last], value) < bounds(torch.bfloat16)[name], name


def test_F07_strides_past_2_to_the_31():
    inputs = device_inputs(1, 70, 2, 2, 64, 64)
    step = (1 << 31) // 69 // 64 * 64 + 64
    far = torch.empty(69 * step + 128, device="cuda").as_strided((1, 70, 2, 64), (0, step, 64, 1))
    far.copy_(inputs["k"])
    d_o = torch.randn(1, 70, 2, 64, device="cuda")
    assert equal(results_and_gradients(inputs | {"k": far}, d_o).values(), results_and_gradients(inputs, d_o).values())


def test_P24_memory_is_linear():
    def peak_above_inputs(tokens):
        inputs = {name: x.requires_grad_() for name, x in device_inputs(1, tokens, 32, 32, 128, 128, torch.bfloat16, gate=False).items()}
        d_o = torch.randn(1, tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(pathattn.path_attention(**inputs), list(inputs.values()), d_o)
        return torch.cuda.max_memory_allocated() - before

    half, whole = peak_above_inputs(16384), peak_above_inputs(32768)
    assert whole <= 2.1 * half and whole <= 4 * GIB, f"{half / GIB:.2f} and {whole / GIB:.2f} GiB"


@pytest.mark.parametrize("batch, tokens, cu_seqlens", [(0, 5, None), (2, 0, None), (1, 0, torch.tensor([0])), (1, 0, torch.tensor([0, 0, 0]))])
def test_nothing_to_do(batch, tokens, cu_seqlens):
    inputs = {name: x.cuda().requires_grad_() for name, x in random_inputs(batch, tokens, 4, 2, 16, 8, dtype=torch.float32).items()}
    o, lse = attend(**inputs, cu_seqlens=None if cu_seqlens is None else cu_seqlens.cuda())
    assert o.shape == (batch, tokens, 4, 8) and lse.shape == (batch, tokens, 4)
    (o.sum() + lse.sum()).backward()
    assert all(x.grad.shape == x.shape for x in inputs.values())


# Bits


def test_F09_the_same_bits_every_time():
    inputs = device_inputs(2, 2000, 8, 2, 128, 128, torch.bfloat16)
    d_o = torch.randn(2, 2000, 8, 128, device="cuda", dtype=torch.bfloat16)
    first = results_and_gradients(inputs, d_o)
    for _ in range(29):
        assert equal(results_and_gradients(inputs, d_o).values(), first.values())


def test_K17_a_row_has_the_same_bits_in_any_batch():
    inputs = device_inputs(1, 300, 4, 2, 64, 64, torch.bfloat16)
    alone = attend(**inputs)
    for copies in (4, 8):
        for result, value in zip(attend(**{name: x.expand(copies, *x.shape[1:]) for name, x in inputs.items()}), alone):
            assert torch.equal(result, value.expand(copies, *value.shape[1:]))


@pytest.mark.parametrize(
    "change",
    [
        dict(q=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
        dict(k=lambda x: x[:, :, :1].expand(x.shape), beta=lambda x: x[:, :1].expand(x.shape)),
        dict.fromkeys(NAMES, lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)),
        dict(q=lambda x: x.repeat_interleave(2, dim=-1)[..., ::2], v=lambda x: x[..., :1].expand(x.shape)),
        dict(g=lambda x: torch.cat([x, x, x], dim=-1)[..., : x.shape[-1]]),
    ],
    ids=["q from a transpose", "k and beta expanded", "one element off", "inner strides 2 and 0", "g from a wider tensor"],
)
def test_F07_K20_any_strides(change):
    inputs = on_device(random_inputs(2, 70, 4, 2, 16, 16, dtype=torch.bfloat16))
    strided = inputs | {name: make(inputs[name]) for name, make in change.items()}
    contiguous = {name: x.clone(memory_format=torch.contiguous_format) for name, x in strided.items()}
    d_o = torch.randn(2, 4, 70, 16, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    assert equal(results_and_gradients(strided, d_o).values(), results_and_gradients(contiguous, d_o.contiguous()).values())
