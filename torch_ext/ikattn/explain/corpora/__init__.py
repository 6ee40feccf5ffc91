"""Means of maps over a corpus, by types of tokens."""

from ikattn.explain.corpora.corpus import TOKEN_TYPES, CorpusMeans, CorpusSums, token_types

__all__ = ["TOKEN_TYPES", "CorpusMeans", "CorpusSums", "token_types"]
