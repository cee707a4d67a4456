"""Loading of logits processors; tests/frontend/requests/test_sampling_features.py has them on an engine."""

import pytest
import torch

from quire.core.errors import ModelLoadError
from quire.executor.sampling.custom import ProcessorContext, load_processors

CONTEXT = ProcessorContext(4, 10, torch.device("cpu"))


def test_classes_are_loaded_in_order() -> None:
    loaded = load_processors(["tests.executor.processors:Forced", "tests.executor.processors:Broken"], CONTEXT)
    assert [type(each._processor).__name__ for each in loaded] == ["Forced", "Broken"]
    assert load_processors([], CONTEXT) == []


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("tests.executor.processors", "module:Class"),
        ("no_such_module:Forced", "cannot be imported"),
        ("tests.executor.processors:Missing", "cannot be imported"),
        ("tests.executor.processors:NoProcessor", "no subclass of quire.LogitsProcessor"),
        ("tests.executor.processors:Unbuildable", "no table"),
    ],
)
def test_what_cannot_be_loaded_names_the_flag(name: str, complaint: str) -> None:
    with pytest.raises(ModelLoadError, match=complaint) as caught:
        load_processors([name], CONTEXT)
    assert "--logits-processors" in str(caught.value)
