"""What PyTorch asks of a custom operator: opcheck, torch.compile without breaks, and checkpointing."""

import pathattn
import pytest
import torch
from operator_calls import attend, bits, equal, new_state, ops, rows
from oracle import NAMES, gradients, random_inputs
from torch._subclasses.fake_tensor import FakeTensorMode


def opcheck_inputs(tokens, cu_seqlens):
    inputs = random_inputs(1, tokens, 4, 2, 16, 24, dtype=torch.float32)
    inputs["q"] = inputs["q"].transpose(1, 2).contiguous().transpose(1, 2)
    inputs["v"] = inputs["v"].transpose(1, 3).contiguous().transpose(1, 3)
    inputs["g"] = inputs["g"].transpose(1, 2).contiguous().transpose(1, 2)
    return inputs, dict(cu_seqlens=cu_seqlens, gate_scaled=True)


@pytest.mark.parametrize("tokens, cu_seqlens", [(196, None), (257, torch.tensor([0, 1, 1, 200, 257]))])
def test_O03_opcheck(tokens, cu_seqlens):
    inputs, options = opcheck_inputs(tokens, cu_seqlens)
    torch.library.opcheck(ops.path_attention, tuple(x.clone().requires_grad_() for x in inputs.values()), options)
    o, lse = ops.path_attention(*inputs.values(), **options)
    d_o = torch.randn(1, 4, tokens, 24).transpose(1, 2)
    torch.library.opcheck(ops.path_attention_backward, (*inputs.values(), o, lse, d_o, torch.randn_like(lse)), options)
    torch.library.opcheck(ops.path_attention_backward, (*list(inputs.values())[:3], None, None, None, o, lse, d_o, None), options)
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    state = ops.decoding_state(sequences, 300, 4, 2, 16, 24, torch.float32, True, True)
    torch.library.opcheck(ops.prefill, (*inputs.values(), *state), options)


def test_O03_opcheck_of_decoding():
    inputs, _ = opcheck_inputs(196, None)
    with_gate = ops.decoding_state(1, 300, 4, 2, 16, 24, torch.float32, True, True)
    plain = ops.decoding_state(1, 300, 4, 2, 16, 24, torch.float32, False, False)
    torch.library.opcheck(ops.decode, (*inputs.values(), *with_gate))
    torch.library.opcheck(ops.decode, (*list(inputs.values())[:3], None, None, None, *plain))
    torch.library.opcheck(ops.carried_keys, (*with_gate, 7))


# On fake tensors of a GPU, which need none.
@pytest.mark.parametrize(
    "dtype, gate, wants_gradient",
    [
        (torch.bfloat16, True, True),
        (torch.bfloat16, True, False),
        (torch.bfloat16, False, True),
        (torch.float32, True, True),
    ],
)
def test_rest_of_o_is_kept_for_the_gradient_of_16_bit_gated_attention(dtype, gate, wants_gradient):
    called = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(function)
            return function(*args, **(kwargs or {}))

    with FakeTensorMode():
        inputs = random_inputs(1, 70, 2, 1, 16, 24, dtype=torch.float32, gate=gate)
        narrow = {"q", "k", "v"}
        inputs = {n: torch.empty(x.shape, dtype=dtype if n in narrow else torch.float32, device="cuda") for n, x in inputs.items()}
        inputs["k"].requires_grad_(wants_gradient)
        with Record():
            o, lse = attend(**inputs)
        keeps = dtype == torch.bfloat16 and gate and wants_gradient
        assert (ops.path_attention_with_rest.default in called) == keeps and (ops.path_attention.default in called) == (not keeps)
        assert o.shape == (1, 70, 2, 24) and o.requires_grad == wants_gradient
        with pytest.raises(ValueError, match=r"o_rest must be \[B, T, HQ, V\]"):
            ops.path_attention_backward(*inputs.values(), *([] if gate else [None]), o, lse, o, None, o_rest=o[:, :, :, :-1])


