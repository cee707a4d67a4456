"""Options: drafts, which let a step bring several tokens of a request (speculative decoding)."""

from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from quire.core.config.cache import KVCacheDtype
from quire.core.config.quantization import QuantizationName
from quire.core.config.types import NotNegative, Positive
from quire.core.errors import ConfigError

DraftSampling = Literal["greedy", "probabilistic"]
"""How a draft model chooses for a request that draws: its likeliest token, or a draw with the target's numbers."""

MOST_DRAFTS = 64
"""Drafts of a row. Grammars go back as far."""


class MethodFacts(NamedTuple):
    """What the options of a method are about.

    Attributes:
        checkpoint: the checkpoint that it reads: "own" is what `model` names, "target" the target's own.
        num_tokens: drafts by default; 0: what its checkpoint says.
    """

    checkpoint: Literal["own", "target"] | None = None
    num_tokens: int = 0


METHODS: dict[str, MethodFacts] = {
    "ngram": MethodFacts(num_tokens=8),
    "suffix": MethodFacts(),
    "draft_model": MethodFacts("own", num_tokens=4),
    "custom_class": MethodFacts(num_tokens=4),
    "mtp": MethodFacts("target", num_tokens=1),
    "eagle": MethodFacts("own"),
    "eagle3": MethodFacts("own"),
    "medusa": MethodFacts("own"),
    "mlp_speculator": MethodFacts("own"),
    "dflash": MethodFacts("own"),
}
"""All methods, by name. The workers' are in `executor/step/drafting/methods.py`."""

OFF = "off"
"""The method that is none: grammars force no drafts either, and predictions are only counted."""
_OTHER_NAMES = {"ngram_gpu": "ngram", "[ngram]": "ngram"}
"""Names of vLLM's, beside those of families whose modules are read by the method mtp."""

_OF_NO_EFFECT: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tensor_parallel_size": ("write draft_tensor_parallel_size", (None,)),
    "moe_backend": ("a device has one set of kernels; leave it out", (None, "auto")),
    "attention_backend": ("a device has one set of kernels; leave it out", (None, "auto")),
    "index_share_for_mtp_iteration": ("the checkpoint decides; leave it out", (None,)),
    "disable_padded_drafter_batch": ("no batch of drafts is padded; leave it out", (True, False)),
    "disable_eagle_block_drop": ("no cached block is dropped; leave it out", (True, False)),
    "disable_lookahead_block_hashes": ("blocks have no such hashes; leave it out", (True, False)),
    "draft_lm_head_quantization": ("quantization is for all of a draft model's layers; leave it out", (None,)),
    "use_local_argmax_reduction": ("all ranks have the draft model's logits; leave it out", (False,)),
    "draft_load_config": ("a draft model is loaded as the target is; leave it out", (None,)),
    "synthetic_acceptance_rates": ("drafts are accepted where they are right; leave it out", (None,)),
    "synthetic_acceptance_length": ("drafts are accepted where they are right; leave it out", (None,)),
    "dspark_draft_topk": ("it is for the method dspark, which is not served; leave it out", (None,)),
    "xpress_topc": ("it is for a refiner of dflash, which is not served; leave it out", (None,)),
    "fly_window_size": ("it is for a lossy check of drafts, and answers here stay the same; leave it out", (None,)),
    "fly_entropy_threshold": (
        "it is for a lossy check of drafts, and answers here stay the same; leave it out",
        (0.3,),
    ),
    "fly_entropy_top_k": ("it is for a lossy check of drafts, and answers here stay the same; leave it out", (3,)),
}
"""Keys of vLLM's that have no other value here: what to do instead, and the values that are taken."""


class SpeculativeOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's object. What Quire has no choice in is taken with the value that it always has."""

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MOST_DRAFTS)] | None = None
    num_speculative_tokens_per_batch_size: list[tuple[Positive, Positive, NotNegative]] | None = None
    enable_adaptive_verification: bool | None = None  # False: always as many drafts as there are
    enforce_eager: bool | None = None
    # of `ngram`
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=MOST_DRAFTS)] | None = None
    prompt_lookup_min: Positive | None = None
    # of `suffix`
    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=2, le=MOST_DRAFTS)] = 24
    suffix_decoding_max_cached_requests: NotNegative = 10000
    suffix_decoding_max_spec_factor: Annotated[float, Meta(ge=0, le=MOST_DRAFTS)] = 1.0
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0, le=1)] = 0.1
    # of methods with a checkpoint
    revision: str | None = None
    code_revision: str | None = None
    quantization: QuantizationName | None = None
    kv_cache_dtype: KVCacheDtype | None = None
    max_model_len: Positive | None = None
    draft_tensor_parallel_size: Positive | None = None
    draft_sample_method: DraftSampling = "probabilistic"
    parallel_drafting: bool = False  # all drafts in one step of a draft model, in the places of mask tokens
    use_heterogeneous_vocab: bool = False  # the draft model's tokens are others, found by their texts
    rejection_sample_method: str = "standard"
    # of no effect: `_OF_NO_EFFECT`
    tensor_parallel_size: int | None = None
    moe_backend: str | None = None
    attention_backend: str | None = None
    index_share_for_mtp_iteration: bool | None = None
    disable_padded_drafter_batch: bool = False
    disable_eagle_block_drop: bool = False
    disable_lookahead_block_hashes: bool = False
    draft_lm_head_quantization: str | None = None
    use_local_argmax_reduction: bool = False
    draft_load_config: dict[str, Any] | None = None
    synthetic_acceptance_rates: list[float] | None = None
    synthetic_acceptance_length: float | None = None
    dspark_draft_topk: int | None = None
    xpress_topc: int | None = None
    fly_window_size: int | None = None
    fly_entropy_threshold: float = 0.3
    fly_entropy_top_k: int = 3

    @property
    def names_no_method(self) -> bool:
        """True if the options are about forced pieces and predictions alone."""
        return self.method is None and self.model is None and self.num_speculative_tokens is None

    def __post_init__(self) -> None:
        for name, (remedy, taken) in _OF_NO_EFFECT.items():
            if getattr(self, name) not in taken:
                raise ValueError(f"{name}: {remedy}")
        if self.rejection_sample_method != "standard":
            raise ValueError(
                "rejection_sample_method: a draft is accepted if it is the token that the request has without drafts; "
                "take standard, or leave it out"
            )
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is not None and most is not None and least > most:
            raise ValueError(f"prompt_lookup_min {least} is above prompt_lookup_max {most}; lower it")
        after = 0
        for first, last, _ in self.num_speculative_tokens_per_batch_size or ():
            if first <= after or last < first:
                raise ValueError(
                    "num_speculative_tokens_per_batch_size: entries are [first size, last size, drafts] with ascending "
                    f"sizes that do not overlap; mend [{first}, {last}, ...]"
                )
            after = last


class SpeculativeConfig(Struct, frozen=True, kw_only=True):
    """Drafts: tokens that are guessed, and checked several in a step. Answers stay the same."""

    speculative_config: Annotated[
        SpeculativeOptions | None,
        Meta(
            description="method (ngram, suffix, draft_model, mtp, eagle, eagle3, medusa, mlp_speculator, dflash, "
            "custom_class; off), model, num_speculative_tokens and the "
            "method's own keys, as JSON or by dotted keys; docs/speculative.md.",
            extra={"parse": "json", "aliases": ["-sc"]},
        ),
    ] = None
    spec_method: Annotated[str | None, Meta(description="Short for --speculative-config.method.")] = None
    spec_model: Annotated[str | None, Meta(description="Short for --speculative-config.model.")] = None
    spec_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_DRAFTS)] | None,
        Meta(description="Short for --speculative-config.num_speculative_tokens."),
    ] = None

    @property
    def options(self) -> SpeculativeOptions | None:
        """The options as one object; None if nothing is asked for.

        Raises:
            ConfigError: one is given twice.
        """
        short = {
            ("--spec-method", "method"): self.spec_method,
            ("--spec-model", "model"): self.spec_model,
            ("--spec-tokens", "num_speculative_tokens"): self.spec_tokens,
        }
        options = self.speculative_config
        for (flag, key), value in short.items():
            if value is None:
                continue
            options = options or SpeculativeOptions()
            if getattr(options, key) is not None:
                raise ConfigError(f"{flag} and --speculative-config.{key} are one option; give one of them.")
            options = msgspec.structs.replace(options, **{key: value})
        return options


