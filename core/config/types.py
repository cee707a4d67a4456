"""Types that several groups of options use."""

from typing import Annotated

from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
