"""The memory of towers in the plan: their weights, the activations of a step, and the rows that workers keep."""

from pathlib import Path

import pytest

from quire.core.config.resolved import SchedulerLimits
from quire.executor.memory.dry_build import dry_build, held_bytes
from quire.executor.memory.plan import MEDIA_BYTES, media_bytes, num_media_rows, workspace_bytes
from quire.executor.models.base import ReadsMedia
from tests.executor.paged_driver import load_model, model_context, read_spec, transformers_spec
from tests.image_checkpoints import write_checkpoint

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=512)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma3"])
def test_a_dry_build_knows_what_towers_take(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, family)
    spec = read_spec(folder) if family == "qwen3_5" else transformers_spec(folder)  # a file here has its decoder
    context = model_context(spec, reads_media=True)
    dry, loaded = dry_build(spec, context), load_model(spec, reads_media=True)
    assert isinstance(dry, ReadsMedia)
    assert isinstance(loaded, ReadsMedia)
    assert dry.media == loaded.media
    assert held_bytes(dry) == pytest.approx(held_bytes(loaded), rel=0.02)
    alone = load_model(spec)
    assert held_bytes(alone) < held_bytes(dry)

    media, row = media_bytes(spec, loaded, LIMITS), 4 * spec.hidden_size * (3 if family == "qwen3_vl" else 1)
    assert num_media_rows(spec, loaded, LIMITS) == MEDIA_BYTES // row
    assert media.rows <= MEDIA_BYTES < media.rows + row
    assert loaded.media is not None
    assert media.encoding == 512 * loaded.media.activation_size * 4
    whole = workspace_bytes(spec, loaded, LIMITS, 0)
    assert whole - workspace_bytes(spec, alone, LIMITS, 0) >= media.rows
    assert whole - workspace_bytes(spec, loaded, LIMITS, 0, counts_towers=False) >= 0
    assert num_media_rows(spec, alone, LIMITS) == 0
