"""Attention as a module and as a function, with the arguments and the numbers of torch's own."""

from ikattn.nn.functional import multi_head_attention_forward
from ikattn.nn.multihead_attention import MultiheadAttention
from ikattn.nn.parameter_groups import parameter_groups

__all__ = ["MultiheadAttention", "multi_head_attention_forward", "parameter_groups"]
