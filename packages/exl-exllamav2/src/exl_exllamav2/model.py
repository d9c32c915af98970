"""ExLlamaV2: the model object of old programs. Loads weights on request, and runs `forward`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace
from typing import Any, NoReturn, Unpack

import torch
from torch import Tensor

from exl_core.arch.modules import module_table
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.model.transformer import Transformer
from exl_core.session.load import LoadedModel, LoadFields, load_model
from exl_exllamav2 import forward as passes
from exl_exllamav2.cache import ExLlamaV2CacheBase
from exl_exllamav2.config import ExLlamaV2Config
from exl_exllamav2.errors import OldAssertionError, OldRuntimeError, old_types, refuse
from exl_exllamav2.modules import list_modules
from exl_exllamav2.notices import warn_once

Progress = Callable[[int, int], Any]


class ExLlamaV2:
    """A model. The constructor reads no weights; one of the `load` methods does."""

    def __init__(
        self,
        config: ExLlamaV2Config,
        lazy_load: bool = False,
        archparams: Any = None,
    ) -> None:
        files = config.opened()
        self.config = config
        self.exl: LoadedModel | None = None
        self.tp_context: Any = None
        self.cache_map: dict[int, str] = {}
        self.vocabulary: Vocabulary | None = None
        """Tables of the vocabulary that all engines of this model share."""
        table = module_table(files.config)
        self.quantized_names = frozenset(
            name.removesuffix(".q_weight").removesuffix(".qweight")
            for name in files.source.tensors
            if name.endswith((".q_weight", ".qweight"))
        )
        self.modules = list_modules(self, files.config.num_layers, table.head.stem)
        self.modules_dict = {module.key: module for module in self.modules}
        self.head_layer_idx = len(self.modules) - 1
        self.last_kv_layer_idx = len(self.modules) - 4

    @property
    def loaded(self) -> bool:
        """Whether a load call has returned."""
        return self.exl is not None

    @property
    def weights(self) -> Transformer:
        return self.loaded_model.model

    @property
    def loaded_model(self) -> LoadedModel:
        if self.exl is None:
            raise OldRuntimeError("the model is not loaded", next_step="Call model.load() first.")
        return self.exl

    def load(
        self,
        gpu_split: Sequence[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: Progress | None = None,
        callback_gen: Progress | None = None,
        progress: bool = False,
    ) -> None:
        """Load all weights: on the first GPUs that hold them, or on the CPU.

        `gpu_split` [GiB of weights by device] divides the layers over GPUs. Without GPUs it prints
        a warning.
        """
        self._drain(self.load_gen(gpu_split, lazy, False, callback, callback_gen), progress)

    def load_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: Progress | None = None,
        callback_gen: Progress | None = None,
    ) -> Iterator[Any]:
        if lazy:
            refuse(
                "load(lazy=True)",
                "layers are not loaded one by one",
                "LoadOptions.held_bytes of exl_core keeps a part of the weights in memory.",
            )
        yield from self._load(callback, callback_gen, **self._split_fields(gpu_split))

    def load_autosplit(
        self,
        cache: ExLlamaV2CacheBase,
        reserve_vram: int | Sequence[int] | None = None,
        last_id_only: bool = False,
        callback: Progress | None = None,
        callback_gen: Progress | None = None,
        progress: bool = False,
    ) -> None:
        """Load the weights and allocate `cache`.

        Layers are divided over as many GPUs as weights and cache need. `reserve_vram` bytes stay
        free: one number for all GPUs, or one for each of the first ones.
        """
        steps = self.load_autosplit_gen(cache, reserve_vram, last_id_only, callback, callback_gen)
        self._drain(steps, progress)

    def load_autosplit_gen(
        self,
        cache: ExLlamaV2CacheBase,
        reserve_vram: int | Sequence[int] | None = None,
        last_id_only: bool = False,
        callback: Progress | None = None,
        callback_gen: Progress | None = None,
    ) -> Iterator[Any]:
        fields: LoadFields = {
            "cache_tokens": cache.num_tokens,
            "kv_format": cache.kv_format,
            **self._reserve_fields(reserve_vram),
        }
        yield from self._load(callback, callback_gen, **fields)
        cache.allocate()

    def load_tp(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: Progress | None = None,
        callback_gen: Progress | None = None,
        progress: bool = False,
        expect_cache_tokens: int = 0,
        expect_cache_base: type[ExLlamaV2CacheBase] | None = None,
    ) -> None:
        """Load a model that computes on several devices at once.

        `gpu_split` of n devices means n processes with an equal part of every matrix each. Without
        it, all GPUs take part.
        """
        steps = self.load_tp_gen(
            gpu_split, callback, callback_gen, expect_cache_tokens, expect_cache_base
        )
        self._drain(steps, progress)

    def load_tp_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: Progress | None = None,
        callback_gen: Progress | None = None,
        expect_cache_tokens: int = 0,
        expect_cache_base: type[ExLlamaV2CacheBase] | None = None,
    ) -> Iterator[Any]:
        fields = self._parallel_fields(gpu_split)
        self.config.no_graphs = True
        yield from self._load(callback, callback_gen, **fields)
        count = fields.get("tensor_parallel", len(self.weights.stages))
        self.tp_context = SimpleNamespace(device=self._torch_device(), num_devices=count)

    def _split_fields(self, gpu_split: Sequence[float] | None) -> LoadFields:
        """Options for a division of the layers. GiB in old programs, GB in exl."""
        sizes = [float(size) for size in gpu_split or ()]
        if not any(size > 0 for size in sizes):
            return {}
        if self.config.is_on_gpu():
            own = sizes[: torch.cuda.device_count()]  # exllamav2 uses GPUs in order, as needed
            if not any(size > 0 for size in own):
                warn_once("gpu_split", "is not used: it has no size for a GPU of this machine")
                return {}
            return {"split": ",".join(f"{max(0.0, size) * 2**30 / 1e9:.6f}" for size in own)}
        if sum(size > 0 for size in sizes) > 1:
            warn_once("gpu_split", "is not used: the model runs on the CPU")
        return {}

    def _reserve_fields(self, reserve_vram: int | Sequence[int] | None) -> LoadFields:
        """Options for memory that stays free. exllamav2 reserves none of the machine's memory."""
        if not reserve_vram or not self.config.is_on_gpu():
            return {}
        if not isinstance(reserve_vram, Sequence):
            return {"reserve": f"{reserve_vram / 1e9:.6f}"}
        num_gpus = torch.cuda.device_count()
        sizes = [*reserve_vram, *[0] * num_gpus][:num_gpus]
        return {"reserve": ",".join(f"{size / 1e9:.6f}" for size in sizes)}

    def _parallel_fields(self, gpu_split: Sequence[float] | None) -> LoadFields:
        """Options for `load_tp`."""
        count = sum(float(size) > 0 for size in gpu_split or ())
        if self.config.is_on_gpu():
            num_gpus = torch.cuda.device_count()
            count = min(count, num_gpus) if gpu_split else num_gpus
        if count > 1:
            return {"tensor_parallel": count}
        warn_once("load_tp", "runs in one process: there are no sizes of several devices")
        return {}

    def _load(
        self,
        callback: Progress | None,
        callback_gen: Progress | None,
        **fields: Unpack[LoadFields],
    ) -> Iterator[Any]:
        """Read the weights on a thread, and report progress in steps of one module."""
        if self.exl is not None:
            raise OldAssertionError("the model is loaded already")
        total = len(self.modules)
        queue: SimpleQueue[int | BaseException | LoadedModel] = SimpleQueue()

        def read() -> None:
            try:
                with old_types():
                    options = replace(self.config.load_options(), **fields)
                    queue.put(load_model(self.config.opened(), options, report))
            except BaseException as error:  # noqa: BLE001 - raised by the loading thread below
                queue.put(error)

        def report(done: int, size: int) -> None:
            queue.put(min(total - 1, done * total // max(1, size)))

        Thread(target=read, name="exl-load", daemon=True).start()
        reported = 0
        while True:
            got = queue.get()
            if isinstance(got, BaseException):
                raise got
            end = got if isinstance(got, int) else total + 1
            for i in range(reported, end):
                if callback is not None:
                    callback(i, total)
                values = None if callback_gen is None else callback_gen(i, total)
                yield from values if values is not None else (None,)
            reported = max(reported, end)
            if isinstance(got, LoadedModel):
                self.exl = got
                self.cache_map = {
                    i: str(stage.ops.device) for stage in got.model.stages for i in stage.layers
                }
                return

    @staticmethod
    def _drain(steps: Iterator[Any], progress: bool) -> None:
        is_shown = progress and sys.stderr.isatty()
        for _ in steps:
            if is_shown:
                print(".", end="", file=sys.stderr, flush=True)
        if is_shown:
            print(file=sys.stderr)

    def unload(self) -> None:
        """Free the weights and end other processes of the model. May be called again."""
        if self.exl is not None:
            self.exl.unload()
        self.exl = None

    def forward(
        self,
        input_ids: Tensor,
        cache: ExLlamaV2CacheBase | list[ExLlamaV2CacheBase] | None = None,
        input_mask: Tensor | None = None,
        preprocess_only: bool = False,
        last_id_only: bool = False,
        loras: Any = None,
        return_last_state: bool = False,
        position_offsets: Tensor | None = None,
        abort_event: Any = None,
        cpu_logits: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Logits, half [rows, n, padded vocabulary]; see `forward.py` in this package."""
        if "attn_params" in kwargs:
            self.forward_chunk()
        wanted = passes.Wanted(preprocess_only, last_id_only, return_last_state, cpu_logits)
        embeddings = kwargs.get("indexed_embeddings") or ()
        # The result is an ordinary tensor, which programs change in place.
        with old_types(), torch.inference_mode(False), torch.no_grad():
            if isinstance(cache, list):
                return passes.run_each(self, input_ids, cache, input_mask, wanted, loras)
            return passes.run(
                self, input_ids, cache, input_mask, wanted, loras, embeddings, abort_event
            )

    def forward_chunk(self, *_: Any, **__: Any) -> NoReturn:
        refuse(
            "model.forward_chunk",
            "attention parameters of exllamav2 have no counterpart",
            "Use model.forward, or Context of exl_core.model.context.",
        )

    def is_quant(self) -> bool:
        """Whether the files hold quantized weights."""
        files = self.config.opened()
        return files.quantization is not None or not files.path.is_dir()

    def get_modules(self) -> list[Any]:
        return self.modules

    def update_loras(self) -> None:
        """Does nothing: adapters belong to requests."""

    def set_device_map(self, allocation: Sequence[float], embed_cpu: bool = True) -> list[float]:
        """Unused memory by device; the map itself has no effect."""
        warn_once("set_device_map", "is not used: give the sizes to load")
        return list(allocation)

    def set_cache_map(self) -> None:
        """Does nothing: each layer's cache is on the device of the layer."""

    def get_cache_devices(self) -> list[str]:
        return sorted(set(self.cache_map.values()))

    def _torch_device(self, _: int = 0) -> str:
        return str(self.weights.ops.device)
