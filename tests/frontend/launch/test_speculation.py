"""The options of drafts: vLLM's object with all keys, the short flags, and what an engine makes of them."""

import importlib.resources
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.core.config.engine_args import EngineArgs
from quire.core.config.model import ModelConfig
from quire.core.config.resolved import EngineConfig
from quire.core.config.speculative import Speculation, SpeculativeOptions
from quire.core.errors import ConfigError
from quire.frontend.checkpoint.model_spec import read_model_spec
from quire.frontend.cli import serve
from quire.frontend.launch.draft_vocabulary import share_vocabulary
from quire.frontend.launch.keywords import read_keywords
from quire.frontend.launch.options import resolve
from quire.frontend.launch.speculation import read_draft
from quire.frontend.text.tokenizer import Tokenizer
from tests.frontend.refusals.test_flags import parser_of
from tests.frontend.text import tokenizers_zoo


def resolved(folder: Path, **options: Any) -> EngineConfig:
    args = read_keywords({"model": str(folder), "device": "cpu", **options})
    spec = read_model_spec(folder, ModelConfig(model=str(folder)))
    return resolve(args, spec, "server", draft=read_draft(args, spec))


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.mark.parametrize(
    "words",
    [
        """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""",
        """-sc '{"method": "ngram", "num_speculative_tokens": 3}'""",
        "--speculative-config.method ngram --speculative-config.num_speculative_tokens 3",
        "--spec-method ngram --spec-tokens 3",
        "--speculative-config.method ngram --spec-tokens 3",
    ],
)
def test_all_spellings_are_one_option(words: str) -> None:
    args = parser_of(serve).parse_args(["some-model", *shlex.split(words)])
    assert args.engine_args.speculative.options == SpeculativeOptions(method="ngram", num_speculative_tokens=3)


def test_an_option_that_is_given_twice_is_refused() -> None:
    args = EngineArgs.from_flat(speculative_config={"method": "ngram"}, spec_method="suffix")
    with pytest.raises(ConfigError, match=r"--spec-method and --speculative-config\.method are one option"):
        _ = args.speculative.options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "ngrams"}, r"method: choose from .*ngram.* \(got 'ngrams'\)"),
        ({"num_speculative_tokens": 3}, "needs a method: one of"),
        ({"method": "draft_model"}, "reads a checkpoint: name it as model"),
        ({"method": "ngram", "model": "m"}, "reads no checkpoint: leave model out"),
        ({"method": "custom_class", "model": "nothing"}, "needs the class as model"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "speculative_config"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "speculative_config"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "prompt_lookup_min 4 is above"),
        ({"method": "ngram", "rejection_sample_method": "fly"}, "rejection_sample_method: .*take standard"),
        ({"method": "ngram", "tensor_parallel_size": 2}, "write draft_tensor_parallel_size"),
        ({"method": "ngram", "synthetic_acceptance_length": 2.0}, "synthetic_acceptance_length: .*leave it out"),
        ({"method": "ngram", "synthetic_acceptance_rates": [0.9]}, "synthetic_acceptance_rates: .*leave it out"),
        ({"method": "ngram", "use_heterogeneous_vocab": True}, "use_heterogeneous_vocab is for the method draft_model"),
        ({"method": "mtp", "parallel_drafting": True}, "parallel_drafting is for the method draft_model"),
        ({"method": "ngram", "draft_sample_method": "gumbel"}, "speculative_config"),
        ({"method": "ngram", "fly_entropy_top_k": 4}, "fly_entropy_top_k: .*leave it out"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "speculative_config"),
        (
            {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 3], [4, 9, 1]]},
            r"mend \[4, 9, \.\.\.\]",
        ),
        ({"method": "ngram", "no_such_key": 1}, "no_such_key"),
    ],
)
def test_wrong_values_are_refused_with_the_remedy(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(folder, speculative_config=options)


def test_every_key_of_vllms_is_taken_with_its_default() -> None:
    """The keys that a user sets, with the defaults of vLLM 0.33's class, without `method` and the number of drafts."""
    defaults: dict[str, Any] = dict.fromkeys((
        *("enforce_eager", "model", "draft_tensor_parallel_size", "tensor_parallel_size", "quantization"),
        *("moe_backend", "attention_backend", "kv_cache_dtype", "max_model_len", "revision", "code_revision"),
        *("index_share_for_mtp_iteration", "draft_lm_head_quantization", "prompt_lookup_max", "prompt_lookup_min"),
        *("num_speculative_tokens_per_batch_size", "draft_load_config", "synthetic_acceptance_rates"),
        *("synthetic_acceptance_length", "dspark_draft_topk", "xpress_topc", "fly_window_size"),
    ))  # fmt: skip
    defaults |= dict.fromkeys((
        *("disable_padded_drafter_batch", "disable_eagle_block_drop", "disable_lookahead_block_hashes"),
        *("use_local_argmax_reduction", "use_heterogeneous_vocab", "parallel_drafting"),
    ), False)  # fmt: skip
    defaults |= {
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10000,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
        "rejection_sample_method": "standard",
        "draft_sample_method": "greedy",
        "fly_entropy_threshold": 0.3,
        "fly_entropy_top_k": 3,
        "enable_adaptive_verification": False,
    }
    args = EngineArgs.from_flat(speculative_config={"method": "suffix", **defaults})
    assert Speculation.of(args.speculative.options).method == "suffix"


def test_drafts_can_be_left_out(folder: Path) -> None:
    assert resolved(folder, spec_method="off").speculation is None


def test_defaults_are_filled_in(folder: Path) -> None:
    assert resolved(folder).speculation == Speculation()
    always = resolved(folder, speculative_config={"enable_adaptive_verification": False}).speculation
    assert always == Speculation(is_adaptive=False)
    ngram = resolved(folder, speculative_config={"method": "ngram_gpu", "prompt_lookup_max": 4}).speculation
    assert ngram is not None
    assert (ngram.method, ngram.num_tokens, ngram.prompt_lookup_min, ngram.prompt_lookup_max) == ("ngram", 8, 4, 4)
    suffix = resolved(folder, speculative_config={"method": "suffix"}).speculation
    assert suffix is not None
    assert (suffix.num_tokens, suffix.most_drafts, suffix.is_adaptive) == (24, 24, True)


def test_a_draft_model_is_read_as_the_target_is(folder: Path, checkpoint: Callable[..., Path]) -> None:
    draft = str(checkpoint("gemma2"))
    options = {"model": draft, "num_speculative_tokens": 3, "quantization": "int8", "kv_cache_dtype": "fp8"}
    config = resolved(folder, speculative_config=options)
    assert config.draft_model is not None
    assert (config.draft_model.spec.path, config.draft_model.quantization) == (draft, "int8")
    own = config.of_draft_model()
    assert own is not None
    assert (own.cache.kv_cache_dtype, config.cache.kv_cache_dtype) == ("fp8", "auto")
    assert config.limits.num_lookahead_tokens == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"prefill_context_parallel_size": 2}, "take ngram or suffix"),
        ({"tensor_parallel_size": 2}, "draft_tensor_parallel_size 1: .*make it 2"),
        ({"runner": "pooling"}, "samples no tokens"),
    ],
)
def test_drafts_that_no_engine_can_make_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    asked = {"model": str(folder), "draft_tensor_parallel_size": 1}
    with pytest.raises(ConfigError, match=message):
        resolved(folder, speculative_config=asked, **options)


