"""Application of an update to the layers of a model that may be computing with repacked or derived weights.

A layer whose weights vLLM processes after loading goes through vLLM's own layerwise reloading: it is recreated in
checkpoint format, filled, processed, and copied to the tensors that the kernels read. If observation has shown that
processing does not change a layer, the layer is filled in place. If this holds for all layers, the next update does not
use reloading.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.platforms import current_platform

from weighbridge import _lazy as lazy
from weighbridge._core.text.counts import counted, named
from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.engine_rank.drafting import WithDrafter, of_drafter, unshared
from weighbridge.integrations.vllm import layers, watching
from weighbridge.integrations.vllm.ahead import Ahead
from weighbridge.integrations.vllm.releases import LEFT_IN_PLACE, is_deferred, put_back
from weighbridge.integrations.vllm.wrapped import named_layers

log = init_logger(f"vllm.plugins.{__name__}")

_MOST_NAMED = 3
Fill = Callable[[torch.Tensor], None]
Borrowed = list[tuple[torch.Tensor, dict[str, Any]]]
"""Parameters, and their original attributes."""


class Applier:
    """Applies updates to one model.

    Args:
        model: vLLM's, after loading.
        model_config: vLLM's configuration of it.
        before: appliers that have observed parts of it.
    """

    def __init__(self, model: Any, model_config: Any, *before: Applier | None) -> None:
        self._model = model
        self._model_config = model_config
        self._unprocessed: WeakSet[torch.nn.Module] = WeakSet()
        """Layers that vLLM's processing was observed not to change."""
        self._kept: WeakKeyDictionary[torch.nn.Module, frozenset[str]] = WeakKeyDictionary()
        """Tensors, by layer, that processing for CPU kernels leaves as they were loaded, in addition to the tensors
        that it derives from them.

        Not recorded for GPUs, whose kernels' writes cannot be observed.
        """
        for each in before:
            if each is not None:
                self._unprocessed |= each._unprocessed
                self._kept.update(each._kept)
        self._all_as_loaded: lazy.Recording | None = None
        """Recording for which all filled tensors were observed to be those that the layers compute with."""
        self.ahead = Ahead(model)

    def check(self, recording: lazy.Recording) -> None:
        """Refuse a model that no longer has all recorded tensors.

        Raises:
            FailedPrecondition: a tensor is missing; names it.
        """
        missing = recording.targets.keys() - layers.names_loaded(self._model)
        if missing:
            raise FailedPrecondition(
                counted(len(missing), "parameter that receives weights is", "parameters that receive weights are")
                + f" no longer in the model: {', '.join(sorted(missing)[:3])}",
                fix="vLLM has renamed layers after loading: updates of such engines are not supported",
            )

    @torch.no_grad()
    def apply(self, update: lazy.Update, recording: lazy.Recording, rest: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill the model's parameters.

        Args:
            update: the prepared update.
            recording: the recording that it was made from.
            rest: tensors of the version for which the model's loader must run.
        """
        wanted, made = self._wanted(recording, update.replaced), self.ahead.made(update)
        if not rest and (recording is self._all_as_loaded or self._lies_as_loaded(recording, wanted, update)):
            self._all_as_loaded = None if update.replaced else recording
            _fill_together(update, recording, wanted)
            update.fill_made(made)
            self._process_attention()
        else:
            in_place = not update.replaced
            with layers.reloading(self._model, self._model_config), _borrowed_loaders() as borrowed:
                wanted = self._wanted(recording, update.replaced)  # layers have different tensors now
                _check_complete(recording, wanted, update)
                for layer, names in wanted:
                    fills = {name: _filler(update, recording, full) for name, full in names.items()}
                    # otherwise the loader fills it too
                    alone = not rest or _parameters_of(layer) <= fills.keys()
                    in_place &= self._fill(layer, fills, borrowed, alone=alone)
                update.fill_made(made)
                if rest:  # after everything is filled, because loaders may derive values from it
                    self._model.load_weights(iter(rest))
            self._all_as_loaded = recording if in_place and not rest else None
        self._process_shared([layer for layer, _ in wanted])

    def process_staged(self, update: lazy.Update, recording: lazy.Recording) -> int:
        """Process those layers of a staged version that can be processed in parallel with the engine.

        Returns their number; `apply` processes the others.
        """
        return self.ahead.process(update, recording, leave=self._unprocessed)

    def watch_processing(self) -> None:
        """Observe which layers vLLM's processing does not change, when it next processes them."""
        for layer in self._model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, QuantizeMethodBase) and not _is_watched(method):
                method.process_weights_after_loading = partial(self._process_watched, method)

    def _process_watched(self, method: Any, layer: torch.nn.Module) -> None:
        """Run vLLM's processing of a layer once, and observe it."""
        del method.process_weights_after_loading
        before = watching.state(layer, method)
        with watching.AnyOperation() as operations:
            method.process_weights_after_loading(layer)
        if current_platform.is_cpu():
            after = watching.state(layer, method)[0]
            self._kept[layer] = watching.kept_names(before[0], after, operations.written)
        if not operations.seen and watching.state(layer, method) == before:
            self._unprocessed.add(layer)
        else:
            log.debug("vLLM processes %s: %s", type(layer).__name__, operations.seen or "its state changes")

    def load_again(self, source: lazy.Source) -> None:
        """Recreate the layers, fill them with the loaders of the model and its drafter, and let vLLM process them."""
        for layer in self._model.modules():
            _let_pack_again(getattr(layer, "quant_method", None))
        with layers.reloading(self._model, self._model_config):
            self._model.load_weights(source.tensors())
            if isinstance(self._model, WithDrafter):
                drafter: Any = self._model.drafter
                with unshared(self._model.target, drafter, layers.twin_of):
                    drafter.load_weights(of_drafter(source).tensors())
        # the first one of those that share a tensor has it
        self._process_shared([*self._model.modules()][::-1])
        self._all_as_loaded = None

    def live(self, recording: lazy.Recording) -> watching.Tensors:
        """Tensors that the layers keep as they were loaded, by the names of the recording's targets."""
        found: watching.Tensors = {}
        for layer, names in self._wanted(recording):
            own, processed = watching.own_tensors(layer), self._is_processed(layer)
            found |= {
                full: own[name]
                for name, full in names.items()
                if lazy.Shape.of(own[name]) == recording.targets[full]
                and (not processed or name in self._kept.get(layer, ()))
            }
        return found

    def also_made(self, recording: lazy.Recording) -> set[str]:
        """Names of targets of layers whose kernels also compute with tensors derived from them."""
        wanted = self._wanted(recording)
        return {full for layer, names in wanted if self._is_processed(layer) for full in names.values()}

    def _is_processed(self, layer: torch.nn.Module) -> bool:
        method = getattr(layer, "quant_method", None)
        return isinstance(method, QuantizeMethodBase) and layer not in self._unprocessed

    def _lies_as_loaded(
        self,
        recording: lazy.Recording,
        wanted: Sequence[tuple[torch.nn.Module, Mapping[str, str]]],
        update: lazy.Update,
    ) -> bool:
        """Whether all filled tensors are those that the layers compute with outside a reload, or have been processed
        ahead.
        """
        for layer, names in wanted:
            if self._is_processed(layer):
                return False
            own = watching.own_tensors(layer)
            if any(lazy.Shape.of(own[name]) != recording.targets[full] for name, full in names.items()):
                return False
        filled = {full for _, names in wanted for full in names.values()}
        return recording.targets.keys() == filled | update.replaced

    def _wanted(
        self,
        recording: lazy.Recording,
        replaced: Collection[str] = (),
    ) -> list[tuple[torch.nn.Module, dict[str, str]]]:
        """The layers to fill, with the full name of each of their tensors.

        Args:
            recording: recording of the loader.
            replaced: names of tensors that are skipped because they were replaced by processed ones.
        """
        found = []
        for prefix, layer in named_layers(self._model):
            full = {name: layers.full_name(prefix, name) for name in watching.own_tensors(layer)}
            names = {name: each for name, each in full.items() if each in recording.targets and each not in replaced}
            if names:
                found.append((layer, names))
        return found

    def _process_attention(self) -> None:
        """Let attention layers derive values from the weights of other layers, as at the end of reloading."""
        for layer in self._model.modules():
            if is_deferred(layer):
                layer.process_weights_after_loading(self._model_config.dtype)

    def _fill(self, layer: torch.nn.Module, fills: Mapping[str, Fill], borrowed: Borrowed, *, alone: bool) -> bool:
        """Fill one layer; ``alone`` if nothing else fills it. Returns whether it was filled in place."""
        if alone and self._is_as_loaded(layer):
            live = _live_tensors(layer)
            for name, fill in fills.items():
                fill(live[name])
            put_back(layer)
            return True
        with self._watched(layer):
            for name, fill in fills.items():
                if name in LEFT_IN_PLACE:  # vLLM leaves them in place
                    fill(watching.own_tensors(layer)[name])
                else:
                    _load(layer, name, fill, borrowed)
        return False

    def _is_as_loaded(self, layer: torch.nn.Module) -> bool:
        """Whether a loader fills the same tensors that the layer computes with."""
        if self._is_processed(layer):
            return False
        live, loaded = _live_tensors(layer), watching.own_tensors(layer)
        return live.keys() == loaded.keys() and all(
            watching.lies(live[name]) == watching.lies(tensor) for name, tensor in loaded.items()
        )

    @contextmanager
    def _watched(self, layer: torch.nn.Module) -> Iterator[None]:
        """Observe vLLM's processing of a layer inside the block, if any."""
        method = getattr(layer, "quant_method", None)
        if not isinstance(method, QuantizeMethodBase):
            yield
            return
        _let_pack_again(method)
        method.process_weights_after_loading = partial(self._process_watched, method)
        try:
            yield
        finally:
            vars(method).pop("process_weights_after_loading", None)

    def _process_shared(self, filled: Sequence[torch.nn.Module]) -> None:
        """Process layers that were not filled themselves but share a tensor with one that was, as a tied output layer
        does.
        """
        owners = {id(tensor): layer for layer in filled for tensor in watching.own_tensors(layer).values()}
        for layer in self._model.modules():
            method = getattr(layer, "quant_method", None)
            if not isinstance(method, QuantizeMethodBase) or layer in self._unprocessed:
                continue
            if any(owners.get(id(t), layer) is not layer for t in watching.own_tensors(layer).values()):
                method.process_weights_after_loading(layer)


