"""A suite of one case, which fails."""

from tests.ops.triton import canaries

CASES = canaries.CASES[:1]
backends = canaries.backends
