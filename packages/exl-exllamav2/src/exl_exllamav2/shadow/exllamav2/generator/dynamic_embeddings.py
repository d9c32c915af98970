"""Embedded vectors in prompts."""

from exl_exllamav2.embeddings import ExLlamaV2MMEmbedding
