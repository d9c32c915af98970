"""Image encoders: importable, refused at use."""

from exl_exllamav2.refused import ExLlamaV2VisionTower
