"""stick_breaking_attention from Python: values, derivatives, errors, and what PyTorch asks of a custom operator."""

import functools

import oracle
import pathattn
import pytest
import torch
from operator_calls import DOCUMENTS, equal, expect_equal_bits_for_any_threads, ops
from oracle import GOLDEN, gradients, random_inputs, relative_error

NAMES = ("q", "k", "v")
attend = functools.partial(pathattn.stick_breaking_attention, return_rest=True)


def inputs_of(*sizes, dtype=torch.float64):
    return {name: x for name, x in random_inputs(*sizes, dtype=dtype).items() if name in NAMES}


def in_float64(inputs):
    return {name: x.double() for name, x in inputs.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden(dtype):
    tensors, metadata = oracle.read_safetensors(GOLDEN / "op_stickbreaking.safetensors")
    inputs = {name: tensors[name].to(dtype) for name in NAMES}
    function = functools.partial(attend, scale=float(metadata["scale"]))
    o, rest = function(**inputs)
    results = {"o": o, "rem": rest} | {"d" + name: x for name, x in gradients(function, inputs, tensors["do"]).items()}
    for name, value in results.items():
        assert relative_error(value, tensors[name]) < (1e-5 if dtype == torch.float32 else 1e-12), name


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 1, 64, 64, 130])])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_against_the_definition(dtype, tolerance, cu_seqlens):
    inputs = inputs_of(1, 130, 4, 2, 24, 40, dtype=dtype)
    d_o, d_rest = torch.randn(1, 130, 4, 40).to(dtype), torch.randn(1, 130, 4)
    function, definition = (functools.partial(f, cu_seqlens=cu_seqlens) for f in (attend, oracle.stick_breaking_attention))
    for actual, expected in zip(function(**inputs), definition(**inputs)):
        assert relative_error(actual, expected) < tolerance
    expected = gradients(definition, in_float64(inputs), d_o, d_rest)
    for name, actual in gradients(function, inputs, d_o, d_rest).items():
        assert actual.dtype == dtype
        assert relative_error(actual, expected[name]) < tolerance, name


def test_results_do_not_depend_on_threads():
    inputs = inputs_of(2, 130, 4, 2, 16, 16, dtype=torch.float32)
    expect_equal_bits_for_any_threads(attend, inputs, torch.randn(2, 130, 4, 16))


def test_K10_empty_documents_change_nothing():
    inputs = inputs_of(1, 70, 2, 1, 16, 16)
    for offsets in (DOCUMENTS, DOCUMENTS.int()):
        assert equal(attend(**inputs, cu_seqlens=offsets), attend(**inputs, cu_seqlens=torch.tensor([0, 5, 70])))


@pytest.mark.parametrize("batch, tokens, cu_seqlens", [(0, 5, None), (2, 0, None), (1, 0, torch.tensor([0])), (1, 0, torch.tensor([0, 0, 0]))])
def test_nothing_to_do(batch, tokens, cu_seqlens):
    inputs = {name: x.requires_grad_() for name, x in inputs_of(batch, tokens, 4, 2, 16, 8).items()}
    o, rest = attend(**inputs, cu_seqlens=cu_seqlens)
    assert o.shape == (batch, tokens, 4, 8) and rest.shape == (batch, tokens, 4)
    (o.sum() + rest.sum()).backward()
    assert all(x.grad.shape == x.shape for x in inputs.values())


@pytest.mark.parametrize("heads, options", [((2, 1), {}), ((4, 2), dict(scale=0.7)), ((2, 2), dict(cu_seqlens=torch.tensor([0, 1, 1, 5, 7])))])
def test_gradcheck(heads, options):
    inputs = {name: x.requires_grad_() for name, x in inputs_of(1, 7, *heads, 3, 2).items()}
    assert torch.autograd.gradcheck(lambda *tensors: attend(*tensors, **options), tuple(inputs.values()))


def test_gradients_through_rest_alone():
    inputs = inputs_of(1, 20, 2, 1, 8, 8)
    wanted = gradients(attend, inputs, torch.zeros(1, 20, 2, 8), torch.ones(1, 20, 2))
    inputs["k"].requires_grad_()
    attend(**inputs)[1].sum().backward()
    assert torch.equal(inputs["k"].grad, wanted["k"]) and inputs["q"].grad is None


