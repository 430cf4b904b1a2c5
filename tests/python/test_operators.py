"""path_attention from Python: values, derivatives, strides and errors."""

import functools
import os
import subprocess
import sys

import numpy
import oracle
import pathattn
import pytest
import torch
from operator_calls import DOCUMENTS, attend, equal, expect_equal_bits_for_any_threads, new_state, ops, rows
from oracle import GOLDEN, NAMES, gradients, random_inputs, relative_error

# Values


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("op_path_*.safetensors")) + ["op_fox"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden(name, dtype):
    tensors, metadata = oracle.read_safetensors(GOLDEN / f"{name}.safetensors")
    inputs = {n: tensors[n].to(dtype) for n in NAMES if n in tensors}
    options = dict(scale=float(metadata["scale"]), cu_seqlens=tensors.get("cu_seqlens"), gate_scaled=metadata["gate_convention"] == "scaled")
    o, lse = attend(**inputs, **options)
    results = {"o": o, "lse": lse} | {"d" + n: x for n, x in gradients(functools.partial(attend, **options), inputs, tensors["do"]).items()}
    for result, value in results.items():
        tolerance = 1e-4 if dtype == torch.float32 else 1e-12 if tensors[result].dtype == torch.float64 else 1e-7
        assert relative_error(value, tensors[result]) < tolerance, result


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 1, 64, 64, 130])])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_against_the_definition(dtype, tolerance, cu_seqlens):
    inputs = random_inputs(1, 130, 4, 2, 24, 40, dtype=dtype)
    d_o, d_lse = torch.randn(1, 130, 4, 40), torch.randn(1, 130, 4)
    for actual, expected in zip(attend(**inputs, cu_seqlens=cu_seqlens), oracle.path_attention(**inputs, cu_seqlens=cu_seqlens)):
        assert relative_error(actual, expected) < tolerance
    d_o = d_o.to(dtype)
    actual = gradients(functools.partial(attend, cu_seqlens=cu_seqlens), inputs, d_o, d_lse)
    expected = gradients(functools.partial(oracle.path_attention, cu_seqlens=cu_seqlens), inputs, d_o, d_lse)
    for name in NAMES:
        assert actual[name].dtype == inputs[name].dtype
        assert relative_error(actual[name], expected[name]) < tolerance, name


def test_P22_the_gate_is_added_after_the_scale():
    q, k, v = torch.zeros(1, 3, 1, 64), torch.randn(1, 3, 1, 64), torch.eye(3).view(1, 3, 1, 3)
    inputs = dict(q=q, k=k, v=v, w=torch.zeros_like(k), beta=torch.ones(1, 3, 1), g=torch.full((1, 3, 1), -0.5))
    expected = torch.tensor([0.1863237, 0.3071959, 0.5064804])
    training = pathattn.path_attention(**{n: x.clone().requires_grad_() for n, x in inputs.items()})
    state = new_state(inputs, 3)
    pathattn.prefill(**rows(inputs, 0, 2), state=state)
    for row in (pathattn.path_attention(**inputs)[0, 2, 0], training[0, 2, 0], pathattn.decode(**rows(inputs, 2, 3), state=state)[0, 0, 0]):
        torch.testing.assert_close(row.detach(), expected, atol=1e-6, rtol=0)
    scaled = pathattn.path_attention(**inputs, gate_scaled=True)[0, 2, 0]
    torch.testing.assert_close(scaled, torch.tensor([0.3127, 0.3329, 0.3544]), atol=1e-4, rtol=0)


def test_gate_conventions_convert_into_each_other():
    inputs = random_inputs(1, 70, 2, 1, 16, 16)
    scaled = inputs | {"g": inputs["g"] / 0.3}
    torch.testing.assert_close(attend(**inputs, scale=0.3), attend(**scaled, scale=0.3, gate_scaled=True), atol=1e-13, rtol=1e-12)


