"""Hugging Face transformers: the implicit kernel in its models, and its caches.

``ikattn.convert`` gives a model the attention implementation "ikattn_implicit" and
``from_pretrained`` loads such a model again; ``decoding_cache`` makes it decode as fast as with
softmax, or in constant memory; ``optimizers`` makes what its Trainer takes.
transformers is imported when they are called.
"""

from ikattn._optional import when_imported
from ikattn.integrations.transformers._cache import decoding_cache
from ikattn.integrations.transformers._optimizers import optimizers
from ikattn.integrations.transformers.attention import register_implicit
from ikattn.integrations.transformers.conversion import from_pretrained

__all__ = ["decoding_cache", "from_pretrained", "optimizers"]

when_imported("transformers.modeling_utils", register_implicit)
