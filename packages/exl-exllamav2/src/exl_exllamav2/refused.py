"""Names that exist for imports and refuse their use."""

from __future__ import annotations

from typing import Any, NoReturn

from exl_exllamav2.errors import refuse


class ExLlamaV2VisionTower:
    """Image encoders are not available."""

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse(
            "ExLlamaV2VisionTower",
            "exl has no image encoders yet",
            "Compute the vectors with transformers, and pass them as ExLlamaV2MMEmbedding.",
        )


class ExLlamaV2MultimodalProjector:
    """Projectors of image encoders are not available."""

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse(
            "ExLlamaV2MultimodalProjector",
            "exl has no image encoders yet",
            "Compute the vectors with transformers, and pass them as ExLlamaV2MMEmbedding.",
        )


class STFile:
    """The reader of safetensors files is not available."""

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse(
            "exllamav2.stloader.STFile",
            "exl reads files itself",
            "Use safetensors.safe_open.",
        )


def refuse_extension(name: str) -> NoReturn:
    """`__getattr__` of the module of compiled functions."""
    if name.startswith("__"):
        raise AttributeError(name)
    refuse(
        f"exllamav2.ext.{name}",
        "the compiled extension of exllamav2 is not part of exl",
        "exl_core.ops has exl's own kernels.",
    )


def assert_paged_attn() -> None:
    """Does nothing: exl pages its cache on every device."""
