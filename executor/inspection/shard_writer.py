"""Writes a checkpoint as shards: the tensors that each rank would read, in separate files."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.core.config.resolved import EngineConfig
from quire.core.wire.inspection import FilesSaved
from quire.executor.backends import bind
from quire.executor.inspection.folders import copy_others, make_empty
from quire.executor.layers.context import ModelContext
from quire.executor.memory.dry_build import Read, ShapeReader, dry_build
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.formats import open_weights
from quire.executor.weights.readers import WeightReader
from quire.executor.weights.sharded_state import MANIFEST, Manifest, file_name, key_of

PART_BYTES = 4 << 30
"""About the most bytes of one file, which are in memory before it is written."""


def save_shards(config: EngineConfig, folder: Path) -> FilesSaved:
    """Writes the tensors that each of `config`'s ranks reads, and copies the checkpoint's other files.

    The model is built without memory to find its reads, so no rank has to run.

    Raises:
        ModelLoadError: the checkpoint cannot be read, or `folder` cannot be created or has files already.
    """
    spec, size = config.spec, config.layout.tensor
    dtype, device = getattr(torch, spec.dtype), torch.device(config.device)
    make_empty(folder)
    num_files = num_bytes = 0
    with (
        contextlib.closing(open_weights(spec, config.load, dtype, seed=config.seed)) as weights,
        torch.inference_mode(),
    ):
        for rank in range(size):
            reader = ShapeReader(dtype, weights)
            context = ModelContext.of(config, bind(config.device), ParallelGroup(rank, size), device, reader)
            dry_build(spec, context, reader)
            for part, tensors in enumerate(_parts(weights, reader.reads)):
                save_file(tensors, folder / file_name(rank, part))
                num_files += 1
                num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        shapes = dict(weights.shapes or {read.name: read.shape for read in reader.reads})
    copy_others(Path(spec.path), folder)
    manifest = Manifest(
        tensor_parallel_size=size,
        expert_placement=config.expert_placement,
        dtype=spec.dtype,
        quantization=config.quantization,
        shapes=shapes,
    )
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))  # last: a folder without it was not finished
    return FilesSaved(num_files, num_bytes)


def _parts(weights: WeightReader, reads: list[Read]) -> Iterator[dict[str, Tensor]]:
    """Yields the tensors that were read, each once, by their names in the file."""
    part: dict[str, Tensor] = {}
    seen: set[str] = set()
    for read in reads:
        key = key_of(read.name, read.shard)
        if key in seen:
            continue
        seen.add(key)
        part[key] = weights.read(*read)
        if sum(tensor.nbytes for tensor in part.values()) >= PART_BYTES:
            yield part
            part = {}
    if part:
        yield part
