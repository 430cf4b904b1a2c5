"""Without its softmax, PaTH attention is a linear recurrence of the delta-rule family (docs/mathematics.md): its own operator's scores say so."""

import pathattn
import torch
from oracle import random_inputs, relative_error

TOKENS, WIDTH, SCALE = 200, 16, 0.1  # a small scale keeps every weight of the softmax within reach of a logarithm


def scores(inputs):
    """q_i H_i ... H_{j+1} k_j, read off the operator: with the identity for values its output is the softmax's weights."""
    identity = torch.eye(TOKENS, dtype=torch.float64).reshape(1, TOKENS, 1, TOKENS)
    weights, lse = pathattn.path_attention(**{**inputs, "v": identity}, scale=SCALE, return_lse=True)
    logits = weights[0, :, 0].log() + lse[0, :, 0].unsqueeze(-1)
    return torch.where(torch.ones(TOKENS, TOKENS).tril() > 0, logits / SCALE, 0.0)


def test_summed_scores_are_a_recurrence_that_decays_along_w():
    inputs = random_inputs(1, TOKENS, 1, 1, WIDTH, WIDTH, gate=False)
    q, k, v, w = (inputs[name][0, :, 0] for name in "qkvw")
    beta = inputs["beta"][0, :, 0]
    state, expected = torch.zeros(WIDTH, WIDTH, dtype=torch.float64), []
    for t in range(TOKENS):
        state = state - beta[t] * torch.outer(state @ w[t], w[t]) + torch.outer(v[t], k[t])
        expected.append(state @ q[t])
    assert relative_error(scores(inputs) @ v, torch.stack(expected)) < 1e-9


def test_with_w_along_k_it_is_deltanet():
    """DeltaNet overwrites what its state holds for k_t by v_t, to the part beta_t; here every value carries that beta_t."""
    inputs = random_inputs(1, TOKENS, 1, 1, WIDTH, WIDTH, gate=False)
    inputs["k"] = inputs["w"]
    q, k, v = (inputs[name][0, :, 0] for name in "qkv")
    beta = inputs["beta"][0, :, 0]
    state, expected = torch.zeros(WIDTH, WIDTH, dtype=torch.float64), []
    for t in range(TOKENS):
        state = state + beta[t] * torch.outer(v[t] - state @ k[t], k[t])
        expected.append(state @ q[t])
    assert relative_error(scores(inputs) @ (beta.unsqueeze(-1) * v), torch.stack(expected)) < 1e-9
