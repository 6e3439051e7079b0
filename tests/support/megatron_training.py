"""Real Megatron-core training on torch's default device, without a GPU as well: its data parallelism, its optimizers,
its way of making gradients whole.

Without a GPU, beyond what the demo replaces, optimizers insist on CUDA by two names: ``torch.tensor`` and
``torch.zeros`` are called with ``device="cuda"``, and ``Tensor.type()`` is compared with the types of CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from weighbridge_demo.megatron_cpu import Parallel, build_model, forward_backward, mean_loss

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from transformers import PretrainedConfig

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Form in which Megatron saves the state of its optimizers."""
_TYPE, _TENSOR, _ZEROS = torch.Tensor.type, torch.tensor, torch.zeros


def _type_on_cuda(tensor: Tensor, *args: Any, **options: Any) -> Any:
    found = _TYPE(tensor, *args, **options)
    return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, device: Any = None, **options: Any) -> Tensor:
        return make(*args, device=None if device == "cuda" else device, **options)

    return made


def patch_optimizers_for_cpu() -> None:
    """Replace the names through which Megatron's optimizers insist on CUDA, for the rest of the process; again, it
    changes nothing.
    """
    torch.Tensor.type = _type_on_cuda  # type: ignore[assignment, method-assign]
    torch.tensor, torch.zeros = _on_cpu(_TENSOR), _on_cpu(_ZEROS)  # type: ignore[assignment]


def _count_steps_by_torch(optimizer: Any) -> None:
    """Let a distributed optimizer that torch's Adam is in load a checkpoint: Megatron does so by Transformer Engine's
    or Apex's alone.

    Theirs count steps in groups of parameters; torch's do in the state of each, where Megatron looks for them in the
    checkpoint, too.
    """
    set_states, get_states = (
        optimizer._set_main_param_and_optimizer_states,
        optimizer._get_main_param_and_optimizer_states,
    )

    def set_without_step(parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
        set_states(parameter, {"step": get_states(parameter)["step"], **tensors})

    optimizer._set_main_param_and_optimizer_states = set_without_step


def let_it_write() -> None:
    """Let Megatron write checkpoints here: its writers are processes that report to a server process; ranks are
    daemons, which may start none.
    """
    import multiprocessing
    import queue

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def _take_steps_of_groups(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's Adam take the steps that Megatron has loaded to where Transformer Engine's and Apex's count them:
    each parameter by a tensor of its own.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))


