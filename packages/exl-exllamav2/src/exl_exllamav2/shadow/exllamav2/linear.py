"""Class name for isinstance checks."""

from exl_exllamav2.modules import ExLlamaV2Linear
