"""pathattn.fla.parallel_path_attn: the public package's arguments, results and gate convention."""

import inspect

import oracle
import pathattn
import pytest
import torch
from oracle import GOLDEN, NAMES, random_inputs, relative_error
from pathattn.fla import parallel_path_attn


def test_signature():
    parameters = inspect.signature(parallel_path_attn).parameters
    assert list(parameters) == ["q", "k", "v", "w", "beta", "g", "scale", "cu_seqlens", "use_cache"]
    assert [p.default for p in parameters.values()][5:] == [None, None, None, False]


@pytest.mark.parametrize("name", ["op_path_gate_scaled", "op_path_mha", "op_path_edge_beta_w"])
def test_golden(name):
    tensors, metadata = oracle.read_safetensors(GOLDEN / f"{name}.safetensors")
    inputs = {n: tensors[n].double() for n in NAMES if n in tensors}
    o, k_cache = parallel_path_attn(**inputs, scale=float(metadata["scale"]), use_cache=True)
    assert relative_error(o, tensors["o"]) < 1e-7
    if "k_cache" in tensors:
        assert relative_error(k_cache, tensors["k_cache"]) < 1e-7
    assert parallel_path_attn(**inputs)[1] is None


def test_golden_packed_keys():
    tensors, _ = oracle.read_safetensors(GOLDEN / "op_path_varlen_gate_unscaled.safetensors")
    inputs = {n: tensors[n] for n in NAMES}
    o, k_cache = parallel_path_attn(**inputs | {"g": inputs["g"] / 32**-0.5}, cu_seqlens=tensors["cu_seqlens"], use_cache=True)
    assert o.dtype == k_cache.dtype == torch.bfloat16 and k_cache.shape == inputs["k"].shape
    assert relative_error(o, tensors["o"]) < 1e-2
    assert relative_error(k_cache, tensors["k_cache"]) < 1e-2


def test_gradients_flow_through_o_alone():
    inputs = {n: x.requires_grad_() for n, x in random_inputs(1, 70, 2, 1, 16, 16).items()}
    o, k_cache = parallel_path_attn(**inputs, use_cache=True)
    assert not k_cache.requires_grad
    actual = torch.autograd.grad(o.sum(), list(inputs.values()))
    expected = torch.autograd.grad(pathattn.path_attention(**inputs, gate_scaled=True).sum(), list(inputs.values()))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0]), torch.tensor([0, 0, 0])])
def test_no_tokens_leave_no_keys(cu_seqlens):
    o, k_cache = parallel_path_attn(**random_inputs(1, 0, 4, 2, 16, 8), cu_seqlens=cu_seqlens, use_cache=True)
    assert o.shape == (1, 0, 4, 8) and k_cache.shape == (1, 0, 2, 16)
