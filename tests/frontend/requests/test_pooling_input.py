"""What a model that makes vectors says to requests for text."""

import pytest

from quire.core.config.pooling import PoolingSpec
from quire.core.errors import ParameterError
from quire.frontend.requests.pooling_input import PoolingInput

SPEC = PoolingSpec(tasks=["embed", "token_embed"], sequence="CLS", embedding_size=8)


@pytest.mark.parametrize(
    ("is_encoder", "remedy"),
    [(False, "start it with --runner generate for generate"), (True, "an encoder generates no text")],
)
def test_only_a_model_that_can_generate_is_told_the_flag(is_encoder: bool, remedy: str) -> None:
    with pytest.raises(ParameterError) as error:
        PoolingInput(SPEC, "tiny", is_encoder=is_encoder).check_generates()
    assert str(error.value) == f"tiny serves embed, token_embed, and not generate; {remedy}."
    assert error.value.param == "model"
