"""Anaphora serves open-weight language models and computes every prompt prefix once."""
