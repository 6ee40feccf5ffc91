"""Hugging Face transformers: the implicit kernel in its models, and its caches.

``use_implicit_attention`` gives a model the attention implementation "ikattn_implicit" and
``from_pretrained`` loads such a model again; ``feature_cache`` makes it decode as fast as with
softmax, ``state_cache`` in constant memory; ``optimizers`` makes what its Trainer takes.
transformers is imported when they are called.
``ikattn.recorder.register_norms`` adds "ikattn_norms", which returns contribution maps where
attention weights would be.
"""

from ikattn._optional import when_imported
from ikattn.integrations.transformers._attention import register_implicit
from ikattn.integrations.transformers._cache import feature_cache
from ikattn.integrations.transformers._implicit import from_pretrained, use_implicit_attention
from ikattn.integrations.transformers._kernels import ImplicitKernel
from ikattn.integrations.transformers._optimizers import optimizers
from ikattn.integrations.transformers._state_cache import decoding_cache, state_cache

__all__ = [
    "ImplicitKernel",
    "decoding_cache",
    "feature_cache",
    "from_pretrained",
    "optimizers",
    "state_cache",
    "use_implicit_attention",
]

when_imported("transformers.modeling_utils", register_implicit)
