"""Rows of tokens from a parquet file."""

from exl_exllamav2.tools import get_tokens
