"""Recording: how the attention of a model that runs becomes maps. README.md has the words of it."""

from ikattn.recorder.entry import record
from ikattn.recorder.plan.parts import AttentionParts
from ikattn.recorder.plan.resolvers import register_resolver

__all__ = ["AttentionParts", "record", "register_resolver"]
