"""Maps of any number of texts, added up."""
