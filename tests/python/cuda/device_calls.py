"""What the tests on a CUDA device share: inputs there, results with gradients, what to compare them with and how closely."""

import functools

import torch
import torch.nn.functional as F
from operator_calls import attend
from oracle import gradients, relative_error

FORMATS = [torch.float32, torch.bfloat16, torch.float16]


def on_device(tensors):
    return {name: x.cuda() for name, x in tensors.items()}


def device_inputs(batch, tokens, query_heads, key_heads, key_width, value_width, dtype=torch.float32, gate=True, strong=False, seed=0):
    """Like random_inputs, made on the device: for sizes that a CPU would take long to fill."""
    random = torch.Generator("cuda").manual_seed(seed)
    normal = functools.partial(torch.randn, generator=random, device="cuda")
    inputs = {
        "q": normal(batch, tokens, query_heads, key_width, dtype=dtype),
        "k": normal(batch, tokens, key_heads, key_width, dtype=dtype),
        "v": normal(batch, tokens, key_heads, value_width, dtype=dtype),
        "w": F.normalize(normal(batch, tokens, key_heads, key_width), dim=-1),
        "beta": 2 * torch.rand(batch, tokens, key_heads, generator=random, device="cuda"),
    }
    if strong:
        inputs["beta"] = 2 - inputs["beta"] / 4
    if gate:
        inputs["g"] = F.logsigmoid(normal(batch, tokens, query_heads) + 4)
    return inputs


def results_and_gradients(inputs, d_o, d_lse=None, **options):
    """o, lse and the gradients by name."""
    function = functools.partial(attend, **options)
    o, lse = function(**inputs)
    return {"o": o, "lse": lse} | {"d" + name: x for name, x in gradients(function, inputs, d_o, d_lse).items()}


def in_float64_on_cpu(inputs, d_o, d_lse=None, **options):
    options = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    d_lse = None if d_lse is None else d_lse.double().cpu()
    return results_and_gradients({name: x.double().cpu() for name, x in inputs.items()}, d_o.double().cpu(), d_lse, **options)


def bounds(dtype):
    """Largest relative errors by result: multiples of what the format's rounding allows."""
    if dtype == torch.float32:
        return dict(o=1e-5, lse=1e-5) | dict.fromkeys(["dq", "dk", "dv", "dw", "dbeta", "dg"], 1e-4)
    return dict(o=5e-3, lse=5e-3, dq=8e-3, dk=8e-3, dv=8e-3, dw=1.5e-2, dbeta=2e-2, dg=2e-2)


def expect_close(actual, expected, bound):
    for name, value in actual.items():
        assert value.is_cuda and value.isfinite().all(), name
        assert relative_error(value.cpu(), expected[name]) < bound[name], name
