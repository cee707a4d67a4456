"""lm-format-enforcer: nothing to compile; the constraint is only tried here, and read again by each worker."""

import msgspec

from quire.core.light_import import without
from quire.core.protocol import Vocabulary
from quire.frontend.grammar.backends.backend import GrammarError
from quire.frontend.grammar.constraint import Constraint
from quire.frontend.grammar.gaps import NUMBER_WORDS, keyword_gap

with without("torch"):  # for bit masks, which it is not asked for
    from lmformatenforcer import CharacterLevelParserConfig, JsonSchemaParser, RegexParser

_MISSING = frozenset(
    {
        *NUMBER_WORDS,
        *("minProperties", "maxProperties", "patternProperties", "prefixItems", "unevaluatedItems", "format"),
    }
)
_KINDS = ("json", "json_object", "regex", "choice")


class LMFormatEnforcerBackend:
    """See `Backend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        del vocabulary

    def compile(self, constraint: Constraint) -> bytes:
        if constraint.kind not in _KINDS:
            raise GrammarError(f"{constraint.kind} is not supported")
        try:
            if constraint.kind == "json":
                schema = msgspec.json.decode(constraint.text)
                if (gap := keyword_gap(schema, _MISSING)) is not None:
                    raise GrammarError(f"{gap} is not supported as it is used here")
                JsonSchemaParser(schema, CharacterLevelParserConfig())
            elif constraint.kind == "regex":
                RegexParser(constraint.text)
        except GrammarError:
            raise
        except Exception as error:  # whatever a parser in Python stumbles over
            raise GrammarError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from None
        return msgspec.msgpack.encode([constraint.kind, constraint.text])
