"""What PyTorch asks of operators on a CUDA device: offsets on either side, streams, devices, graphs, opcheck, torch.compile, autocast. Skipped without one."""

import pathattn
import pytest
import torch
from device_calls import device_inputs, on_device, results_and_gradients
from operator_calls import DOCUMENTS, attend, equal, new_state, ops, rows
from oracle import NAMES, gradients, random_inputs, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# Packed documents


def test_K10_offsets_on_either_side():
    inputs, d_o = on_device(random_inputs(1, 70, 2, 1, 16, 16, dtype=torch.float32)), torch.randn(1, 70, 2, 16, device="cuda")
    expected = results_and_gradients(inputs, d_o, cu_seqlens=torch.tensor([0, 5, 70]))
    for cu_seqlens in (DOCUMENTS, DOCUMENTS.int(), DOCUMENTS.cuda(), DOCUMENTS.int().cuda(), DOCUMENTS.repeat_interleave(2).cuda()[::2]):
        assert equal(results_and_gradients(inputs, d_o, cu_seqlens=cu_seqlens).values(), expected.values())


@pytest.mark.parametrize("offsets, message", [([1, 6], "start with 0, got 1"), ([0, 4, 3, 6], "not decrease, got 3"), ([0, 5], "number of tokens, got 5")])
def test_K10_malformed_offsets_on_the_cpu_are_refused(offsets, message):
    inputs = on_device(random_inputs(1, 6, 2, 1, 16, 16, dtype=torch.float32))
    with pytest.raises(ValueError, match=message):
        pathattn.path_attention(**inputs, cu_seqlens=torch.tensor(offsets))


@pytest.mark.parametrize("offsets", [[1, 6], [0, 4, 3, 6], [0, 5], [0, 2**62], [0, -(2**62), 6], [5, 4, 3, 2, 1, 0], [7, 7]])
def test_K10_malformed_offsets_on_the_device_do_no_harm(offsets):
    inputs, d_o = on_device(random_inputs(1, 6, 2, 1, 16, 16, dtype=torch.float32)), torch.randn(1, 6, 2, 16, device="cuda")
    expected = results_and_gradients(inputs, d_o)
    results_and_gradients(inputs, d_o, cu_seqlens=torch.tensor(offsets, device="cuda"))
    torch.cuda.synchronize()
    assert equal(results_and_gradients(inputs, d_o).values(), expected.values())


def test_K10_no_document_for_some_tokens_is_refused():
    inputs = on_device(random_inputs(1, 6, 2, 1, 16, 16, dtype=torch.float32))
    with pytest.raises(ValueError, match="one entry for 6 tokens"):
        pathattn.path_attention(**inputs, cu_seqlens=torch.tensor([0], device="cuda"))


# Streams, devices, graphs


