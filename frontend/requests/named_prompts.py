"""The texts that a checkpoint has for uses, such as queries: one of them goes before each text of a request."""

from quire.core.config.pooling import PoolingSpec
from quire.core.errors import ParameterError
from quire.frontend.requests.async_tokenizer import AsyncTokenizer


def named_prompt(spec: PoolingSpec | None, name: str) -> str:
    """The text with this name.

    Raises:
        ParameterError: there is none.
    """
    known = {} if spec is None else spec.prompts
    if name not in known:
        names = f"those of this model are {', '.join(known)}" if known else "this model has none"
        raise ParameterError(f"There is no prompt_name {name!r}: {names}.", param="prompt_name")
    return known[name]


def num_lead_tokens(tokenizer: AsyncTokenizer, spec: PoolingSpec | None, before: str) -> int:
    """The first tokens of a prompt that belong to `before`, its named text, and that the mean of its tokens leaves out.

    Tokens that the tokenizer adds at the begin belong to it as well, as in sentence-transformers.
    """
    if not before or spec is None or spec.includes_prompt:
        return 0
    token_ids = tokenizer.tokenizer.encode(tokenizer.spelled(before))
    return len(token_ids) - tokenizer.added_tokens(token_ids).behind