def test_K10_empty_documents_change_nothing():
    inputs = random_inputs(1, 70, 2, 1, 16, 16)
    d_o = torch.randn(1, 70, 2, 16, dtype=torch.float64)
    plain = torch.tensor([0, 5, 70])
    results = attend(**inputs, cu_seqlens=DOCUMENTS)
    assert equal(results, attend(**inputs, cu_seqlens=plain))
    assert equal(results, attend(**inputs, cu_seqlens=DOCUMENTS.int()))
    actual = gradients(functools.partial(attend, cu_seqlens=DOCUMENTS), inputs, d_o)
    assert equal(actual.values(), gradients(functools.partial(attend, cu_seqlens=plain), inputs, d_o).values())
    for name in ("w", "beta", "g"):
        assert actual[name][:, [0, 5]].abs().max() <= 1e-6 * actual[name].abs().max(), name


@pytest.mark.parametrize("batch, tokens, cu_seqlens", [(0, 5, None), (2, 0, None), (1, 0, torch.tensor([0])), (1, 0, torch.tensor([0, 0, 0]))])
def test_nothing_to_do(batch, tokens, cu_seqlens):
    inputs = {name: x.requires_grad_() for name, x in random_inputs(batch, tokens, 4, 2, 16, 8).items()}
    o, lse = attend(**inputs, cu_seqlens=cu_seqlens)
    assert o.shape == (batch, tokens, 4, 8) and lse.shape == (batch, tokens, 4)
    (o.sum() + lse.sum()).backward()
    assert all(x.grad.shape == x.shape for x in inputs.values())


@pytest.mark.parametrize("tokens, width, norm", [(64, 64, 1.05), (512, 64, 1.05), (8, 128, None), (64, 128, None)])
def test_P27_growing_factors_are_refused(tokens, width, norm):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, tokens, 1, width) for _ in range(3))
    w = torch.randn(1, tokens, 1, width)
    if norm:
        w = torch.nn.functional.normalize(w[:, :1], dim=-1).expand_as(w) * norm  # the same w at every token
    beta = torch.full((1, tokens, 1), 2.0)
    with pytest.raises(ValueError, match=r"beta \* \|w\|\^2 must stay within 0 \.\.\. 2"):
        pathattn.path_attention(q, k, v, w, beta)
    with pytest.raises(ValueError, match="normalise w"):
        pathattn.path_attention(q, k, v, w, -beta)
    state = pathattn.DecodingState(1, tokens, 1, 1, width, width)
    for step in (pathattn.prefill, pathattn.decode):
        with pytest.raises(ValueError, match="normalise w"):
            step(q, k, v, w, beta, state=state)
    assert state.lengths.tolist() == [0]


def unit_inputs(tokens, width=16):
    torch.manual_seed(0)
    q, k, v, w = (torch.randn(1, tokens, 1, width) for _ in range(4))
    return dict(q=q, k=k, v=v, w=torch.nn.functional.normalize(w, dim=-1), beta=torch.ones(1, tokens, 1))