class TrainingRank:
    """One rank of a training loop: its stage of a model, and Megatron's optimizer of it. Its methods are collective.

    Args:
        config: config of the model, as for `build_model`.
        parallel: the parallelism that the rank has joined.
        distributed: whether ranks of data parallelism share out the optimizer's state.
        dtype: dtype of the model's parameters; the optimizer keeps float32 of those of 16 bits.
        build: makes the stage.
        seed: seed of the weights, which are different on each rank.
        options: options of `build`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        parallel: Parallel,
        *,
        distributed: bool = False,
        dtype: torch.dtype = torch.float32,
        build: Callable[..., GPTModel] = build_model,
        seed: int = 0,
        **options: Any,
    ) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        device = torch.get_default_device()
        if device.type == "cpu":
            patch_optimizers_for_cpu()
        else:
            model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1000 * seed + torch.distributed.get_rank())
        self.parallel, self.distributed, self._vocabulary = parallel, distributed, config.vocab_size
        self.stage = build(config, parallel, dtype=dtype, **options).to(device)
        # there is no dropout; in training mode experts refuse tensor parallelism without sequence parallelism
        self.stage.eval()
        # small buckets, so that ranges begin and end inside of parameters
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, bucket_size=10_000)
        self.model = DistributedDataParallel(self.stage.config, ddp, self.stage)
        self.model.broadcast_params()
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-3,
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model], use_gloo_process_groups=False)

    def sharded_state_dict(self, metadata: Any = None) -> dict[str, Any]:
        """The model's, as Megatron-LM takes it: of what data parallelism wraps."""
        return self.stage.sharded_state_dict(metadata=metadata)  # type: ignore[no-any-return]

    def step(self, number: int) -> float | None:
        """One step on the batch of this number. The global batch's mean loss, on ranks of the last stage."""
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        generator = torch.Generator("cpu").manual_seed(number)
        tokens = torch.randint(self._vocabulary, (8, 9), generator=generator, device="cpu")
        mine = tokens.to(torch.get_default_device()).chunk(self.parallel.dp)[parallel_state.get_data_parallel_rank()]
        loss = forward_backward(self.stage, mine[:, :-1].contiguous(), mine[:, 1:].contiguous(), self.parallel)
        finalize_model_grads([self.model])
        self.optimizer.step()
        return None if loss is None else mean_loss(loss, self.parallel)

    def step_at_random(self) -> None:
        """One step by random gradients, for models that cannot compute on CPU."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        for parameter in self.stage.parameters():
            parameter.main_grad.normal_()
        self.model.finish_grad_sync()
        self.optimizer.step()

    def own_state(self, metadata: Mapping[str, Any] | None = None) -> dict[str, list[Piece]]:
        """Pieces that Megatron's own sharded state dicts of model and optimizer would write to a checkpoint, by the
        names of whole tensors.
        """
        weights = self.sharded_state_dict(metadata)
        return pieces(
            {
                "optimizer": self.optimizer.sharded_state_dict(weights, metadata=dict(SHARDING)),
                "model": weights,
            }
        )

    def save(self, folder: Path, common: Mapping[str, Any], **options: Any) -> Any:
        """Save model and optimizer to an existing folder as Megatron-LM does with ``--ckpt-format torch_dist``.

        Returns the result of ``dist_checkpointing.save``.
        """
        from megatron.core import dist_checkpointing

        let_it_write()
        weights = self.sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(weights, metadata=dict(SHARDING))
        state = {"model": weights, "optimizer": optimizer, **common}
        return dist_checkpointing.save(state, str(folder), content_metadata=dict(SHARDING), **options)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Let Megatron load a checkpoint into the optimizer meanwhile, which is torch's Adam."""
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        distributed = [each for each in self.optimizer.chained_optimizers if isinstance(each, DistributedOptimizer)]
        for each in distributed:
            _count_steps_by_torch(each)
        if distributed:  # they ask a state that is there for its step count
            self.step(0)
        yield
        for each in distributed:
            _take_steps_of_groups(each.optimizer)

    def load(self, folder: Path) -> dict[str, Any]:
        """Load model and optimizer from such a folder as Megatron-LM does. What it has besides."""
        from megatron.core import dist_checkpointing

        with self.loading():
            sharding = dist_checkpointing.load_content_metadata(str(folder))
            weights = self.sharded_state_dict(sharding)
            optimizer = self.optimizer.sharded_state_dict(weights, is_loading=True, metadata=sharding)
            loaded: dict[str, Any] = dist_checkpointing.load({"model": weights, "optimizer": optimizer}, str(folder))
            self.model.load_state_dict(loaded.pop("model"))
            self.optimizer.load_state_dict(loaded.pop("optimizer"))
        return loaded


class Piece(NamedTuple):
    """A part of a tensor: the shape of the whole one, where the part begins, and its elements."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor


def pieces(state: dict[str, Any]) -> dict[str, list[Piece]]:
    """Pieces that a rank would write of Megatron's sharded state dict, by the names of whole tensors.

    Applies the state dict's factories.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica

    apply_factories(state)
    found: dict[str, list[Piece]] = {}
    for each in nested_values(state):
        if isinstance(each, ShardedTensor) and is_main_replica(each.replica_id):
            data = each.data.detach().cpu().clone()[(None,) * each.prepend_axis_num]
            found.setdefault(each.key, []).append(Piece(each.global_shape, each.global_offset, data))
    return found


def wholes(of_ranks: Iterable[Mapping[str, list[Piece]]]) -> dict[str, Tensor]:
    """The tensors of which ranks have parts. Each element must be in exactly one of them."""
    made: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for of_rank in of_ranks:
        for name, pieces in of_rank.items():
            for shape, offset, data in pieces:
                whole = made.setdefault(name, torch.empty(shape, dtype=data.dtype))
                count = counts.setdefault(name, torch.zeros(shape, dtype=torch.int8))
                where = tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))
                assert whole.shape == shape
                assert whole.dtype == data.dtype
                whole[where] = data
                count[where] += 1
    assert all(bool((count == 1).all()) for count in counts.values())
    return made
