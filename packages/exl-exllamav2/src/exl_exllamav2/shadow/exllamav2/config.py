"""Configuration of a model."""

from exl_exllamav2.config import ExLlamaV2Config