@pytest.mark.parametrize("length, strength", [(64, 2.1), (8, 3), (1, 1e30)])
def test_P27_packed_documents_grow_each_by_itself(length, strength):
    inputs = unit_inputs(1280)
    inputs["beta"] *= strength
    cu_seqlens = torch.arange(0, 1281, length)
    o = pathattn.path_attention(**inputs, cu_seqlens=cu_seqlens)
    for first in (0, 1280 - length):
        assert torch.equal(o[:, first : first + length], pathattn.path_attention(**rows(inputs, first, first + length)))
    state = new_state(inputs, length, len(cu_seqlens) - 1)
    assert torch.equal(o, pathattn.prefill(**inputs, cu_seqlens=cu_seqlens, state=state))
    if length > 1:
        inputs["beta"][:, 5 * length : 6 * length] = 4
        with pytest.raises(ValueError, match="normalise w"):
            pathattn.path_attention(**inputs, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("tokens", [1, 20])
def test_P27_no_key_meets_a_document_s_first_factor(tokens):
    inputs = unit_inputs(tokens)
    expected = pathattn.path_attention(**inputs)
    assert torch.equal(expected[:, 0], inputs["v"][:, 0])
    inputs["w"][:, 0] *= 1e30
    assert torch.equal(pathattn.path_attention(**inputs), expected)
    state = new_state(inputs, 2 * tokens)
    pathattn.decode(**inputs, state=state)
    with pytest.raises(ValueError, match="normalise w"):
        pathattn.decode(**inputs, state=state)  # no longer the first
    assert state.lengths.tolist() == [tokens]


def test_P27_a_nan_hides_no_growth():
    inputs = {name: torch.cat([x, x]) for name, x in unit_inputs(64).items()}
    inputs["w"][0, 10] = float("nan")
    assert pathattn.path_attention(**inputs)[1].isfinite().all()
    inputs["beta"][1] = 2.5
    with pytest.raises(ValueError, match="normalise w"):
        pathattn.path_attention(**inputs)


def test_P27_w_beyond_the_format_is_refused_even_where_beta_is_zero():
    inputs = unit_inputs(20)
    inputs["beta"].zero_()
    plain = pathattn.path_attention(inputs["q"], inputs["k"], inputs["v"])
    torch.testing.assert_close(pathattn.path_attention(**inputs | {"w": inputs["w"] * 1e15}), plain, atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match=r"\|w\|\^2 be finite \(normalise w\)"):
        pathattn.path_attention(**inputs | {"w": inputs["w"] * 1e20})


def test_P32_gradients_of_w_beta_g_are_full_float32():
    inputs = random_inputs(1, 70, 2, 1, 16, 16, dtype=torch.bfloat16)
    for name, gradient in gradients(attend, inputs, torch.randn(1, 70, 2, 16)).items():
        if name in ("w", "beta", "g"):
            assert gradient.dtype == torch.float32
            assert (gradient.view(torch.int32) & 0xFFFF).any(), name
        else:
            assert gradient.dtype == torch.bfloat16


def test_other_types_of_w_beta_g_are_converted():
    inputs = random_inputs(1, 70, 2, 1, 16, 16, dtype=torch.bfloat16)
    narrow = inputs | {name: inputs[name].bfloat16() for name in ("w", "beta", "g")}
    widened = narrow | {name: narrow[name].float() for name in ("w", "beta", "g")}
    assert equal(attend(**narrow), attend(**widened))
    assert gradients(attend, narrow, torch.randn(1, 70, 2, 16))["beta"].dtype == torch.bfloat16


def test_results_do_not_depend_on_threads():
    inputs = random_inputs(2, 130, 4, 2, 16, 16, dtype=torch.float32)
    expect_equal_bits_for_any_threads(attend, inputs, torch.randn(2, 130, 4, 16))


def test_cpp_gives_the_same_bits(build):
    """operators_test computes the same call from C++ and writes o, lse and the six gradients."""
    subprocess.run([build / "operators_test", "--gtest_filter=PathAttention.writes_results_for_python"], check=True, capture_output=True)
    from_cpp = numpy.fromfile(build / "operators_test_results.bin", dtype=numpy.float32)

    def ramp(step, *sizes):
        return (torch.arange(torch.Size(sizes).numel()) * step).remainder(1009).float().div(1009).sub(0.5).view(sizes)

    inputs = dict(q=ramp(7, 2, 70, 4, 16), k=ramp(11, 2, 70, 2, 16), v=ramp(13, 2, 70, 2, 24))
    inputs |= dict(w=ramp(17, 2, 70, 2, 16), beta=ramp(19, 2, 70, 2) + 0.5, g=ramp(23, 2, 70, 4) - 0.5)
    results = [*attend(**inputs), *gradients(attend, inputs, torch.ones(2, 70, 4, 24), torch.ones(2, 70, 4)).values()]
    assert numpy.array_equal(from_cpp, torch.cat([x.flatten() for x in results]).numpy())


# Derivatives


@pytest.mark.parametrize(
    "names, heads, options",
    [
        ("q k v", (2, 1), {}),
        ("q k v w beta", (2, 2), {}),
        ("q k v w beta g", (4, 2), dict(scale=0.7)),
        ("q k v w beta g", (2, 1), dict(gate_scaled=True)),
        ("q k v g", (2, 1), {}),
        ("q k v w beta g", (2, 1), dict(cu_seqlens=torch.tensor([0, 1, 1, 5, 7]))),
    ],
)
def test_gradcheck(names, heads, options):
    names = names.split()
    inputs = {n: x.requires_grad_() for n, x in random_inputs(1, 7, *heads, 3, 2).items() if n in names}
    assert torch.autograd.gradcheck(lambda *tensors: attend(**dict(zip(names, tensors)), **options), tuple(inputs.values()))


def test_gradients_only_where_wanted_and_through_lse_alone():
    inputs = random_inputs(1, 20, 2, 1, 8, 8)
    wanted = gradients(attend, inputs, torch.zeros(1, 20, 2, 8), torch.ones(1, 20, 2))
    inputs["beta"].requires_grad_()
    attend(**inputs)[1].sum().backward()
    assert torch.equal(inputs["beta"].grad, wanted["beta"]) and inputs["q"].grad is None


def test_double_backward_is_refused():
    inputs = {n: x.requires_grad_() for n, x in random_inputs(1, 7, 2, 1, 3, 2).items()}
    (dq,) = torch.autograd.grad(pathattn.path_attention(**inputs).sum(), inputs["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="can be differentiated once"):
        dq.sum().backward()


# Strides


def test_K20_transposed_gradient_and_gate_from_a_wider_tensor():
    inputs = random_inputs(2, 70, 2, 1, 16, 8, dtype=torch.float32)
    d_o = torch.randn(2, 2, 70, 8).transpose(1, 2)
    wide = torch.randn(2, 70, 6)
    wide[..., 2:4] = inputs["g"]
    actual = gradients(attend, inputs | {"g": wide[..., 2:4]}, d_o)
    assert equal(actual.values(), gradients(attend, inputs, d_o.contiguous()).values())


def shifted(tensor):
    """The same values one element further into their memory."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "change",
    [
        dict(q=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
        dict(k=lambda x: x[:, :, :1].expand(x.shape), beta=lambda x: x[:, :1].expand(x.shape)),
        dict(q=shifted, k=shifted, v=shifted, w=shifted, beta=shifted, g=shifted),
        dict(q=lambda x: x.repeat_interleave(2, dim=-1)[..., ::2], w=lambda x: x.repeat_interleave(2, dim=-1)[..., ::2]),
        dict(v=lambda x: x[..., :1].expand(x.shape), k=lambda x: x[..., :1].expand(x.shape)),
    ],
    ids=["q from a transpose", "k and beta expanded", "one element off", "inner stride 2", "inner stride 0"],
)
def test_F07_any_strides(change, dtype):
    inputs = random_inputs(2, 70, 4, 2, 16, 16, dtype=dtype)
    strided = inputs | {name: make(inputs[name]) for name, make in change.items()}
    contiguous = {name: x.clone(memory_format=torch.contiguous_format) for name, x in strided.items()}
    assert all(torch.equal(strided[n], contiguous[n]) for n in NAMES)
    assert equal(attend(**strided), attend(**contiguous))
    d_o = torch.ones(1, 1, 1, 1).expand(2, 70, 4, 16)  # what out.sum().backward() passes
    assert equal(gradients(attend, strided, d_o).values(), gradients(attend, contiguous, d_o).values())


def test_q_out_of_a_fused_projection_is_not_copied():
    inputs = random_inputs(2, 70, 4, 2, 16, 16, dtype=torch.float32)
    fused = torch.randn(2, 70, 4 + 2 + 2, 16)
    q, k, v = (part.requires_grad_() for part in fused.split([4, 2, 2], dim=2))
    d_o = torch.randn(2, 4, 70, 16).transpose(1, 2)
    copies = {"aten::copy_", "aten::clone", "aten::contiguous", "aten::to"}

    def copies_in_a_step(q):  # of tensors with rows of a head's width: numbers per token do not count
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True, record_shapes=True) as profile:
            o, _ = ops.path_attention(q, k, v, inputs["w"], inputs["beta"], inputs["g"])
            torch.autograd.grad(o, (q, k, v), d_o)
        return {event.name for event in profile.events() if event.name in copies and any(shape[-1:] == [16] for shape in event.input_shapes)}

    assert not copies_in_a_step(q)
    assert copies_in_a_step(q.detach().repeat_interleave(2, dim=-1)[..., ::2].requires_grad_())


# Errors


def with_wrong(**wrong):
    return random_inputs(2, 6, 4, 2, 16, 8, dtype=torch.float32) | wrong


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        (dict(q=torch.zeros(6, 4, 16)), ValueError, r"q must be \[B, T, HQ, K\], got a tensor of sizes \[6, 4, 16\]"),
        (dict(k=torch.zeros(2, 7, 2, 16)), ValueError, r"k must be .* = \[2, 6, 2, 16\], got \[2, 7, 2, 16\]"),
        (dict(k=torch.zeros(2, 6, 2, 15)), ValueError, r"k must be .*got \[2, 6, 2, 15\]"),
        (dict(v=torch.zeros(2, 6, 1, 8)), ValueError, r"v must be .*got \[2, 6, 1, 8\]"),
        (dict(w=torch.zeros(2, 6, 4, 16)), ValueError, r"w must be .*got \[2, 6, 4, 16\]"),
        (dict(beta=torch.zeros(2, 6, 2, 1)), ValueError, r"beta must be .*got \[2, 6, 2, 1\]"),
        (dict(g=torch.zeros(2, 6, 2)), ValueError, r"g must be .*got \[2, 6, 2\]"),
        (dict(q=torch.zeros(2, 6, 3, 16)), ValueError, r"q's heads must be a multiple of k's, got 3 and 2"),
        (dict(beta=None), ValueError, "w and beta go together: got only w"),
        (dict(w=None), ValueError, "w and beta go together: got only beta"),
        (dict(k=torch.zeros(2, 6, 2, 16).double()), TypeError, "k must be Float, got Double"),
        (dict(v=torch.zeros(2, 6, 2, 8).bfloat16()), TypeError, "v must be Float, got BFloat16"),
        (dict(q=torch.zeros(2, 6, 4, 16).half()), TypeError, "q must be float32, bfloat16 or float64, got Half"),
        (dict(w=torch.zeros(2, 6, 2, 16).int()), TypeError, "w must be Float, got Int"),
        (dict(k=torch.zeros(2, 6, 2, 16, device="meta")), ValueError, "k must be on cpu, got a tensor on meta"),
        (dict(scale=float("nan")), ValueError, "scale must be finite, got nan"),
        (dict(cu_seqlens=torch.tensor([0, 6])), ValueError, "batch size 1, got 2"),
        (dict(cu_seqlens=torch.tensor([0.0, 6.0])), TypeError, "cu_seqlens must be int32 or int64, got Float"),
        (dict(cu_seqlens=torch.tensor([[0, 6]])), ValueError, r"cu_seqlens must be \[documents \+ 1\], got a tensor of sizes \[1, 2\]"),
    ],
)
def test_errors_name_the_argument(wrong, error, message):
    with pytest.raises(error, match=message):
        pathattn.path_attention(**with_wrong(**wrong))


@pytest.mark.parametrize(
    "name, value, got", [("q", None, "None"), ("v", None, "None"), ("k", [1.0], "list"), ("w", 1.0, "float"), ("cu_seqlens", [0, 6], "list")]
)
def test_what_is_no_tensor_is_named(name, value, got):
    inputs = random_inputs(1, 6, 4, 2, 16, 8)
    state = new_state(inputs, 6)
    with pytest.raises(TypeError, match=f"^{name} must be a tensor, got {got}$"):
        pathattn.path_attention(**inputs | {name: value})
    with pytest.raises(TypeError, match=f"^{name} must be a tensor, got {got}$"):
        pathattn.prefill(**inputs | {name: value}, state=state)
    if name != "cu_seqlens":
        with pytest.raises(TypeError, match=f"^{name} must be a tensor, got {got}$"):
            pathattn.decode(**inputs | {name: value}, state=state)
    if name != "w":
        with pytest.raises(TypeError, match=f"^{name} must be a tensor, got {got}$"):
            pathattn.stick_breaking_attention(**{n: inputs[n] for n in "qkv"} | {name: value})


def test_F14_a_padded_batch_is_packed_and_asks_for_no_lengths():
    lengths, width = [3, 0, 5], 5
    padded = random_inputs(len(lengths), width, 4, 2, 16, 8)
    with pytest.raises(TypeError, match="lengths"):
        pathattn.path_attention(**padded, lengths=torch.tensor(lengths))
    with pytest.raises(ValueError, match="batch size 1, got 3"):
        pathattn.path_attention(**padded, cu_seqlens=torch.tensor([0, 3, 3, 8]))
    packed = {name: torch.cat([x[n : n + 1, :length] for n, length in enumerate(lengths)], 1) for name, x in padded.items()}
    o, lse = attend(**packed, cu_seqlens=torch.tensor([0, 3, 3, 8]))
    for n, document in ((0, slice(0, 3)), (2, slice(3, 8))):  # a row past the length has no place in o; those before do not see it
        alone = attend(**rows({name: x[n : n + 1] for name, x in padded.items()}, 0, lengths[n]))
        assert equal(alone, (o[:, document], lse[:, document]))
        for x, expected in zip(attend(**padded), alone):
            assert relative_error(x[n : n + 1, : lengths[n]], expected) < 1e-12


def test_P32_the_operator_itself_takes_no_mixed_types():
    inputs = with_wrong()
    with pytest.raises(TypeError, match="beta must be Float, got Double"):
        ops.path_attention(**inputs | {"beta": inputs["beta"].double()})


@pytest.mark.parametrize("key_width, value_width", [(257, 8), (8, 257), (0, 8), (8, 0)])
def test_widths_out_of_range(key_width, value_width):
    with pytest.raises(ValueError, match=r"the width of [qv] must be 1 \.\.\. 256, got (257|0)"):
        pathattn.path_attention(**random_inputs(1, 4, 2, 1, key_width, value_width))


@pytest.mark.parametrize(
    "offsets, message",
    [
        ([], "cu_seqlens must have documents . 1 entries, got none"),
        ([0], "last entry of cu_seqlens must be the number of tokens, got 0"),
        ([1, 6], "cu_seqlens must start with 0, got 1"),
        ([0, 4, 3, 6], "cu_seqlens must not decrease, got 3"),
        ([0, 5], "last entry of cu_seqlens must be the number of tokens, got 5"),
        ([0, 2**62], "last entry of cu_seqlens must be the number of tokens, got 4611686018427387904"),
        ([0, -(2**62), 6], "cu_seqlens must not decrease, got -4611686018427387904"),
    ],
)
def test_K10_malformed_offsets(offsets, message):
    inputs = random_inputs(1, 6, 2, 1, 16, 16)
    with pytest.raises(ValueError, match=message):
        pathattn.path_attention(**inputs, cu_seqlens=torch.tensor(offsets, dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        pathattn.prefill(**inputs, cu_seqlens=torch.tensor(offsets, dtype=torch.int64), state=new_state(inputs, 6, max(len(offsets) - 1, 0)))


def test_O05_another_torch_is_refused_in_one_line(build):
    program = "import torch; torch.__version__ = '2.3.1+cpu'; import pathattn"
    result = subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(build / "python")}, capture_output=True, text=True)
    assert result.returncode != 0
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: pathattn was built for PyTorch ") and torch.__version__ in last and "2.3.1+cpu" in last
