"""Attention: flags and class names."""

from exl_exllamav2.modules import ExLlamaV2Attention
from exl_exllamav2.refused import assert_paged_attn

has_flash_attn = False
has_flash_attn_with_paged = False
has_flash_attn_with_window = False
has_flash_attn_with_softcap = False
has_xformers = False
has_lower_right_sdpa = False
