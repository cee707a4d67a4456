"""Chooses the scheme of a model's linear layers."""

from collections.abc import Mapping

from quire.core.config.model import Quantization
from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.weights.quantisation.int8 import Int8
from quire.executor.weights.quantisation.scheme import LinearScheme
from quire.executor.weights.quantisation.unquantised import Unquantised

SCHEMES: Mapping[Quantization, type[LinearScheme]] = {"int8": Int8}
"""Schemes by the value of `--quantization`."""


OF_EXPERTS = "mxfp4"
"""A format that only experts have; a family that knows it reads them itself, and its linear layers are plain."""


def choose_scheme(spec: ModelSpec, quantization: Quantization | None) -> LinearScheme:
    """The scheme that the user chose; None: weights in the model's dtype.

    Raises:
        ModelLoadError: the checkpoint has a quantisation of its own.
    """
    own = spec.hf_config.get("quantization_config")
    method = own.get("quant_method", "unknown") if own else None
    if method not in (None, OF_EXPERTS):
        raise ModelLoadError(
            f"{spec.name} is quantised ({method}), which is not supported; use the unquantised checkpoint. "
            f"--quantization {' or '.join(SCHEMES)} makes its weights smaller."
        )
    return Unquantised() if quantization is None else SCHEMES[quantization]()
