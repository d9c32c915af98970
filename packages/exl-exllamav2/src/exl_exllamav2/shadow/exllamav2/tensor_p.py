"""Tensor parallelism: importable, not available."""
