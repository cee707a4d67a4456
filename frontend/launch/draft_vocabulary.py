"""Finds the tokens of a draft model with another tokenizer than its target's, by their texts (arXiv:2502.05202)."""

from pathlib import Path

from quire.core.config.resolved import ModelSpec, SharedVocabulary
from quire.core.errors import ConfigError
from quire.frontend.text.tokenizer import Tokenizer

_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


def share_vocabulary(target: ModelSpec, draft: ModelSpec) -> SharedVocabulary:
    """Returns the draft model's ids of the target's tokens.

    Tokens are the same if their bytes are, special tokens if their role or their spelling is. For a token that the
    draft model spells with several, it reads the last of these.

    Raises:
        ConfigError: a tokenizer cannot be read, or no text is a token of both.
    """
    ours, theirs = _tokenizer_of(target), _tokenizer_of(draft)
    size = min(theirs.vocab_size, draft.vocab_size)
    by_text: dict[bytes, int] = {}
    for token_id in range(size):
        if token_id in theirs.special_token_ids or not (piece := theirs.piece(token_id)):
            continue
        if piece not in by_text or theirs.is_byte_token(by_text[piece]):  # which stands for what has no token
            by_text[piece] = token_id
    shared = SharedVocabulary([0] * target.vocab_size, [-1] * target.vocab_size)
    roles = {token: role for role in reversed(_ROLES) if (token := ours.special_tokens.get(role)) is not None}
    for token_id in range(min(ours.vocab_size, target.vocab_size)):
        if token_id in ours.special_token_ids:
            spelling = ours.token(token_id) or ""
            found = theirs.token_id(theirs.special_tokens.get(roles.get(spelling, ""), spelling))
        else:
            found = by_text.get(ours.piece(token_id))
            if found is not None and ours.is_byte_token(token_id) and not theirs.is_byte_token(found):
                found = None  # another token of ours has this text
        if found is not None and found < size:
            shared.input_ids[token_id] = shared.output_ids[token_id] = found
        elif text := ours.piece(token_id).decode("utf-8", "replace"):
            parts = theirs.encode(text, add_special_tokens=False)
            shared.input_ids[token_id] = min(parts[-1], size - 1) if parts else 0
    if max(shared.output_ids) < 0:
        raise ConfigError(
            f"--speculative-config.use_heterogeneous_vocab: {draft.name} and {target.name} have no token in common; "
            "choose another draft model."
        )
    return shared


def _tokenizer_of(spec: ModelSpec) -> Tokenizer:
    return Tokenizer.from_folder(Path(spec.tokenizer_path or spec.path), "auto", spec.trust_remote_code)
