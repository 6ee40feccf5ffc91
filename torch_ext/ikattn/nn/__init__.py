"""Attention as a module and as a function, with the arguments and the numbers of torch's own."""

from ikattn.nn.functional import multi_head_attention_forward
from ikattn.nn.multihead_attention import MultiheadAttention

__all__ = ["MultiheadAttention", "multi_head_attention_forward"]
