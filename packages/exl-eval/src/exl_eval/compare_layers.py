"""Layer-by-layer comparison of two models of one architecture on a text.

Compares the hidden states after the embedding and after each layer, in two ways. Propagated: each
model reads its own states, so that the errors of earlier layers are included. Local: each layer of
the second model reads the states that the first model has there, so that its error is its own.
Both models are in memory at the same time. Knows models and windows; neither progress bars nor
command options.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.engine.score import CHUNK_ROWS
from exl_core.errors import ExlError, RequestError
from exl_core.model.context import Context
from exl_core.model.observe import Observer, Part, StateRecorder
from exl_core.model.segment import LogitRows
from exl_core.session.load import LoadedModel
from exl_core.session.open import ModelFiles
from exl_eval.divergence import DivergenceOptions, lay_out_for_both, longest_of
from exl_eval.estimates import mean_and_error
from exl_eval.perplexity import model_facts
from exl_eval.result import Estimate, LayerComparison, LayerDifference, StateDifference
from exl_eval.texts import Text, as_text

OnWindow = Callable[[int, int, float], None]
"""Called after each window: windows done, windows in all, relative error after the last layer."""


class _LocalStates(Observer):
    """Replaces the input of every layer by states of another model, and records the outputs."""

    def __init__(self) -> None:
        self.inputs: Sequence[Tensor] = ()  # by layer, [rows, hidden_size]
        self.outputs: dict[int, Tensor] = {}

    def before(self, part: Part, states: Tensor) -> Tensor:
        if part.kind == "attention" and part.layer is not None:
            return self.inputs[part.layer].clone()  # the layer adds to it in place
        return states

    def after(self, part: Part, states: Tensor) -> Tensor:
        if part.kind == "mlp" and part.layer is not None:
            self.outputs[part.layer] = states.clone()
        return states


class _Differences:
    """Relative error and cosine of each token, by layer."""

    def __init__(self, num_layers: int) -> None:
        self.errors: list[list[Tensor]] = [[] for _ in range(num_layers)]
        self.cosines: list[list[Tensor]] = [[] for _ in range(num_layers)]

    def add(self, layer: int, expected: Tensor, found: Tensor, where: str) -> None:
        """Compares states [rows, hidden_size]."""
        a, b = expected.double(), found.double()
        sizes = a.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
        errors = (b - a).norm(dim=1) / sizes
        if not bool(errors.isfinite().all()):
            raise ExlError(
                "a hidden state is not a number",
                where=where,
                expected="finite states of both models",
                next_step="The weights may be damaged; 'exl doctor' tests the kernels.",
            )
        self.errors[layer].append(errors.cpu())
        self.cosines[layer].append(torch.cosine_similarity(a, b, dim=1).cpu())

    def of(self, layer: int) -> StateDifference:
        return StateDifference(
            Estimate(*mean_and_error(torch.cat(self.errors[layer]))),
            Estimate(*mean_and_error(torch.cat(self.cosines[layer]))),
        )


def compare_layers(
    first: LoadedModel,
    second: LoadedModel,
    text: str | Text,
    options: DivergenceOptions | None = None,
    on_window: OnWindow | None = None,
) -> LayerComparison:
    """Compares the states of `second` with those of `first` on every token of the windows.

    The cache format of the options applies to `second`. Raises RequestError if the models have
    other layers or tokenizers, or if the text has too few windows.
    """
    check_same_layers(first, second)
    options = options or DivergenceOptions()
    longest = min(first.config.max_seq_len, second.config.max_seq_len)
    layout = lay_out_for_both(first.tokenizer, second.tokenizer, as_text(text), options, longest)
    run = _Run(first, second, longest_of(layout), options.kv_format)
    started = time.perf_counter()
    for number, window in enumerate(layout.windows, start=1):
        run.add(window.token_ids, number)
        if on_window is not None:
            error = run.propagated.of(run.num_layers - 1).relative_error.mean
            on_window(number, len(layout.windows), error)
    return LayerComparison(
        embedding=run.embedding.of(0),
        layers=tuple(
            LayerDifference(layer, run.propagated.of(layer), run.local.of(layer))
            for layer in range(run.num_layers)
        ),
        tokens=sum(len(window.token_ids) for window in layout.windows),
        text=layout.facts,
        model=model_facts(second, options.kv_format),
        reference=first.label,
        seconds=time.perf_counter() - started,
    )


def check_same_layers(first: LoadedModel | ModelFiles, second: LoadedModel | ModelFiles) -> None:
    """Raises RequestError unless the states of the models have the same shape and meaning."""
    for name, expected, got in (
        ("architecture", first.config.arch.name, second.config.arch.name),
        ("number of layers", first.config.num_layers, second.config.num_layers),
        ("hidden size", first.config.hidden_size, second.config.hidden_size),
    ):
        if expected != got:
            raise RequestError(
                f"the two models have a different {name}",
                where=second.name,
                expected=expected,
                got=got,
                next_step="Take two versions of one model.",
            )


class _Run:
    """Passes of both models over the windows, and the differences so far."""

    def __init__(
        self, first: LoadedModel, second: LoadedModel, longest: int, kv_format: KVFormat
    ) -> None:
        self.num_layers = first.config.num_layers
        self.embedding = _Differences(1)
        self.propagated = _Differences(self.num_layers)
        self.local = _Differences(self.num_layers)
        self._name = second.name
        self._first = Context(first.model, longest)
        self._second = Context(second.model, longest, kv_format=kv_format)
        self._fed = Context(second.model, longest, kv_format=kv_format)

    def add(self, token_ids: Sequence[int], number: int) -> None:
        for context in (self._first, self._second, self._fed):
            context.length = 0
        for start in range(0, len(token_ids), CHUNK_ROWS):
            self._add_chunk(token_ids[start : start + CHUNK_ROWS], f"window {number}")

    def _add_chunk(self, token_ids: Sequence[int], place: str) -> None:
        layers = range(self.num_layers)
        expected, own, local = StateRecorder(layers), StateRecorder(layers), _LocalStates()
        self._first.feed([token_ids], LogitRows.NONE, observe=expected)
        self._second.feed([token_ids], LogitRows.NONE, observe=own)
        local.inputs = [expected.embedding, *(expected.layers[layer] for layer in layers[:-1])]
        self._fed.feed([token_ids], LogitRows.NONE, observe=local)
        where = f"{self._name}, {place}"
        self.embedding.add(0, expected.embedding, own.embedding, f"{where}, embedding")
        for layer in layers:
            a = expected.layers[layer]
            self.propagated.add(layer, a, own.layers[layer], f"{where}, layer {layer}")
            self.local.add(layer, a, local.outputs[layer], f"{where}, layer {layer}")
