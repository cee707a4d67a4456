"""A grammar library enforces every schema that it accepts: random schemas, whose random outputs are validated."""

import json
import random

import numpy as np
import pytest
from jsonschema import Draft202012Validator, FormatChecker

from quire.core.wire.protocol import Vocabulary
from quire.executor.sampling.grammar.guidance_matcher import GuidanceLoader
from quire.executor.sampling.grammar.matcher import Loader, Matcher
from quire.executor.sampling.grammar.xgrammar_matcher import XGrammarLoader
from quire.frontend.grammar.backends.backend import Backend, GrammarError
from quire.frontend.grammar.backends.guidance_backend import GuidanceBackend
from quire.frontend.grammar.backends.xgrammar_backend import XGrammarBackend
from quire.frontend.grammar.constraint import Constraint
from quire.frontend.grammar.non_strict_schemas import loosened
from quire.frontend.grammar.normalized import normalize
from quire.frontend.grammar.schema import SchemaError
from quire.frontend.grammar.unenforced_keywords import xgrammar_gap
from tests.schemas import KeywordMixer, Schema

END = 256
BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), b""], [END])
BACKENDS = {
    "xgrammar": (XGrammarBackend(BYTES), XGrammarLoader(BYTES)),
    "guidance": (GuidanceBackend(BYTES), GuidanceLoader(BYTES)),
}
LIKELY = set(b'abckx01259-.:"{}[],trufalsn ')
CLOSING = set(b'"}]')


def wander(matcher: Matcher, dice: random.Random) -> bytes | None:
    """A random output, more often short than long; None if it does not end soon."""
    out = b""
    bitmask = np.zeros((1, -(-(END + 1) // 32)), np.int32)
    while len(out) < 300:
        matcher.fill(bitmask, 0)
        allowed = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")[: END + 1]).tolist()
        if allowed[-1] == END and (len(allowed) == 1 or dice.random() < 0.5):
            return out
        closing, likely = ([byte for byte in allowed if byte in some] for some in (CLOSING, LIKELY))
        choices = closing if closing and dice.random() < 0.4 else likely or [byte for byte in allowed if byte != END]
        byte = dice.choice(choices)
        assert matcher.accept(byte)
        out += bytes([byte])
    return None


def constraint(schema: Schema, dice: random.Random) -> Constraint:
    """A constraint with the schema alone, or in a structural tag."""
    options = {"backends": ("xgrammar", "guidance"), "closed": True, "any_whitespace": dice.random() < 0.5}
    if dice.random() < 0.7:
        return Constraint("json", json.dumps(schema), **options)
    form = {"type": "tag", "begin": "", "content": {"type": "json_schema", "json_schema": schema}, "end": ";"}
    return Constraint("structural_tag", json.dumps({"format": form}), **options)


@pytest.mark.turns(4)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_keyword_is_left_out_in_silence(backend: str, seed: int) -> None:
    assert num_valid_outputs(*BACKENDS[backend], seed=seed, num_schemas=250) > 60


def test_lm_format_enforcer_takes_little_and_holds_to_that() -> None:
    pytest.importorskip("lmformatenforcer")
    from quire.executor.sampling.grammar.lm_format_enforcer_matcher import LMFormatEnforcerLoader
    from quire.frontend.grammar.backends.lm_format_enforcer_backend import LMFormatEnforcerBackend

    library, loader = LMFormatEnforcerBackend(BYTES), LMFormatEnforcerLoader(BYTES)
    assert num_valid_outputs(library, loader, seed=1, num_schemas=1600) > 20


def num_valid_outputs(library: Backend, loader: Loader, *, seed: int, num_schemas: int) -> int:
    """Makes schemas, and two outputs of each schema that the library accepts; all must be valid."""
    mixer, dice = KeywordMixer(seed), random.Random(seed)
    num_outputs = 0
    for _ in range(num_schemas):
        schema = mixer.make()
        try:
            loaded = loader.load(library.compile(constraint(schema, dice)))
        except (GrammarError, SchemaError):
            continue
        for _ in range(2):
            if (out := wander(loader.matcher(loaded), dice)) is not None:
                value = json.loads(out.decode().rstrip(";"))
                errors = Draft202012Validator(schema, format_checker=FormatChecker(["uuid"])).iter_errors(value)
                assert [error.message for error in errors] == [], (schema, value)
                num_outputs += 1
    return num_outputs


def test_a_loosened_schema_takes_all_that_the_schema_does() -> None:
    """XGrammar enforces the loosened schema."""
    library, loader = BACKENDS["guidance"]
    mixer, dice = KeywordMixer(9), random.Random(9)
    num_outputs = 0
    for _ in range(400):
        schema = mixer.make()
        loose = loosened(schema)
        assert xgrammar_gap(normalize(loose, closed=False), strict=False) is None, schema
        try:
            loaded = loader.load(library.compile(constraint(schema, dice)))
        except (GrammarError, SchemaError):
            continue
        if (out := wander(loader.matcher(loaded), dice)) is not None:
            value = json.loads(out.decode().rstrip(";"))
            assert Draft202012Validator(loose).is_valid(value), (schema, loose, value)
            num_outputs += 1
    assert num_outputs > 60
