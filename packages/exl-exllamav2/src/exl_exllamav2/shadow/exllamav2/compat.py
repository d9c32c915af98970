"""Helpers for devices."""

from exl_exllamav2.tools import pairs as pairwise
from exl_exllamav2.tools import safe_move_tensor
