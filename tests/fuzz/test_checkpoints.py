"""Headers of safetensors, and config.json: a model, or an error that names the file."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from quire.core.config.model import ModelConfig
from quire.core.errors import ConfigError, ModelLoadError
from quire.executor.weights.tensor_files import SafetensorsFile
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.fuzz.examples import NUMBERS, altered, fuzzed, mutated

torch.set_num_threads(1)
GOOD = save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, {"format": "pt"})
LENGTH = int.from_bytes(GOOD[:8], "little")
HEADER = json.loads(GOOD[8 : 8 + LENGTH])


def check(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        file = SafetensorsFile(path)
        for name in file.names:
            assert file.read(name, None).shape == file.shape(name)
            file.dtype(name)
    except ModelLoadError as error:
        if str(path) not in str(error):
            raise


def test_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F64", "BF16", "F4", "I8", "C64", "x"]),
            "shape": st.lists(NUMBERS, max_size=3),
            "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3),
        }
    )
    with_header = st.one_of(altered(HEADER), st.dictionaries(st.text(max_size=4), entry, max_size=3)).map(json.dumps)

    @fuzzed(60)
    @given(
        st.one_of(
            mutated(GOOD),
            mutated(GOOD[: 8 + LENGTH]).map(lambda head: head + GOOD[8 + LENGTH :]),
            with_header.map(lambda text: len(text).to_bytes(8, "little") + text.encode() + GOOD[8 + LENGTH :]),
        )
    )
    def run(data: bytes) -> None:
        check(path, data)

    run()


def test_configurations(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    config = json.loads((checkpoint("llama") / "config.json").read_text())

    @fuzzed(60)
    @given(altered(config))
    def run(changed: dict[str, Any]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with contextlib.suppress(ConfigError):
            read_model_spec(tmp_path, ModelConfig(model=str(tmp_path)))

    run()
