"""Streaming generator."""

from exl_exllamav2.streaming import ExLlamaV2StreamingGenerator