def test_double_backward_is_refused():
    inputs = {name: x.requires_grad_() for name, x in inputs_of(1, 7, 2, 1, 3, 2).items()}
    (dq,) = torch.autograd.grad(attend(**inputs)[0].sum(), inputs["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="stick_breaking_attention can be differentiated once"):
        dq.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_F07_any_strides(dtype):
    inputs = inputs_of(2, 70, 4, 2, 16, 16, dtype=dtype)
    strided = dict(
        q=inputs["q"].transpose(1, 2).contiguous().transpose(1, 2),
        k=inputs["k"].repeat_interleave(2, dim=-1)[..., ::2],
        v=torch.cat([inputs["v"].new_zeros(1), inputs["v"].flatten()])[1:].view(inputs["v"].shape),
    )
    d_o = torch.randn(2, 4, 70, 16).transpose(1, 2)
    assert equal(attend(**strided), attend(**inputs))
    assert equal(gradients(attend, strided, d_o).values(), gradients(attend, inputs, d_o.contiguous()).values())


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        (dict(q=torch.zeros(6, 4, 16)), ValueError, r"q must be \[B, T, HQ, K\], got a tensor of sizes \[6, 4, 16\]"),
        (dict(k=torch.zeros(2, 7, 2, 16)), ValueError, r"k must be .*got \[2, 7, 2, 16\]"),
        (dict(v=torch.zeros(2, 6, 2, 8).bfloat16()), TypeError, "v must be Float, got BFloat16"),
        (dict(q=torch.zeros(2, 6, 3, 16)), ValueError, "q's heads must be a multiple of k's, got 3 and 2"),
        (dict(scale=float("inf")), ValueError, "scale must be finite, got inf"),
        (dict(cu_seqlens=torch.tensor([0, 6])), ValueError, "batch size 1, got 2"),
    ],
)
def test_errors_name_the_argument(wrong, error, message):
    with pytest.raises(error, match=message):
        attend(**inputs_of(2, 6, 4, 2, 16, 8, dtype=torch.float32) | wrong)


@pytest.mark.parametrize(
    "offsets, message", [([1, 6], "must start with 0, got 1"), ([0, 4, 3, 6], "must not decrease, got 3"), ([0, 5], "number of tokens")]
)
def test_K10_malformed_offsets(offsets, message):
    with pytest.raises(ValueError, match=message):
        attend(**inputs_of(1, 6, 2, 1, 16, 16), cu_seqlens=torch.tensor(offsets))


def test_gradients_of_another_shape_are_refused():
    inputs = inputs_of(1, 6, 2, 1, 16, 8)
    with pytest.raises(ValueError, match=r"d_o must be .*got \[1, 6, 2, 7\]"):
        ops.stick_breaking_attention_backward(*inputs.values(), torch.zeros(1, 6, 2, 7).double(), None)
    with pytest.raises(TypeError, match="d_rest must be Double, got Float"):
        ops.stick_breaking_attention_backward(*inputs.values(), torch.zeros(1, 6, 2, 8).double(), torch.zeros(1, 6, 2))


@pytest.mark.parametrize("tokens, cu_seqlens", [(196, None), (257, torch.tensor([0, 1, 1, 200, 257]))])
def test_O03_opcheck(tokens, cu_seqlens):
    inputs, options = inputs_of(1, tokens, 4, 2, 16, 24, dtype=torch.float32), dict(cu_seqlens=cu_seqlens)
    inputs["q"] = inputs["q"].transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(ops.stick_breaking_attention, tuple(x.clone().requires_grad_() for x in inputs.values()), options)
    d_o = torch.randn(1, 4, tokens, 24).transpose(1, 2)
    for d_rest in (None, torch.randn(1, tokens, 4)):
        torch.library.opcheck(ops.stick_breaking_attention_backward, (*inputs.values(), d_o, d_rest), options)


def test_O02_compiles_whole_and_once_for_every_length():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *tensors: attend(*tensors), fullgraph=True, dynamic=True, backend=counter)
    for tokens in (100, 196, 257):
        inputs, d_o = inputs_of(2, tokens, 4, 2, 16, 24, dtype=torch.float32), torch.randn(2, tokens, 4, 24)
        assert equal(compiled(*inputs.values()), attend(**inputs))
        actual = gradients(lambda **leaves: compiled(*leaves.values()), inputs, d_o)
        assert equal(actual.values(), gradients(attend, inputs, d_o).values())
    assert counter.frame_count <= 2  # with and without gradients


def test_autocast():
    inputs, d_o = inputs_of(1, 70, 2, 1, 16, 16, dtype=torch.float32), torch.randn(1, 70, 2, 16)
    narrow = {name: x.bfloat16() for name, x in inputs.items()}
    with torch.autocast("cpu", torch.bfloat16):
        results, actual = attend(**inputs), gradients(attend, inputs, d_o)
    assert results[0].dtype == torch.bfloat16 and results[1].dtype == torch.float32
    assert equal(results, attend(**narrow))
    assert equal(actual.values(), [x.float() for x in gradients(attend, narrow, d_o).values()])
