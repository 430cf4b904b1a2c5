"""Prefill, decode and the decoding state from Python."""

import copy

import pathattn
import pytest
import torch
from operator_calls import DOCUMENTS, bits, equal, new_state, ops, rows
from oracle import random_inputs


@pytest.mark.parametrize("gate", [True, False])
def test_prefill_and_decode_continue_the_forward(gate):
    inputs = random_inputs(2, 90, 4, 2, 16, 24, gate=gate)
    o = pathattn.path_attention(**inputs)
    state = new_state(inputs, 90)
    parts = [pathattn.prefill(**rows(inputs, 0, 60), state=state)]
    parts += [pathattn.decode(**rows(inputs, a, b), state=state) for a, b in ((60, 61), (61, 68), (68, 90))]
    torch.testing.assert_close(torch.cat(parts, dim=1), o, atol=1e-12, rtol=1e-12)
    assert state.lengths.tolist() == [90, 90] and state.capacity == 512


def test_packed_prompts_become_sequences():
    inputs = random_inputs(1, 70, 2, 1, 16, 16)
    state = new_state(inputs, 70, sequences=6)
    o = pathattn.prefill(**inputs, cu_seqlens=DOCUMENTS, state=state)
    assert torch.equal(o, pathattn.path_attention(**inputs, cu_seqlens=DOCUMENTS))
    assert state.lengths.tolist() == [0, 5, 0, 0, 65, 0]
    keys = state.carried_keys()
    assert keys.shape == (6, 65, 1, 16) and not keys[1, 5:].any()
    torch.testing.assert_close(keys[4, -1], inputs["k"][0, -1], atol=0, rtol=0)


def refused(name, value):
    return lambda inputs: inputs | {name: value}


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: {name: torch.cat([x] * 413, dim=1) for name, x in inputs.items()},
        refused("q", torch.zeros(2, 1, 4, 15)),
        refused("w", torch.zeros(2, 1, 2, 16, dtype=torch.int32)),
        refused("beta", torch.zeros(2, 1, 4)),
        refused("g", None),
        lambda inputs: {name: x[:1] for name, x in inputs.items()},
        lambda inputs: {name: x.double() for name, x in inputs.items()},
    ],
    ids=["past the capacity", "width", "type of w", "shape of beta", "no gate", "one sequence of two", "another type"],
)
def test_P17_a_refused_step_leaves_the_state(change):
    inputs = random_inputs(2, 101, 4, 2, 16, 24, dtype=torch.float32)
    state = new_state(inputs, 101)
    pathattn.prefill(**rows(inputs, 0, 100), state=state)
    before, fork = bits(state._tensors), copy.deepcopy(state)
    with pytest.raises((ValueError, TypeError)):
        pathattn.decode(**change(rows(inputs, 100, 101)), state=state)
    assert equal(before, bits(state._tensors))
    step = pathattn.decode(**rows(inputs, 100, 101), state=state)
    assert torch.equal(step, pathattn.decode(**rows(inputs, 100, 101), state=fork))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_F01_unused_slots_are_not_read(poison):
    inputs = random_inputs(2, 101, 4, 2, 16, 24, dtype=torch.float32)

    def run(value):
        state = new_state(inputs, 512)
        keys, values, gate_sums, *_ = state._tensors
        for tensor in (keys, values, gate_sums):
            tensor.fill_(value)
        prompt = pathattn.prefill(**rows(inputs, 0, 100), state=state)
        for tensor in (keys[:, :, 100:], values[:, :, 100:], gate_sums[:, :, 100:]):
            tensor.fill_(value)
        return [prompt, pathattn.decode(**rows(inputs, 100, 101), state=state), state.carried_keys()]

    assert equal(run(poison), run(0.0))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((-1, 8, 2, 1, 16, 16), "sequences must not be negative, got -1"),
        ((1, -8, 2, 1, 16, 16), "capacity must be 0 .*, got -8"),
        ((1, 2**62, 2, 1, 16, 16), "capacity must be 0 .*, got 4611686018427387904"),
        ((1, 8, 3, 2, 16, 16), r"query_heads must be a multiple of key_heads \(2\), got 3"),
        ((1, 8, 2, 1, 300, 16), r"key_width must be 1 \.\.\. 256, got 300"),
    ],
)
def test_decoding_state_is_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        pathattn.DecodingState(*arguments)


@pytest.mark.parametrize("gate", [True, False])
def test_a_state_without_room_takes_no_token(gate):
    inputs = random_inputs(1, 4, 2, 1, 16, 16, gate=gate)
    state = new_state(inputs, 0)
    assert pathattn.prefill(**rows(inputs, 0, 0), state=state).shape == pathattn.decode(**rows(inputs, 0, 0), state=state).shape == (1, 0, 2, 16)
    with pytest.raises(ValueError, match="room for 0 tokens a sequence, the call has 4"):
        pathattn.prefill(**inputs, state=state)
    with pytest.raises(ValueError, match="room for 0 tokens a sequence, the call has 4"):
        pathattn.decode(**inputs, state=state)


def test_P27_growth_over_many_steps_ends_in_an_error():
    inputs = random_inputs(2, 200, 1, 1, 16, 16, gate=False, dtype=torch.float32)
    inputs["beta"].fill_(2.1)
    inputs["w"][1] *= 3
    state = new_state(inputs, 200)
    with pytest.raises(ValueError, match=r"o is not finite .* beta \* \|w\|\^2 must stay within 0 \.\.\. 2"):
        for t in range(200):
            assert pathattn.decode(**rows(inputs, t, t + 1), state=state).isfinite().all()


def test_P27_an_input_that_is_no_number_is_no_growth():
    inputs = random_inputs(2, 4, 1, 1, 16, 16, dtype=torch.float32)
    inputs["w"][1, 3] = float("nan")
    inputs["g"][0, 3] = -float("inf")
    o = pathattn.decode(**inputs, state=new_state(inputs, 4))
    assert o[0].isfinite().all() and o[1, 3].isnan().all()


def test_a_damaged_state_is_refused():
    inputs = random_inputs(1, 4, 2, 1, 16, 16)
    state = new_state(inputs, 8)
    state.lengths.fill_(-3)
    with pytest.raises(ValueError, match=r"lengths of the decoding state must be 0 \.\.\. 512, got -3"):
        pathattn.decode(**inputs, state=state)
    with pytest.raises(ValueError, match="tokens must be 0 .*, got 513"):
        new_state(inputs, 8).carried_keys(513)


def test_decoding_has_no_silent_gradient():
    inputs = random_inputs(1, 6, 2, 1, 16, 16, gate=False)
    state = ops.decoding_state(1, 6, 2, 1, 16, 16, torch.float64, True, False)
    inputs["q"].requires_grad_()
    with pytest.raises(RuntimeError, match="pathattn::prefill has no derivative"):
        ops.prefill(*inputs.values(), None, *state)
    assert not pathattn.prefill(**inputs, state=new_state(inputs, 6)).requires_grad
