"""Opens a checkpoint in the format that `--load-format` names."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quire.core.config.load import LoadConfig
from quire.core.config.parallel import ExpertPlacement
from quire.core.config.quantization import Quantization
from quire.core.config.resolved import ModelSpec
from quire.core.wire.gguf_table import read_gguf_table
from quire.executor.weights.dummy import DummyWeights
from quire.executor.weights.file_weights import FileWeights
from quire.executor.weights.files import WeightFiles, find_files
from quire.executor.weights.gguf_names import GgufNames
from quire.executor.weights.names import HubNames, MistralNames, Names
from quire.executor.weights.readers import WeightReader
from quire.executor.weights.sharded_state import MANIFEST, ShardedWeights

if TYPE_CHECKING:
    from quire.executor.weights.progress_bar import ProgressBar


def open_weights(
    spec: ModelSpec,
    load: LoadConfig,
    dtype: torch.dtype,
    *,
    quantization: Quantization | None = None,
    rank: int = 0,
    num_ranks: int = 1,
    expert_placement: ExpertPlacement | None = None,
    seed: int = 0,
    show_progress: bool = False,
) -> WeightReader:
    """Builds the reader that `load.load_format` asks for. `show_progress` draws a bar when stderr is a terminal.

    Raises:
        ModelLoadError: the folder has no weights in this format, or a file is not what its name says.
    """
    if load.load_format == "dummy":
        return DummyWeights(dtype, seed)
    folder = Path(spec.path)
    if load.load_format == "sharded_state" or (load.load_format == "auto" and (folder / MANIFEST).is_file()):
        return ShardedWeights(folder, dtype, quantization, rank, num_ranks, expert_placement)
    files = find_files(folder, load.load_format)
    return FileWeights(
        files, _names(files, spec), dtype, _progress_bar() if show_progress and load.use_tqdm_on_load else None
    )


def _names(files: WeightFiles, spec: ModelSpec) -> Names:
    if files.is_gguf:
        [table] = files.paths
        return GgufNames.of(spec, read_gguf_table(table).architecture)
    return MistralNames(spec.head_dim) if files.has_mistral_names else HubNames()


def _progress_bar() -> "ProgressBar | None":
    if not sys.stderr.isatty():
        return None
    from quire.executor.weights.progress_bar import ProgressBar  # 90 ms, saved without a terminal

    return ProgressBar()