def _parameters_of(layer: torch.nn.Module) -> set[str]:
    return {name for name, parameter in layer._parameters.items() if parameter is not None}


def _check_complete(
    recording: lazy.Recording,
    wanted: Sequence[tuple[torch.nn.Module, Mapping[str, str]]],
    update: lazy.Update,
) -> None:
    """Refuse, before anything is filled, an update that would leave a recorded tensor unchanged."""
    filled = {full for _, names in wanted for full in names.values()}
    missing = sorted(recording.targets.keys() - filled - update.replaced)
    if missing:
        raise FailedPrecondition(
            counted(len(missing), "tensor", "tensors")
            + f" of the model would keep what was loaded before: {named(missing, _MOST_NAMED)}",
            fix="start the engine again from the new version",
        )


def _let_pack_again(method: Any) -> None:
    """Make vLLM recreate its CPU kernel of experts, because it packs weights only at creation."""
    if current_platform.is_cpu() and getattr(method, "moe_kernel", None) is not None:
        method.moe_kernel = None


def _fill_together(
    update: lazy.Update,
    recording: lazy.Recording,
    wanted: Sequence[tuple[torch.nn.Module, Mapping[str, str]]],
) -> None:
    """Fill the tensors that layers compute with, in one step, except those that processing has cast."""
    together: watching.Tensors = {}
    for layer, names in wanted:
        own = watching.own_tensors(layer)
        for name, full in names.items():
            if own[name].dtype == recording.targets[full].dtype:
                together[full] = own[name].detach()
            else:
                _filler(update, recording, full)(own[name])
    update.fill(together)


