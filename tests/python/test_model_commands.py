"""`pathattn logits` and `pathattn generate` from outside, on golden checkpoints; the logits are read without any of the project's own code."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from oracle import GOLDEN, read_safetensors, relative_error


def write_ids(path, ids):
    data = struct.pack(f"<{len(ids)}q", *ids)
    header = json.dumps({"input_ids": {"dtype": "I64", "shape": [1, len(ids)], "data_offsets": [0, len(data)]}}).encode()
    Path(path).write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.mark.parametrize("model", ["model_path", "model_path_gate", "model_path_gqa_fullw_qknorm", "model_fox"])
def test_logits_of_golden_checkpoints(call, tmp_path, model):
    recorded = GOLDEN / model / "io.safetensors"
    call("logits", GOLDEN / model, "--input", recorded, "--output", tmp_path / "logits.safetensors")
    logits, expected = (read_safetensors(path)[0]["logits"] for path in (tmp_path / "logits.safetensors", recorded))
    assert logits.dtype == torch.float32
    assert relative_error(logits, expected) < 1e-5


@pytest.mark.parametrize("token", [97, -1, 2**62])
def test_a_token_outside_the_vocabulary_is_named_with_its_position(call, tmp_path, token):
    write_ids(tmp_path / "ids.safetensors", [1, 2, token, 3])
    result = call("logits", GOLDEN / "model_path", "--input", tmp_path / "ids.safetensors", "--output", tmp_path / "logits.safetensors", status=2)
    assert f"token {token} at position 2 of row 0 is outside the vocabulary of 97" in result.stderr
    assert not (tmp_path / "logits.safetensors").exists()


def test_weights_that_are_no_numbers_are_named(call, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(GOLDEN / "model_path", model)
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    (size,) = struct.unpack("<Q", data[:8])
    begin, end = json.loads(data[8 : 8 + size])["model.norm.weight"]["data_offsets"]
    data[8 + size + begin : 8 + size + end] = struct.pack("<f", float("nan")) * ((end - begin) // 4)
    weights.write_bytes(data)
    write_ids(tmp_path / "ids.safetensors", [1, 2, 3])
    result = call("logits", model, "--input", tmp_path / "ids.safetensors", "--output", tmp_path / "logits.safetensors", status=2)
    assert "the logit of token 0 at position 0 is not a number but nan: the model's weights are damaged" in result.stderr
    assert not (tmp_path / "logits.safetensors").exists()


def test_generate_continues_and_the_seed_decides(call):
    arguments = ["generate", GOLDEN / "model_path_gate", "--prompt", "IF X > 0", "--max-new-tokens", 30, "--seed"]
    first = call(*arguments, 1).stdout
    assert 0 < len(first) <= 30  # fewer if the checkpoint's end token came
    assert first == call(*arguments, 1).stdout
    assert any(first != call(*arguments, seed).stdout for seed in (2, 3))


@pytest.mark.parametrize(
    "option, value",
    [("temperature", "-1"), ("temperature", "nan"), ("temperature", "1e400"), ("temperature", "x"), ("top-p", "0"), ("top-p", "2"), ("top-k", "-1"),
     ("seed", "-1"), ("seed", "18446744073709551616"), ("max-new-tokens", "-1"), ("max-new-tokens", "1.5"), ("max-new-tokens", "9223372036854775808")],
)
def test_S07_options_outside_their_range_are_named(call, option, value):
    result = call("generate", GOLDEN / "model_path", "--prompt", "A", f"--{option}={value}", status=2)
    assert option.replace("-", "_") in result.stderr.replace("-", "_")
    assert result.stdout == ""


def test_prompts_a_model_cannot_read(call):
    refusal = call("generate", GOLDEN / "model_path", "--prompt", "hello", status=2).stderr
    assert "byte 104 at position 0 of the prompt is outside the model's vocabulary of 97: this is not a model of text" in refusal


def test_an_empty_prompt_needs_a_token_to_begin_with(call, tmp_path):
    arguments = ["--prompt", "", "--max-new-tokens", 3]
    assert call("generate", GOLDEN / "model_path", *arguments).stdout
    model = tmp_path / "model"
    shutil.copytree(GOLDEN / "model_path", model)
    config = json.loads((model / "config.json").read_text())
    del config["bos_token_id"]
    (model / "config.json").write_text(json.dumps(config))
    refusal = call("generate", model, *arguments, status=2).stderr
    assert refusal == "pathattn: --prompt is empty, and the model has no token to begin with (bos_token_id): give at least one byte\n"
