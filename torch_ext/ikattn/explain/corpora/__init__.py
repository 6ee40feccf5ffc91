"""Maps of any number of texts, added up."""

from ikattn.explain.corpora.corpus import TOKEN_TYPES, CorpusSums, token_types

__all__ = ["TOKEN_TYPES", "CorpusSums", "token_types"]
