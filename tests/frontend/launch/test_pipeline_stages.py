"""The layers of pipeline stages."""

import msgspec
import pytest

from quire.core.config.engine_args import EngineArgs
from quire.core.config.model import ModelConfig
from quire.core.config.parallel import ParallelConfig
from quire.core.errors import ConfigError
from quire.frontend.launch.options import resolve
from quire.frontend.launch.pipeline_stages import divide_layers
from tests.frontend.launch.test_options import SPEC


def test_layers_are_divided_evenly_and_the_last_stage_has_the_fewest() -> None:
    assert divide_layers(5, 1, None) == []
    assert divide_layers(6, 3, None) == [2, 2, 2]
    assert divide_layers(5, 2, None) == [3, 2]
    assert divide_layers(7, 3, None) == [2, 3, 2]
    assert divide_layers(8, 3, None) == [3, 3, 2]


def test_a_partition_is_taken_as_it_is() -> None:
    assert divide_layers(16, 3, "4, 6,6") == [4, 6, 6]


@pytest.mark.parametrize("partition", ["4,6", "4,6,7", "8,8,0", "4,6,x", "4,6,6,", "-4,10,10"])
def test_a_partition_that_does_not_fit_is_refused(partition: str) -> None:
    with pytest.raises(ConfigError, match=r"QUIRE_PP_LAYER_PARTITION=.*each of 3 pipeline stages.*16 layers in all"):
        divide_layers(16, 3, partition)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size 3 exceeds the model's 2 layers.*use 2 or less"):
        divide_layers(2, 3, None)


def test_each_stage_has_its_layers_and_one_process_cannot_have_several(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = msgspec.structs.replace(SPEC, num_layers=5)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,4")
    parallel = ParallelConfig(pipeline_parallel_size=2)
    config = resolve(EngineArgs(model=ModelConfig(model="tiny"), parallel=parallel), spec, "server")
    assert config.executor == "mp"
    assert [config.layers_of(stage) for stage in range(2)] == [range(1), range(1, 5)]
    parallel = msgspec.structs.replace(parallel, distributed_executor_backend="uni")
    with pytest.raises(ConfigError, match="uni runs one worker"):
        resolve(EngineArgs(model=ModelConfig(model="tiny"), parallel=parallel), spec, "server")
