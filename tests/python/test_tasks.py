"""The synthetic tasks and the explicit models through the program: every recipe of state tracking trains, and every task is evaluated."""

import json
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes/state-tracking"
SMALL = {"model.hidden_size": 16, "model.num_heads": 2, "model.intermediate_size": 16, "train.batch_size": 4, "train.steps": 3, "train.log_every": 1}


def fields(values):
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


def evaluate(call, *arguments):
    return json.loads(call("evaluate", *arguments).stdout)


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_recipes_train_and_evaluate(call, tmp_path, recipe):
    call("train", recipe, "--output", tmp_path / "run", *fields(SMALL))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    result = evaluate(call, tmp_path / "run", "--sequences", 3)
    assert result["run"]["steps"] == 3
    if result["task"] == "word_problem":
        assert [line["tokens_per_row"] for line in lines] == [10, 10, 10]
        assert all(0 <= line["last_accuracy"] <= 1 for line in lines)
        assert list(result["accuracy"]) == [str(length) for length in range(1, 21)]
        assert (result["group"], result["prefix"], result["words"]) == ("a5", 8, 3)
    else:
        assert "tokens_per_row" not in lines[0]
    if result["task"] == "mqrar":
        assert 0 <= result["accuracy"] <= 100 and result["n_back"] == 1
        assert 3 * 768 / 2 - 3 * 32 <= result["recalls"] < 3 * 768 / 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_explicit_models_make_no_mistake(call, tmp_path, precision):
    for name in ("flip_flop", "swap_identity"):
        call("construct", name, "--output", tmp_path / name)
    recipe = RECIPES / "flip-flop.toml"
    result = evaluate(call, tmp_path / "flip_flop", "--recipe", recipe, "--precision", precision, "--sequences", 40)
    assert [result[name] for name in ("in_distribution", "sparse", "dense")] == [0, 0, 0]
    length = ["--set", "train.tokens=4096", "--sequences", 2]
    result = evaluate(call, tmp_path / "flip_flop", "--recipe", recipe, "--precision", precision, *length)
    assert [result[name] for name in ("in_distribution", "sparse", "dense")] == [0, 0, 0]
    result = evaluate(call, tmp_path / "swap_identity", "--recipe", RECIPES / "swap-identity.toml", "--precision", precision, *length)
    assert result["accuracy"] == {"same": 100, "moved": 100}
    assert sum(result["products"].values()) == 2 * 4096


def test_evaluate_refuses_a_field_that_it_does_not_know(call, tmp_path):
    call("construct", "flip_flop", "--output", tmp_path / "model")
    misspelt = ["--recipe", RECIPES / "flip-flop.toml", "--set", "data.tset_reads=10"]
    assert "data.test_reads" in call("evaluate", tmp_path / "model", *misspelt, status=2).stderr


def test_construct_refuses_what_is_there_and_what_it_does_not_know(call, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").write_text("kept")
    assert "exists already" in call("construct", "flip_flop", "--output", tmp_path / "mine", status=2).stderr
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]
    assert "swap_identity" in call("construct", "parity", "--output", tmp_path / "new", status=2).stderr
    assert not (tmp_path / "new").exists()
