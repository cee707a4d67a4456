"""Two texts as one input: the tokens and types are those of Transformers."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from quire.core.errors import ParameterError
from quire.frontend.text.pairs import PairLimits
from quire.frontend.text.tokenizer import Tokenizer
from tests.checkpoints import make_tokenizer

FIRST, SECOND = "The quick brown fox", "A quire is a gathering of pages; the heart of the engine"
PAIRS = [(FIRST, SECOND), (SECOND, FIRST), (FIRST, FIRST), ("", SECOND), (FIRST, ""), ("", "")]


def with_template(folder: Path, pair: str) -> PreTrainedTokenizerFast:
    """The tests' tokenizer with a template for pairs, saved in `folder`."""
    plain = make_tokenizer()
    library: Library = plain.backend_tokenizer
    library.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|im_start|> $A <|im_end|>",
                pair=pair,
                special_tokens=[(token, library.token_to_id(token)) for token in ("<|im_start|>", "<|im_end|>")],
            ),
        ]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.save_pretrained(folder)
    return made


@pytest.mark.parametrize("pair", ["<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1", "<|im_start|> $A <|im_end|> $B"])
@pytest.mark.parametrize("length", [None, 40, 20, 13, 8, 4])
def test_pairs_are_those_of_transformers(tmp_path: Path, pair: str, length: int | None) -> None:
    theirs = with_template(tmp_path, pair)
    ours = Tokenizer.from_folder(tmp_path).encode_pairs(PAIRS, PairLimits(whole=length).cut)
    for each, texts in zip(ours, PAIRS, strict=True):
        expected = theirs([texts], truncation=length is not None, max_length=length, return_token_type_ids=True)
        assert [each.token_ids] == expected["input_ids"], texts
        assert [each.types] == expected["token_type_ids"], texts
        assert each.second_text_types == (each.types if 1 in each.types else None)


def test_either_text_has_a_limit(tmp_path: Path) -> None:
    theirs = with_template(tmp_path, "<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1")
    [pair] = Tokenizer.from_folder(tmp_path).encode_pairs([(FIRST, SECOND)], PairLimits(3, 5).cut)
    first, second = (theirs(text, add_special_tokens=False)["input_ids"] for text in (FIRST, SECOND))
    start, end = theirs.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert pair.token_ids == [start, *first[:3], end, *second[:5], end]


def test_a_text_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    with_template(tmp_path, "$A $B")
    with pytest.raises(ParameterError, match="surrogate"):
        Tokenizer.from_folder(tmp_path).encode_pairs([(FIRST, "a\ud800")], PairLimits().cut)
