"""Blocks, their keys and who may take them. Knows no tensors and no engine."""
