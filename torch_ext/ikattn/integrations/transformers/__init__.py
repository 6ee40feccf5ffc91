"""Hugging Face transformers: the implicit kernel in its models, and maps of what attention does.

``use_implicit_attention`` gives a model the attention implementation "ikattn_implicit" and
``from_pretrained`` loads such a model again; ``register`` adds "ikattn_norms", which returns
contribution maps where attention weights would be. transformers is imported when they are called.
"""

from ._implicit import ImplicitKernel, from_pretrained, use_implicit_attention
from ._recording import register

__all__ = ["ImplicitKernel", "from_pretrained", "register", "use_implicit_attention"]
