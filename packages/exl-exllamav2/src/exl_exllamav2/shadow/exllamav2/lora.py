"""LoRA adapters."""

from exl_exllamav2.lora import ExLlamaV2Lora
