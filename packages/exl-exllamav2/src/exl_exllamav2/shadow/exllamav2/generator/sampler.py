"""Sampler."""

from exl_exllamav2.sampler import ExLlamaV2Sampler