def test_O02_compiles_whole_and_once_for_every_length():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *tensors: attend(**dict(zip(NAMES, tensors))), fullgraph=True, dynamic=True, backend=counter)
    kept = []
    for tokens in (100, 196, 257):
        inputs, d_o = random_inputs(2, tokens, 4, 2, 16, 24, dtype=torch.float32), torch.randn(2, tokens, 4, 24)
        kept.append((compiled(*inputs.values()), attend(**inputs)))
        actual = gradients(lambda **leaves: compiled(*leaves.values()), inputs, d_o)
        assert equal(actual.values(), gradients(attend, inputs, d_o).values())
    assert all(equal(compiled_results, results) for compiled_results, results in kept)
    assert counter.frame_count <= 2  # with and without gradients


def test_O02_generated_code_around_the_operator():
    inputs, d_o = random_inputs(1, 65, 2, 1, 16, 16, dtype=torch.float32), torch.randn(1, 65, 2, 16)

    def function(q, **others):
        o, lse = attend(q=q.sin(), **others)
        return o * 2, lse

    compiled = torch.compile(function, fullgraph=True)
    for name, gradient in gradients(compiled, inputs, d_o).items():
        torch.testing.assert_close(gradient, gradients(function, inputs, d_o)[name])


def test_O02_decoding_compiles_whole():
    inputs = random_inputs(2, 10, 4, 2, 16, 24, dtype=torch.float32)
    states = [new_state(inputs, 10) for _ in range(2)]
    compiled = torch.compile(lambda inputs, state: pathattn.decode(**inputs, state=state), fullgraph=True, backend="aot_eager")
    for first, last in ((0, 5), (5, 10)):
        part = rows(inputs, first, last)
        assert torch.equal(compiled(part, states[0]), pathattn.decode(**part, state=states[1]))
    assert equal(bits(states[0]._tensors), bits(states[1]._tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast_casts_to_the_decoding_state(dtype):
    inputs = random_inputs(2, 8, 4, 2, 16, 8, dtype=torch.float32)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    cast = {name: x.to(dtype if name in ("q", "k", "v") else wide) for name, x in inputs.items()}
    states = [new_state(cast, 8) for _ in range(2)]

    def steps(inputs, state):
        return [step(*rows(inputs, a, b).values(), *state._tensors) for step, a, b in ((ops.prefill, 0, 5), (ops.decode, 5, 8))]

    with torch.autocast("cpu", torch.bfloat16):
        results = steps(inputs, states[0])
    assert equal(results, steps(cast, states[1])) and equal(bits(states[0]._tensors), bits(states[1]._tensors))


def test_autocast_narrows_q_k_v_alone():
    inputs, d_o = random_inputs(1, 70, 2, 1, 16, 16, dtype=torch.float32), torch.randn(1, 70, 2, 16)
    narrow = inputs | {name: inputs[name].bfloat16() for name in ("q", "k", "v")}
    with torch.autocast("cpu", torch.bfloat16):
        results, actual = attend(**inputs), gradients(attend, inputs, d_o)
    assert equal(results, attend(**narrow))
    assert equal(actual.values(), [x.float() for x in gradients(attend, narrow, d_o).values()])
    doubles = {name: x.double() for name, x in inputs.items()}
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(**doubles)[0].dtype == torch.float64


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_O01_checkpoint(use_reentrant):
    inputs, d_o = random_inputs(1, 70, 2, 1, 16, 16), torch.randn(1, 70, 2, 16)

    def checkpointed(**leaves):
        return torch.utils.checkpoint.checkpoint(lambda *tensors: attend(**dict(zip(NAMES, tensors))), *leaves.values(), use_reentrant=use_reentrant)

    def plain_and_checkpointed(function):
        leaves = {n: x.detach().requires_grad_() for n, x in inputs.items()}
        (function(**leaves)[0] * d_o).sum().backward()
        return [x.grad for x in leaves.values()]

    assert equal(plain_and_checkpointed(attend), plain_and_checkpointed(checkpointed))