def test_a_draft_model_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--speculative-config\.model /no/such/folder: "):
        resolved(folder, speculative_config={"model": "/no/such/folder"})


def test_drafts_at_once_need_a_mask_token(folder: Path, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    options = {"model": str(checkpoint("gemma2")), "parallel_drafting": True}
    with pytest.raises(ConfigError, match=r"must name a mask token as pard_token or ptd_token_id, .* got None"):
        resolved(folder, speculative_config=options)
    shutil.copytree(checkpoint("gemma2"), tmp_path / "draft")
    stated = json.loads((tmp_path / "draft" / "config.json").read_bytes())
    (tmp_path / "draft" / "config.json").write_text(json.dumps({**stated, "pard_token": 11}))
    speculation = resolved(folder, speculative_config={**options, "model": str(tmp_path / "draft")}).speculation
    assert speculation is not None
    assert speculation.mask_token_id == 11
    both = {**options, "use_heterogeneous_vocab": True}
    with pytest.raises(ConfigError, match="leave use_heterogeneous_vocab out"):
        resolved(folder, speculative_config=both)


def test_the_tokens_of_another_vocabulary_are_found_by_text(folder: Path, checkpoint: Callable[..., Path]) -> None:
    """The demo model has other merges and special tokens, and fewer tokens than needed without the option."""
    demo = Path(str(importlib.resources.files("quire") / "demo_model"))
    small = {"model": str(folder), "use_heterogeneous_vocab": True}
    config = resolved(demo, speculative_config=small)
    assert config.draft_model is not None
    shared = config.draft_model.vocabulary
    assert shared is not None
    ours, theirs = Tokenizer.from_folder(demo), Tokenizer.from_folder(folder)
    assert len(shared.input_ids) == len(shared.output_ids) == config.spec.vocab_size
    assert sum(own >= 0 for own in shared.output_ids) > 256
    for token_id, own in enumerate(shared.output_ids):
        if own >= 0 and token_id not in ours.special_token_ids:
            assert ours.piece(token_id) == theirs.piece(own)
    eos = ours.token_id(ours.special_tokens["eos_token"])
    assert eos is not None
    assert shared.output_ids[eos] == theirs.token_id(theirs.special_tokens["eos_token"])
    [whole] = ours.encode(" capital", add_special_tokens=False)
    assert shared.output_ids[whole] == -1
    assert ours.piece(whole).endswith(theirs.piece(shared.input_ids[whole]))
    with pytest.raises(ConfigError, match="or set use_heterogeneous_vocab"):
        resolved(demo, speculative_config={"model": str(folder)})


def test_bytes_stand_for_what_has_no_other_token(folder: Path, tmp_path: Path) -> None:
    path = tokenizers_zoo.save(tokenizers_zoo.byte_fallback(), tmp_path)
    tokenizer = Tokenizer.from_folder(path)
    spec = msgspec.structs.replace(resolved(folder).spec, tokenizer_path=str(path), vocab_size=tokenizer.vocab_size)
    letter, byte_of_letter, byte = (tokenizer.token_id(token) for token in ("s", "<0x73>", "<0x41>"))
    assert letter is not None
    assert byte_of_letter is not None
    assert byte is not None
    shared = share_vocabulary(spec, spec)
    assert [shared.output_ids[token] for token in (letter, byte_of_letter, byte)] == [letter, -1, byte]
