"""Short forms of the calls that tests of the operators make."""

import pathattn
import torch
from oracle import gradients

DOCUMENTS = torch.tensor([0, 0, 5, 5, 5, 70, 70])  # packed, some empty
ops = torch.ops.pathattn


def attend(**arguments):
    return pathattn.path_attention(**arguments, return_lse=True)


def new_state(inputs, capacity, sequences=None):
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    return pathattn.DecodingState(
        q.shape[0] if sequences is None else sequences, capacity, q.shape[2], k.shape[2], k.shape[3], v.shape[3],
        dtype=q.dtype, has_w="w" in inputs, has_gate="g" in inputs, device=q.device,
    )


def rows(inputs, first, last):
    return {name: tensor[:, first:last] for name, tensor in inputs.items()}


def bits(tensors):
    return [tensor.clone() for tensor in tensors if tensor is not None]


def equal(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second))


def expect_equal_bits_for_any_threads(function, inputs, d_o):
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append([*function(**inputs), *gradients(function, inputs, d_o).values()])
    finally:
        torch.set_num_threads(threads)
    assert equal(results[0], results[1]) and equal(results[0], results[2])