def test_nothing_waits_for_the_device():
    inputs, d_o = on_device(random_inputs(1, 300, 4, 2, 64, 64, dtype=torch.bfloat16)), torch.randn(1, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
    documents = torch.tensor([0, 100, 300])
    for cu_seqlens in (documents.cuda(), documents.int().cuda(), documents, None):
        results_and_gradients(inputs, d_o, cu_seqlens=cu_seqlens)
    state = new_state(inputs, 400)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pathattn.prefill(**inputs, state=state)
        pathattn.decode(**rows(inputs, 0, 3), state=state)
        state.carried_keys(400)
        for cu_seqlens in (documents.cuda(non_blocking=True), documents, documents.int(), None):
            results_and_gradients(inputs, d_o, cu_seqlens=cu_seqlens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_calls_return_before_the_device_is_done():
    inputs = device_inputs(1, 32768, 8, 8, 128, 128, torch.bfloat16)
    pathattn.path_attention(**inputs)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    pathattn.path_attention(**inputs)
    done.record()
    assert not done.query()


def test_two_streams_at_once():
    inputs = [device_inputs(1, 2000, 4, 2, 64, 64, torch.bfloat16, seed=seed) for seed in range(2)]
    d_o = torch.randn(1, 2000, 4, 64, device="cuda", dtype=torch.bfloat16)
    expected = [results_and_gradients(x, d_o) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(5):
        actual = []
        for stream, x in zip(streams, inputs):
            with torch.cuda.stream(stream):
                actual.append(results_and_gradients(x, d_o))
        torch.cuda.synchronize()
        assert all(equal(a.values(), e.values()) for a, e in zip(actual, expected))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: with one, a missing device guard cannot show")
def test_F10_another_device_than_the_current_one():
    """Without the guard a launch on a stream of cuda:1 fails while cuda:0 is current, and one on the default stream waits behind cuda:0's work."""
    inputs, d_o = on_device(random_inputs(1, 600, 4, 2, 64, 64, dtype=torch.float32)), torch.randn(1, 600, 4, 64, device="cuda")

    def run(inputs, d_o):
        state = new_state(inputs, 700)
        prefilled = pathattn.prefill(**inputs, state=state)
        decoded = pathattn.decode(**rows(inputs, 0, 3), state=state)
        return [*results_and_gradients(inputs, d_o).values(), prefilled, decoded, state.carried_keys(603)]

    expected = [x.to("cuda:1") for x in run(inputs, d_o)]
    inputs, d_o = {name: x.to("cuda:1") for name, x in inputs.items()}, d_o.to("cuda:1")
    with torch.cuda.device(1):
        run(inputs, d_o)
    for stream in (torch.cuda.Stream("cuda:1"), torch.cuda.default_stream("cuda:1")):
        for device in range(2):
            torch.cuda.synchronize(device)
        torch.cuda._sleep(2_000_000_000)  # cycles: a second of cuda:0's time
        slept = torch.cuda.Event()
        slept.record()
        with torch.cuda.stream(stream), torch.cuda.device(0):
            actual = run(inputs, d_o)
            assert torch.cuda.current_device() == 0
        torch.cuda.synchronize(1)
        assert equal(actual, expected)
        assert not slept.query()  # or the line before would have proven nothing
    with pytest.raises(ValueError, match="k must be on cuda:1, got a tensor on cuda:0"):
        attend(**inputs | {"k": inputs["k"].cuda(0)})


@pytest.mark.parametrize("name", [*NAMES[1:], "cu_seqlens"])
def test_F10_mixed_devices_are_refused(name):
    inputs = random_inputs(1, 6, 2, 1, 16, 16, dtype=torch.float32) | {"cu_seqlens": torch.tensor([0, 6])}
    if name != "cu_seqlens":
        with pytest.raises(ValueError, match=f"{name} must be on cuda:0, got a tensor on cpu"):
            pathattn.path_attention(**on_device(inputs) | {name: inputs[name]})
    with pytest.raises(ValueError, match=f"{name} must be on cpu.*, got a tensor on cuda:0"):
        pathattn.path_attention(**inputs | {name: inputs[name].cuda()})


def test_float64_is_refused():
    inputs = on_device(random_inputs(1, 6, 2, 1, 16, 16))
    with pytest.raises(TypeError, match="q must be float32, bfloat16 or float16 on a CUDA device, got Double"):
        pathattn.path_attention(**inputs)
    with pytest.raises(TypeError, match="dtype must be float32, bfloat16 or float16 on a CUDA device, got Double"):
        pathattn.DecodingState(1, 6, 2, 1, 16, 16, dtype=torch.float64, device="cuda")


def test_O04_graph_of_packed_documents():
    """Captured once; replayed with other documents and other values in the same tensors."""
    inputs = {name: x.requires_grad_() for name, x in device_inputs(1, 700, 4, 2, 64, 64, torch.bfloat16).items()}
    d_o = torch.randn(1, 700, 4, 64, device="cuda", dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 100, 400, 700], device="cuda")

    def step():
        o, lse = attend(**inputs, cu_seqlens=cu_seqlens)
        return o.detach(), lse.detach(), *torch.autograd.grad(o, list(inputs.values()), d_o)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed, documents in enumerate(([0, 100, 400, 700], [0, 1, 1, 700], [0, 512, 699, 700]), start=1):
        with torch.no_grad():
            for name, x in device_inputs(1, 700, 4, 2, 64, 64, torch.bfloat16, seed=seed).items():
                inputs[name].copy_(x)
            cu_seqlens.copy_(torch.tensor(documents))
        graph.replay()
        assert equal(captured, step())
    with pytest.raises(ValueError, match="cu_seqlens must be on cuda:0 while a CUDA graph is captured, got a tensor on cpu"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            attend(**inputs, cu_seqlens=torch.tensor([0, 700]))


# As PyTorch operators


@pytest.mark.parametrize("tokens, documents, width", [(196, None, 16), (257, [0, 1, 1, 200, 257], 16), (257, None, 64)])
def test_O03_opcheck(tokens, documents, width):
    inputs = on_device(random_inputs(1, tokens, 4, 2, width, width, dtype=torch.bfloat16))
    inputs["q"] = inputs["q"].transpose(1, 2).contiguous().transpose(1, 2)
    options = dict(cu_seqlens=None if documents is None else torch.tensor(documents, device="cuda"), gate_scaled=True)
    torch.library.opcheck(ops.path_attention, tuple(x.clone().requires_grad_() for x in inputs.values()), options)
    torch.library.opcheck(ops.path_attention_with_rest, tuple(inputs.values()), options)
    o, lse, rest = ops.path_attention_with_rest(*inputs.values(), **options)
    d_o = torch.randn(1, 4, tokens, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    for o_rest in (None, rest):
        with_rest = options | dict(o_rest=o_rest)
        torch.library.opcheck(ops.path_attention_backward, (*inputs.values(), o, lse, d_o, torch.randn_like(lse)), with_rest)
        torch.library.opcheck(ops.path_attention_backward, (*list(inputs.values())[:3], None, None, None, o, lse, d_o, None), with_rest)


def test_O02_compiles_whole_and_once_for_every_length():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *tensors: attend(**dict(zip(NAMES, tensors))), fullgraph=True, dynamic=True, backend=counter)
    for tokens in (100, 196, 257):
        inputs, d_o = device_inputs(2, tokens, 4, 2, 16, 24), torch.randn(2, tokens, 4, 24, device="cuda")
        assert equal(compiled(*inputs.values()), attend(**inputs))
        actual = gradients(lambda **leaves: compiled(*leaves.values()), inputs, d_o)
        assert equal(actual.values(), gradients(attend, inputs, d_o).values())
    assert counter.frame_count <= 2  # with and without gradients


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_O02_generated_code_around_the_operator(mode):
    def function(q, others):
        return pathattn.path_attention(q.sin(), **others) * 2

    compiled, kept = torch.compile(function, fullgraph=True, mode=mode), []
    for seed in range(4):
        inputs = device_inputs(1, 130, 4, 2, 64, 64, seed=seed)
        q = inputs.pop("q")
        kept.append((compiled(q, inputs).clone(), function(q, inputs)))
    for actual, expected in kept:
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_O01_checkpoint(use_reentrant):
    inputs, d_o = device_inputs(1, 300, 4, 2, 64, 64), torch.randn(1, 300, 4, 64, device="cuda")

    def checkpointed(**leaves):
        return torch.utils.checkpoint.checkpoint(lambda *tensors: attend(**dict(zip(NAMES, tensors))), *leaves.values(), use_reentrant=use_reentrant)

    def gradients_by_backward(function):
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        (function(**leaves)[0] * d_o).sum().backward()
        return [x.grad for x in leaves.values()]

    assert equal(gradients_by_backward(attend), gradients_by_backward(checkpointed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    inputs, d_o = device_inputs(1, 130, 4, 2, 64, 64), torch.randn(1, 130, 4, 64, device="cuda", dtype=dtype)
    narrow = inputs | {name: inputs[name].to(dtype) for name in ("q", "k", "v")}
    with torch.autocast("cuda", dtype):
        actual = results_and_gradients(inputs, d_o)
        from_narrow = attend(**narrow | {"beta": narrow["beta"].to(dtype)})
    expected = results_and_gradients(narrow, d_o)
    assert actual["o"].dtype == dtype and from_narrow[0].dtype == dtype
    assert equal(actual.values(), [x.float() if name in ("dq", "dk", "dv") else x for name, x in expected.items()])


# The layer


@pytest.mark.parametrize("packed", [False, True])
def test_layer(packed):
    torch.manual_seed(0)
    layer = pathattn.PaTHAttention(64, 4, 2, use_forget_gate=True, use_qk_norm=True, conv_size=4, conv_bias=True)
    x, dy = torch.randn(1, 200, 64), torch.randn(1, 200, 64)
    cu_seqlens = torch.tensor([0, 1, 1, 90, 200]) if packed else None

    def run(x, cu_seqlens):
        x = x.clone().requires_grad_()
        y = layer(x, cu_seqlens=cu_seqlens)
        return [y, *torch.autograd.grad(y, [x, *layer.parameters()], dy.to(y.device))]

    expected = run(x, cu_seqlens)
    layer.cuda()
    for offsets in [cu_seqlens, cu_seqlens.cuda()] if packed else [None]:
        assert all(relative_error(a.cpu(), e) < 2e-5 for a, e in zip(run(x.cuda(), offsets), expected))
