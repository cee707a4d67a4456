"""Texts for tokenizers: each has its tokens and comes back; broken Unicode is refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.text.detokenizer import Detokenizer
from quire.frontend.text.tokenizer import Tokenizer
from tests.frontend.text import tokenizers_zoo
from tests.frontend.text.tokenizers_zoo import save
from tests.fuzz.examples import fuzzed

ANY = st.characters()
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    st.text("aA \n\t<s>/éü你🙂‍\u0301\u200d\x00", max_size=60),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(save(tokenizers_zoo.byte_level(), tmp_path_factory.mktemp("fuzz")))


def test_texts_come_back(tokenizer: Tokenizer) -> None:
    @fuzzed(150)
    @given(TEXTS)
    def run(text: str) -> None:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
        assert tokenizer.encode_batch([text], add_special_tokens=False) == [token_ids]
        assert b"".join(map(tokenizer.piece, token_ids)).decode() == text
        assert tokenizer.least_tokens(text) <= len(token_ids)

    run()


def test_any_ids_have_a_text_token_by_token(tokenizer: Tokenizer) -> None:
    @fuzzed(150)
    @given(st.lists(st.one_of(st.integers(0, 300), st.integers(-5, 2**33)), max_size=30))
    def run(token_ids: list[int]) -> None:
        known = [token_id for token_id in token_ids if 0 <= token_id < tokenizer.vocab_size]
        detokenizer = Detokenizer(tokenizer, [], SamplingParams(skip_special_tokens=False))
        text = "".join(detokenizer.push([token_id])[0] for token_id in known) + detokenizer.finish()
        assert text == tokenizer.decode(known, skip_special_tokens=False)

    run()


def test_broken_unicode_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    @fuzzed(40)
    @given(st.text(ANY, max_size=10), st.characters(categories=["Cs"]), st.text(ANY, max_size=10))
    def run(before: str, surrogate: str, after: str) -> None:
        with pytest.raises(ParameterError, match="surrogate"):
            tokenizer.encode(before + surrogate + after)

    run()
