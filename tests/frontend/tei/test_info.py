"""GET /info: the names of poolings are those of Text Embeddings Inference."""

from types import SimpleNamespace
from typing import Any

import pytest

from quire.core.config.pooling import PoolingSpec, SequencePooling
from quire.core.config.resolved import SchedulerLimits
from quire.frontend.pooling.tasks import Tasks
from quire.frontend.tei.info import describe_model


@pytest.mark.parametrize(("pooling", "name"), [("CLS", "cls"), ("MEAN", "mean"), ("LAST", "last_token")])
def test_names_of_poolings(pooling: SequencePooling, name: str) -> None:
    config = SimpleNamespace(
        pooling=PoolingSpec(tasks=["embed"], sequence=pooling, embedding_size=8),
        limits=SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=64),
        spec=SimpleNamespace(dtype="float32"),
    )
    engine: Any = SimpleNamespace(config=config, model=SimpleNamespace(name="tiny", folder="x"), max_model_len=64)
    kind = describe_model(engine, Tasks(engine)).model_type
    assert kind.embedding is not None
    assert kind.embedding.pooling == name
