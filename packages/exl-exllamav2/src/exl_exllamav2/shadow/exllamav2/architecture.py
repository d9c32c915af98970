"""Families of models."""

from exl_core.arch.spec import ArchSpec as ExLlamaV2ArchParams
