"""``python -m ikattn analyze``: files of maps, pages and pictures of a corpus."""
