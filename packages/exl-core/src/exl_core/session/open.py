"""Opens a model on disk: headers, configuration, tokenizer and chat template, each read once.

Loads no weights and needs no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from exl_core.arch.gguf_config import read_gguf_config
from exl_core.arch.hf_config import read_hf_config
from exl_core.arch.layers import MoE
from exl_core.arch.modules import module_table
from exl_core.arch.quantization import Quantization, read_quantization
from exl_core.arch.spec import ModelConfig
from exl_core.errors import WeightShapeError
from exl_core.formats.containers.gguf import GgufSource, rope_factors
from exl_core.formats.containers.safetensors import SafetensorsSource
from exl_core.formats.containers.source import TensorSource
from exl_core.model.sample_text import SAMPLE_TEXT
from exl_core.prompt.detect import load_template
from exl_core.prompt.template import ChatTemplate
from exl_core.session.resolve import resolve_model
from exl_core.tokenizer.base import Tokenizer
from exl_core.tokenizer.check import check_vocab
from exl_core.tokenizer.detect import load_tokenizer


def open_checkpoint(path: Path) -> tuple[TensorSource, ModelConfig, Quantization | None]:
    """Weight files, configuration and quantization of a model. Reads headers only.

    The quantization is None for GGUF files, which store the codec of every tensor, and for models
    that are not quantized. Raises `ModelError` for any fault.
    """
    if not path.is_dir():
        source = GgufSource(path)
        factors = rope_factors(source)
        config = read_gguf_config(source.metadata, source.tensors, path, factors)
        _check_experts(source, config, path)
        return source, config, None
    config, quantization = read_hf_config(path), read_quantization(path)
    # EXL2 converters copy the index of the source model, which lists other files.
    is_exl2 = quantization is not None and quantization.method == "exl2"
    files = SafetensorsSource(path, has_index=not is_exl2)
    _check_experts(files, config, path)
    head = module_table(config).head.stem
    # EXL2 and EXL3 quantize the head of tied models separately.
    if f"{head}.q_weight" in files.tensors or f"{head}.trellis" in files.tensors:
        config = replace(config, has_tied_embeddings=False)
    return files, config, quantization


def _check_experts(source: TensorSource, config: ModelConfig, path: Path) -> None:
    """Raises WeightShapeError if the weight files are too small for the configuration's experts.

    A few numbers of a configuration can claim millions of matrices. This check comes before the
    module table, which has an object for each of them.
    """
    values = 0
    for layer in config.layers:
        part = layer.feed_forward
        if isinstance(part, MoE):
            width = part.intermediate_size * (part.latent_size or config.hidden_size)
            values += part.router.num_experts * (3 if part.is_gated else 2) * width
    size = sum(tensor.size_bytes for tensor in source.tensors.values())
    if values > 8 * size:  # no format has less than one bit per weight
        raise WeightShapeError(
            "the configuration has more experts than the weight files can hold",
            where=path,
            expected=f"at least {values // 8} bytes of tensors",
            got=size,
            next_step="The weights and the configuration are not of one model.",
        )


class ModelFiles:
    """A model's directory or `.gguf` file: everything that is known without loading the weights.

    The headers are read at once, the tokenizer and the template when they are first used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source, self.config, self.quantization = open_checkpoint(path)

    @property
    def name(self) -> str:
        return model_name(self.path)

    @property
    def stored_bytes(self) -> int:
        """Size of all tensors in the files, those that the model does not need included."""
        return sum(tensor.size_bytes for tensor in self.source.tensors.values())

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises `TokenizerError` if it does not belong to this model."""
        tokenizer = load_tokenizer(self.path, gguf_fields(self.source))
        check_vocab(tokenizer, self.config.vocab_size, self.path)
        return tokenizer

    @cached_property
    def sample_ids(self) -> tuple[int, ...]:
        """Token ids of the text on which key smoothing is measured."""
        return tuple(self.tokenizer.encode(SAMPLE_TEXT, add_bos=False))

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template; None for base models."""
        return load_template(self.path, gguf_fields(self.source))


def open_model(spec: str | Path | None = None) -> ModelFiles:
    """Opens the model that `spec` names (`resolve_model`)."""
    return ModelFiles(resolve_model(spec))


def gguf_fields(source: TensorSource) -> Mapping[str, object] | None:
    """Metadata of a GGUF file for tokenizer and template; None for safetensors."""
    return source.metadata if isinstance(source, GgufSource) else None


def model_name(path: Path) -> str:
    """Name of a model: of its folder or file, or of its repository in the hub's cache."""
    if not path.is_dir():
        return path.stem
    folder = path.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.split("--")[-1]
    return folder.name


def stop_ids(tokenizer: Tokenizer, config: ModelConfig) -> frozenset[int]:
    """All tokens that end a reply, from the tokenizer and the configuration.

    Ids beyond both vocabularies are left out: no model samples them.
    """
    end = max(tokenizer.vocab_size, config.vocab_size)
    ids = (*tokenizer.eos_ids, *config.eos_ids)
    return frozenset(token_id for token_id in ids if token_id < end)
