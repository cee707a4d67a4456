"""All methods of drafting, by the name that `--speculative-config.method` has.

To add one: its file beside this one, with a class as `Method` describes, a line here, and its facts in `METHODS` of
`core/config/speculative.py`. A method whose layers read the target's states also adds their class to
`executor/models/drafting/registry.py`.
"""

import pkgutil

from quire.executor.step.drafting.method import Method

_PACKAGE = "quire.executor.step.drafting."
_CLASSES = {
    "ngram": "ngram:Ngram",
    "suffix": "suffix:Suffix",
    "draft_model": "draft_model:DraftModel",
    "custom_class": "custom_class:CustomClass",
    "mtp": "head_drafts:HeadDrafts",
    "eagle": "head_drafts:HeadDrafts",
    "eagle3": "head_drafts:HeadDrafts",
    "medusa": "last_state_drafts:LastStateDrafts",
    "mlp_speculator": "last_state_drafts:LastStateDrafts",
    "dflash": "block_drafts:BlockDrafts",
}


def find_method(name: str) -> type[Method]:
    """Returns the class of a method, imported now."""
    found: type[Method] = pkgutil.resolve_name(_PACKAGE + _CLASSES[name])
    return found
