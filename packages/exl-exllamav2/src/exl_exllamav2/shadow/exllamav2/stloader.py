"""Reader of safetensors files: importable, refused at use."""

from exl_exllamav2.refused import STFile