class Speculation(Struct, frozen=True, kw_only=True):
    """How an engine makes drafts, with every default filled in."""

    method: str | None = None  # of `METHODS`; None: only forced pieces of grammars and what requests predict
    num_tokens: int = 0  # that the method proposes for a request in a step, at most
    most_drafts: int = 16  # of a row, from all sources
    is_adaptive: bool = True  # fewer drafts where they do not pay
    by_batch_size: list[tuple[int, int, int]] = []  # (first size, last size, most drafts)
    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 5
    max_tree_depth: int = 24
    max_cached_requests: int = 10000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1
    draft_class: str | None = None  # module:Class
    draft_sampling: DraftSampling = "probabilistic"
    max_model_len: int | None = None  # tokens of a sequence past which the draft model proposes nothing
    enforce_eager: bool = False  # no step of the draft model comes from a recording
    mask_token_id: int | None = None  # in whose places a draft model makes all drafts at once

    @classmethod
    def of(cls, options: SpeculativeOptions | None) -> "Speculation":
        """Fills in the defaults, but those that a checkpoint decides.

        Raises:
            ConfigError: there is no such method, or it lacks an option.
        """
        if options is None:
            return cls()
        if options.names_no_method:
            return cls(
                is_adaptive=options.enable_adaptive_verification is not False,
                by_batch_size=options.num_speculative_tokens_per_batch_size or [],
            )
        method = method_of(options)
        facts = METHODS[method]
        if facts.checkpoint == "own" and options.model is None:
            raise ConfigError(f"--speculative-config.method {method} reads a checkpoint: name it as model.")
        if method == "custom_class" and not _is_class(options.model):
            raise ConfigError(
                "--speculative-config.method custom_class needs the class as model, such as my_package.MyDrafts; got "
                f"{options.model!r}."
            )
        if facts.checkpoint is None and method != "custom_class" and options.model not in (None, method):
            raise ConfigError(f"--speculative-config.method {method} reads no checkpoint: leave model out.")
        _check_draft_model_keys(options, method)
        depth = options.suffix_decoding_max_tree_depth
        num_tokens = options.num_speculative_tokens or (depth if method == "suffix" else facts.num_tokens)
        return cls(
            method=method,
            num_tokens=num_tokens,
            most_drafts=max(num_tokens, 16),
            is_adaptive=options.enable_adaptive_verification is not False,
            by_batch_size=options.num_speculative_tokens_per_batch_size or [],
            **_lookup(options),
            max_tree_depth=depth,
            max_cached_requests=options.suffix_decoding_max_cached_requests,
            max_spec_factor=options.suffix_decoding_max_spec_factor,
            min_token_prob=options.suffix_decoding_min_token_prob,
            draft_class=options.model if method == "custom_class" else None,
            draft_sampling=options.draft_sample_method,
            max_model_len=options.max_model_len,
            enforce_eager=bool(options.enforce_eager),
        )


def _check_draft_model_keys(options: SpeculativeOptions, method: str) -> None:
    """Raises ConfigError for keys of the method draft_model beside another one."""
    if options.use_heterogeneous_vocab and method != "draft_model":
        raise ConfigError(
            f"--speculative-config.use_heterogeneous_vocab is for the method draft_model; what {method} proposes are "
            "the target's own tokens: leave it out."
        )
    if options.parallel_drafting and method not in ("draft_model", "dflash"):  # dflash has no other way
        raise ConfigError(
            f"--speculative-config.parallel_drafting is for the method draft_model, with checkpoints that were trained "
            f"with mask tokens (PARD); {method} drafts one token after the other: leave it out."
        )
    if options.parallel_drafting and options.use_heterogeneous_vocab:
        raise ConfigError(
            "--speculative-config.parallel_drafting: the mask token must be one of the target's; leave "
            "use_heterogeneous_vocab out."
        )


def method_of(options: SpeculativeOptions) -> str:
    """The method that is asked for, by its name in `METHODS`. A model without a method is a draft model.

    Raises:
        ConfigError: there is no such method.
    """
    asked = options.method
    if asked is None and options.model is None:
        raise ConfigError(f"--speculative-config needs a method: one of {', '.join(METHODS)}.")
    method = "draft_model" if asked is None else _OTHER_NAMES.get(asked, "mtp" if asked.endswith("_mtp") else asked)
    if method not in METHODS:
        known = ", ".join([*METHODS, OFF])
        raise ConfigError(f"--speculative-config.method: choose from {known} (got {asked!r}).")
    return method


def _lookup(options: SpeculativeOptions) -> dict[str, int]:
    """The lengths of n-grams. One that is given alone is both, as in vLLM; without any, the longest of 3 to 5 holds."""
    least, most = options.prompt_lookup_min, options.prompt_lookup_max
    if least is None and most is None:
        least, most = 3, 5
    return {"prompt_lookup_min": least or most or 0, "prompt_lookup_max": most or least or 0}


def _is_class(name: str | None) -> bool:
    """Returns True for `module.Class` and `module:Class`."""
    parts = (name or "").replace(":", ".").split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)
