"""stick_breaking_attention on a CUDA device against the CPU's in float64. Without a device every test is skipped, and counted."""

import functools

import pathattn
import pytest
import torch
from device_calls import FORMATS, on_device
from operator_calls import equal, ops
from oracle import gradients, random_inputs, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

NAMES = ("q", "k", "v")
attend = functools.partial(pathattn.stick_breaking_attention, return_rest=True)


def inputs_of(*sizes, dtype=torch.float32):
    return {name: x for name, x in random_inputs(*sizes, dtype=dtype).items() if name in NAMES}


def results_and_gradients(inputs, d_o, d_rest, **options):
    function = functools.partial(attend, **options)
    o, rest = function(**inputs)
    return {"o": o, "rest": rest} | {"d" + name: x for name, x in gradients(function, inputs, d_o, d_rest).items()}


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    "sizes, options",
    [
        ((2, 300, 4, 2, 64, 64), {}),
        ((1, 300, 4, 4, 128, 128), dict(scale=0.3)),
        ((1, 2300, 2, 1, 24, 40), {}),  # more tiles of queries than are gone over at a time
        ((1, 130, 2, 1, 200, 256), {}),
        ((1, 700, 4, 2, 64, 64), dict(cu_seqlens=torch.tensor([0, 15, 15, 333, 700]))),
        ((1, 1, 4, 2, 64, 64), {}),
        ((3, 63, 1, 1, 7, 1), {}),
    ],
)
def test_values_gradients_and_bits(sizes, options, dtype):
    inputs = inputs_of(*sizes, dtype=dtype)
    batch, tokens, query_heads, _, _, value_width = sizes
    d_o, d_rest = torch.randn(batch, tokens, query_heads, value_width).to(dtype), torch.randn(batch, tokens, query_heads)
    actual = results_and_gradients(on_device(inputs), d_o.cuda(), d_rest.cuda(), **options)
    expected = results_and_gradients({name: x.double() for name, x in inputs.items()}, d_o.double(), d_rest.double(), **options)
    for name, value in actual.items():
        assert value.is_cuda and value.isfinite().all(), name
        if expected[name].abs().max() == 0:  # a token that sees nothing
            assert value.abs().max() == 0, name
        else:
            assert relative_error(value.cpu(), expected[name]) < (2e-5 if dtype == torch.float32 or name == "rest" else 8e-3), name
    assert equal(actual.values(), results_and_gradients(on_device(inputs), d_o.cuda(), d_rest.cuda(), **options).values())


def test_K14_70000_documents():
    inputs = on_device(inputs_of(1, 70000, 2, 2, 8, 8))
    d_o, d_rest = torch.randn(1, 70000, 2, 8, device="cuda"), torch.randn(1, 70000, 2, device="cuda")
    actual = results_and_gradients(inputs, d_o, d_rest, cu_seqlens=torch.arange(70001, device="cuda"))
    assert (actual.pop("rest") == 1).all()
    assert all(x.abs().max() == 0 for x in actual.values())


def test_F07_any_strides():
    inputs = on_device(inputs_of(2, 70, 4, 2, 16, 16, dtype=torch.bfloat16))
    strided = dict(
        q=inputs["q"].transpose(1, 2).contiguous().transpose(1, 2),
        k=inputs["k"].repeat_interleave(2, dim=-1)[..., ::2],
        v=torch.cat([inputs["v"].new_zeros(1), inputs["v"].flatten()])[1:].view(inputs["v"].shape),
    )
    d_o, d_rest = torch.randn(2, 4, 70, 16, device="cuda").transpose(1, 2), torch.randn(2, 70, 4, device="cuda")
    assert equal(results_and_gradients(strided, d_o, d_rest).values(), results_and_gradients(inputs, d_o.contiguous(), d_rest).values())


def test_P24_memory_is_linear():
    def peak_above_inputs(tokens):
        inputs = {name: torch.randn(1, tokens, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for name in NAMES}
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(pathattn.stick_breaking_attention(**inputs).sum(), list(inputs.values()))
        return torch.cuda.max_memory_allocated() - before

    assert peak_above_inputs(8192) <= 2.1 * peak_above_inputs(4096)


@pytest.mark.parametrize("documents", [[0, 7], [5, 300, 2, 900], [0, -5, 300], []])
def test_malformed_documents_on_the_device_stay_inside_the_tensors(documents):
    inputs = on_device(inputs_of(1, 300, 2, 1, 16, 16))
    try:
        ops.stick_breaking_attention(**inputs, cu_seqlens=torch.tensor(documents, device="cuda", dtype=torch.int64))
    except ValueError:
        assert not documents
    torch.cuda.synchronize()


def test_O03_opcheck():
    inputs, options = on_device(inputs_of(1, 257, 4, 2, 16, 24)), dict(cu_seqlens=torch.tensor([0, 1, 1, 200, 257], device="cuda"))
    torch.library.opcheck(ops.stick_breaking_attention, tuple(x.clone().requires_grad_() for x in inputs.values()), options)
    d_o, d_rest = torch.randn(1, 257, 4, 24, device="cuda"), torch.randn(1, 257, 4, device="cuda")
    torch.library.opcheck(ops.stick_breaking_attention_backward, (*inputs.values(), d_o, d_rest), options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    inputs = on_device(inputs_of(1, 130, 4, 2, 64, 64))
    with torch.autocast("cuda", dtype):
        actual = attend(**inputs)
    assert actual[0].dtype == dtype and actual[1].dtype == torch.float32
    assert equal(actual, attend(**{name: x.to(dtype) for name, x in inputs.items()}))
