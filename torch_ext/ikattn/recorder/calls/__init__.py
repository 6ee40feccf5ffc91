"""Calls of attention: what one was given, heard where torch and transformers compute it."""
