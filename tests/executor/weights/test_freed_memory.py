"""Memory while weights are loaded: hardly more than what stays of them."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from quire.executor.weights.freed_memory import STEP_BYTES

pytestmark = pytest.mark.turns(4, among="whole systems")

_HIDDEN, _INTERMEDIATE, _NUM_LAYERS, _VOCABULARY = 1024, 4096, 12, 64
_LAYER_BYTES = 2 * (4 * _HIDDEN * _HIDDEN + 3 * _HIDDEN * _INTERMEDIATE)

LOAD = """
import sys, threading
from pathlib import Path
from quire import ops
from tests.executor.paged_driver import load_model, read_spec

def own_bytes():
    [line] = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024

def watch():
    global peak
    while not is_done.wait(0.001):
        peak = max(peak, own_bytes())

folder, quantization = sys.argv[1:]
spec = read_spec(Path(folder), dtype="bfloat16")
ops.bind("cpu")
peak, is_done = 0, threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(spec, quantization=None if quantization == "none" else quantization)
is_done.set()
watcher.join()
peak = max(peak, own_bytes())
ops.settle("cpu")
print(peak - own_bytes())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of zeros, in a file with holes that take no disk."""
    folder = tmp_path_factory.mktemp("zeros")
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": _HIDDEN, "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _NUM_LAYERS, "num_attention_heads": 16, "vocab_size": _VOCABULARY,
        "max_position_embeddings": 128,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, list[int]] = {
        "model.embed_tokens.weight": [_VOCABULARY, _HIDDEN],
        "lm_head.weight": [_VOCABULARY, _HIDDEN],
        "model.norm.weight": [_HIDDEN],
    }
    for layer in (f"model.layers.{index}" for index in range(_NUM_LAYERS)):
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": [_HIDDEN, _HIDDEN] for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": [_INTERMEDIATE, _HIDDEN] for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = [_HIDDEN, _INTERMEDIATE]
        shapes |= {f"{layer}.{name}_layernorm.weight": [_HIDDEN] for name in ("input", "post_attention")}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)
    return folder


@pytest.mark.parametrize("quantization", ["none", "int8", "fp8", "int4"])
def test_hardly_more_is_in_memory_than_what_stays(quantization: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), quantization], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 * _LAYER_BYTES + STEP_BYTES
