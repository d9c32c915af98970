"""The model."""

from exl_exllamav2.config import ExLlamaV2Config
from exl_exllamav2.model import ExLlamaV2
