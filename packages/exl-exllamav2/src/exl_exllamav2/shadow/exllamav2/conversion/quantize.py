"""Memory check of the converter."""

from exl_exllamav2.tools import list_live_tensors
