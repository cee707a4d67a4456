"""What fewer bits change: the arithmetic of the comparison, and the command against Transformers' own loss."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.frontend.bench.quality import Scores, compare, windows_of
from tests.commands import quire

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "quire" / "demo_model"


def test_differences_are_those_of_the_scores() -> None:
    baseline = Scores(np.array([-1.0, -2.0, -3.0, -4.0]), np.array([5, 6, 7, 8]))
    other = Scores(np.array([-1.5, -2.0, -2.0, -4.5]), np.array([5, 6, 9, 8]))
    assert compare(other, baseline) == (2.5, 0.5, 0.75)
    assert compare(baseline, baseline) == (2.5, 0.0, 1.0)


def test_a_text_is_cut_into_windows() -> None:
    assert windows_of(range(7), 3) == [([0, 1, 2], 1), ([3, 4, 5], 1)]  # one token alone has no probability
    assert windows_of(range(8), 3)[2] == ([6, 7], 1)


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    """Of windows of a text, and of the completions of a file of records."""
    text, records, out = tmp_path / "text.md", tmp_path / "items.jsonl", tmp_path / "figures.json"
    text.write_text("What is the capital of France? The capital of France is Paris, and that of Italy is Rome.")
    record = {"prompt": "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n", "completion": "Hi!<|im_end|>"}
    records.write_text(json.dumps(record) + "\n")
    settings = '{"rounded": {"quantization": "int4"}, "short cache": {"kv_cache_dtype": "int4"}}'
    done = quire(
        "bench", "quality", "--dtype", "float32", "--kv-cache-memory-bytes", "50M", "--text", str(text), str(records),
        "--input-len", "20", "--settings", settings, "--output-json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    prompt, completion = encode(record["prompt"]), encode(record["completion"])
    losses: list[float] = []
    for token_ids, first in [*windows_of(encode(text.read_text()), 20), (prompt + completion, len(prompt))]:
        ids = torch.tensor([token_ids])
        with torch.inference_mode():
            logprobs = model(ids).logits[0, first - 1 : -1].log_softmax(-1)
        losses += (-logprobs.gather(1, ids[0, first:, None])).flatten().tolist()
    assert figures["num_tokens"] == len(losses)
    baseline, *others = figures["settings"].values()
    assert list(figures["settings"]) == ["baseline", "rounded", "short cache"]
    assert baseline["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    assert (baseline["change"], baseline["agreement"]) == (0, 1)
    for other in others:
        assert other["change"] > 0.01
        assert 0.5 < other["agreement"] <= 1
        assert other["loss"] != baseline["loss"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ('[{"quantisation": "int8"}]', "--settings has 'quantisation', which is no option of the engine"),
        (
            '[{"quantization": "int5"}]',
            "--settings quantization=int5: quantization: There is no such value (got 'int5')",
        ),
        ("[", "--settings: Input data was truncated. Give JSON such as "),
    ],
)
def test_settings_that_no_engine_takes_are_refused_before_the_first(tmp_path: Path, settings: str, says: str) -> None:
    text = tmp_path / "text.md"
    text.write_text("some words")
    done = quire("bench", "quality", "--text", str(text), "--settings", settings)
    assert done.returncode == 1
    assert done.stderr.startswith(f"quire bench quality: {says}")