def _filler(update: lazy.Update, recording: lazy.Recording, full: str) -> Fill:
    wanted = recording.targets[full]

    def fill(param: torch.Tensor) -> None:
        if param.is_meta:  # vLLM counts the elements that a loader copies, to know when a layer is complete
            torch.empty_like(param).copy_(param)
        elif param.dtype == wanted.dtype:
            update.fill({full: param.data})
        else:  # processing has cast a tensor that vLLM leaves in place
            loaded = torch.empty_strided(wanted.size, wanted.stride, dtype=wanted.dtype, device=param.device)
            update.fill({full: loaded})
            param.data.copy_(loaded)

    return fill


def _load(layer: torch.nn.Module, name: str, fill: Fill, borrowed: Borrowed) -> None:
    """Make vLLM call a function with the parameter when it recreates the layer."""
    parameter: Any = getattr(layer, name)
    borrowed.append((parameter, dict(vars(parameter))))
    loader = layers.original_loader(getattr(parameter, "weight_loader", None))

    def fill_or_load(param: Any, *loaded: Any, **options: Any) -> Any:
        return loader(param, *loaded, **options) if loaded or options else fill(param)

    parameter.weight_loader = fill_or_load
    parameter.weight_loader = make_online_process_loader(layer, name)
    parameter.weight_loader(parameter)


@contextmanager
def _borrowed_loaders() -> Iterator[Borrowed]:
    """Parameters whose loaders are temporarily replaced; vLLM reuses the original loaders in the next update."""
    borrowed: Borrowed = []
    try:
        yield borrowed
    finally:
        for parameter, attributes in borrowed:
            vars(parameter).clear()
            vars(parameter).update(attributes)


def _live_tensors(layer: torch.nn.Module) -> watching.Tensors:
    """Tensors that a layer computes with, while it is in checkpoint format."""
    kept = get_layerwise_info(layer).kernel_tensors
    return {**kept[0], **kept[1]} if kept is not None else {}


def _is_watched(method: Any) -> bool:
    return "process_weights_after_loading" in vars(method)
