"""Quantizes weights at load, in formats that differ by kind of layer or by name."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.core.logging import get_logger
from quire.executor.weights.quantization.checkpoint_format import Exclusions
from quire.executor.weights.quantization.log_once import log_mxfp4_experts
from quire.executor.weights.quantization.online import Online, to_mxfp4
from quire.executor.weights.quantization.scheme import LinearPart, LinearScheme
from quire.executor.weights.quantization.unquantized import Unquantized
from quire.executor.weights.readers import TensorSource
from quire.ops.linear import LinearWeight

logger = get_logger(__name__)

Scheme = Online | Unquantized


@dataclass(frozen=True)
class PerLayer:
    """A scheme for each kind of layer or name. Embeddings stay as the checkpoint has them.

    Attributes:
        linear: for the layers that no rule names, including the language-model head.
        experts: for routed experts that no rule names. Their mixture, `….experts`, names all experts of a layer.
        rules: for the layers that a name or a pattern matches; see `Exclusions`.
        used: the names and patterns that have matched a layer.
    """

    linear: Scheme
    experts: Scheme
    rules: Mapping[str, Scheme]
    used: set[str] = field(default_factory=set, compare=False)

    def read_weight(self, source: TensorSource, part: LinearPart, in_features: int) -> LinearWeight:
        names = [part.mixture] if part.mixture else [part.name, source.locate(part.name, part.out_features).name]
        scheme = self._scheme(names, self.experts if part.mixture else self.linear)
        return scheme.read_weight(source, part, in_features)

    def read_dequantized(self, source: TensorSource, part: LinearPart, in_features: int, dtype: torch.dtype) -> Tensor:
        return Unquantized().read_dequantized(source, part, in_features, dtype)

    def read_rows(self, source: TensorSource, part: LinearPart, in_features: int) -> Tensor:
        return Unquantized().read_weight(source, part, in_features)

    def for_head(self, rows: LinearWeight, part: LinearPart) -> LinearWeight:
        return self._scheme([part.name, "lm_head"], self.linear).for_head(rows, part)

    def check_mxfp4(self, mixture: str) -> None:
        asked = self._scheme([mixture], self.experts)
        if isinstance(asked, Online) and asked is not self.linear and asked.rounding is not to_mxfp4:
            raise ModelLoadError(
                f"--quantization-config asks for another format of {mixture}, which the checkpoint has in MXFP4, and "
                "which stay so: let moe and targets leave them out, or take a checkpoint of 16 bits."
            )

    def quantizes_others(self, mixture: str) -> bool:
        """Returns True if layers other than the experts of `mixture` may be quantized."""
        for_others = (self.rules[rule] for rule, layers in self._layers.items() if mixture not in layers)
        return any(isinstance(scheme, Online) for scheme in (self.linear, *for_others))

    def log_unquantized(self) -> None:
        """Logs which layers stay unquantized, and warns of names and patterns that match no layer."""
        for scheme in {id(each): each for each in (self.linear, self.experts, *self.rules.values())}.values():
            if isinstance(scheme, Online):
                scheme.log_unquantized()
        for name in self.rules.keys() - self.used:
            logger.warning("--quantization-config: no linear layer and no experts are called %s", name)

    @functools.cached_property
    def _layers(self) -> Mapping[str, Exclusions]:
        """The layers that each rule matches."""
        return {rule: Exclusions([rule]) for rule in self.rules}

    def _scheme(self, names: Sequence[str], otherwise: Scheme) -> Scheme:
        found = {
            rule: self.rules[rule] for rule, layers in self._layers.items() if any(name in layers for name in names)
        }
        self.used.update(found)
        if len({id(scheme) for scheme in found.values()}) > 1:
            raise ModelLoadError(
                f"--quantization-config: {' and '.join(found)} are both for the layer {names[0]}; let one name it."
            )
        return next(iter(found.values()), otherwise)


def check_mxfp4(scheme: LinearScheme, mixture: str) -> None:
    """Logs that a checkpoint's MXFP4 experts stay as they are, if `scheme` quantizes other layers.

    Raises:
        ModelLoadError: the scheme has another format for these experts than for layers in general.
    """
    if isinstance(scheme, PerLayer):
        scheme.check_mxfp4(mixture)
    if isinstance(scheme, Online) or (isinstance(scheme, PerLayer) and scheme.quantizes_others(mixture)):
        log_mxfp4_experts()
