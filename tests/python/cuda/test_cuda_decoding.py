"""Decoding on a CUDA device: rows of the whole, states that move between devices, full states, graphs. Skipped without one."""

import pathattn
import pytest
import torch
from device_calls import FORMATS, device_inputs, in_float64_on_cpu, on_device
from operator_calls import new_state, rows
from oracle import NAMES, random_inputs, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("names", [NAMES, NAMES[:5], ("q", "k", "v", "g"), ("q", "k", "v")])
@pytest.mark.parametrize("dtype", FORMATS)
def test_P13_prefill_and_steps_are_rows_of_the_whole(dtype, names):
    inputs = {name: x for name, x in device_inputs(2, 1200, 4, 2, 64, 40, dtype).items() if name in names}
    whole = in_float64_on_cpu(inputs, torch.zeros(2, 1200, 4, 40, dtype=dtype))["o"]
    for prompt in (0, 1, 63, 64, 65, 511, 512, 1100):
        state, parts, first = new_state(inputs, 1200), [], prompt
        if prompt:
            parts.append(pathattn.prefill(**rows(inputs, 0, prompt), state=state))
        for step in (1, 1, 63, 20):
            parts.append(pathattn.decode(**rows(inputs, first, first + step), state=state))
            first += step
        assert state.lengths.tolist() == [first] * 2
        error = relative_error(torch.cat(parts, dim=1).cpu(), whole[:, :first])
        assert error < (1e-5 if dtype == torch.float32 else 1e-2), prompt


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("length", [1, 63, 64, 200, 512, 513, 640, 1100])
def test_states_move_between_devices(length, dtype, bound):
    inputs = random_inputs(2, length + 30, 4, 2, 32, 48, dtype=dtype)
    on_cpu, moved = new_state(inputs, length + 30), new_state(on_device(inputs), length + 30)
    pathattn.prefill(**rows(inputs, 0, length), state=on_cpu)
    pathattn.prefill(**on_device(rows(inputs, 0, length)), state=moved)
    assert relative_error(moved.carried_keys().cpu(), on_cpu.carried_keys()) < bound
    expected = pathattn.decode(**rows(inputs, length, length + 30), state=on_cpu)
    half = length + 15
    moved = moved.to("cpu")  # what one device made, the other goes on from
    parts = [pathattn.decode(**rows(inputs, length, half), state=moved)]
    moved = moved.to("cuda")
    parts.append(pathattn.decode(**on_device(rows(inputs, half, length + 30)), state=moved).cpu())
    assert relative_error(torch.cat(parts, dim=1), expected) < bound
    assert relative_error(moved.carried_keys().cpu(), on_cpu.carried_keys()) < bound


def test_prefill_of_packed_documents():
    inputs, bounds_of = device_inputs(1, 700, 4, 2, 64, 64), [0, 0, 1, 64, 600, 700]
    for cu_seqlens in (torch.tensor(bounds_of), torch.tensor(bounds_of, dtype=torch.int32, device="cuda")):
        state = new_state(inputs, 700, sequences=5)
        assert torch.equal(pathattn.prefill(**inputs, state=state, cu_seqlens=cu_seqlens), pathattn.path_attention(**inputs, cu_seqlens=cu_seqlens))
        keys = state.carried_keys()
        for n, (first, last) in enumerate(zip(bounds_of, bounds_of[1:])):
            alone = new_state(inputs, 700)
            if first < last:
                pathattn.prefill(**rows(inputs, first, last), state=alone)
            assert state.lengths[n] == last - first and torch.equal(keys[n, : last - first], alone.carried_keys()[0])


def test_a_full_state_keeps_what_it_has():
    inputs = device_inputs(1, 520, 2, 1, 16, 16)
    state = new_state(inputs, 512)
    pathattn.prefill(**rows(inputs, 0, 510), state=state)
    o = pathattn.decode(**rows(inputs, 510, 514), state=state)
    assert o[:, :2].isfinite().all() and o[:, 2:].isnan().all() and state.lengths.tolist() == [512]
    assert relative_error(o[:, :2].cpu(), pathattn.path_attention(**rows(inputs, 0, 512))[:, 510:].cpu()) < 1e-5
    with pytest.raises(ValueError, match="the decoding state has room for 512 tokens a sequence, the call has 520"):
        pathattn.prefill(**inputs, state=new_state(inputs, 512))
    with pytest.raises(ValueError, match="the decoding state is on cpu, k on cuda:0"):
        pathattn.decode(**rows(inputs, 0, 1), state=state.to("cpu"))


def test_O04_graph_of_a_decode_step():
    inputs = device_inputs(2, 620, 4, 2, 64, 64, torch.bfloat16)
    state, eager = (new_state(inputs, 620) for _ in range(2))
    for x in (state, eager):
        pathattn.prefill(**rows(inputs, 0, 500), state=x)
    token, graph = {name: x.clone() for name, x in rows(inputs, 500, 501).items()}, torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):  # recorded, not run: the state stays as it is
        o = pathattn.decode(**token, state=state)
    for t in range(500, 530):
        for name, x in rows(inputs, t, t + 1).items():
            token[name].copy_(x)
        graph.replay()
        assert torch.equal(o, pathattn.decode(**rows(inputs, t, t + 1), state=eager))
    assert state.lengths.tolist() == [530, 530]


def test_layer_decodes():
    torch.manual_seed(0)
    layer, x = pathattn.PaTHAttention(64, 4, 2, use_forget_gate=True).cuda(), torch.randn(2, 40, 64, device="cuda")
    cache = layer.new_cache(2, 40)
    parts = [layer(x[:, :30], cache=cache), *(layer(x[:, t : t + 1], cache=cache) for t in range(30, 40))]
    assert relative_error(torch.cat(parts, dim=1), layer(x)) < 1e-5
