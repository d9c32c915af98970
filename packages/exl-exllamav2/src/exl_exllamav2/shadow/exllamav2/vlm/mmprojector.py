"""Projectors of image encoders: importable, refused at use."""

from exl_exllamav2.refused import ExLlamaV2MultimodalProjector
