"""Real megatron-core models on a machine without a GPU: built, run and trained.

Genuine `GPTModel`s of megatron-core 0.16 with the local layer spec (no Transformer Engine), spread over
processes by tensor, pipeline and data parallelism, with gloo for communication. The pipeline schedule is the
plainest there is: one micro-batch, activations forward and gradients backward. It is slow, but a parameter,
its shard and its gradient are what Megatron makes of them.

Every function but `patch_for_cpu` is collective: all ranks of the job call it, in the same order. Hidden
states between stages are `[seq, batch, hidden]` of the model's dtype. Configurations are those of transformers 4 or 5.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import megatron.core.tensor_parallel
import megatron.core.tensor_parallel.random
import megatron.core.transformer.moe.moe_utils
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("llama", "qwen2", "qwen3")
"""The `model_type`s that `build_model` knows."""


@dataclass(frozen=True)
class Parallel:
    """Parallelism of a job.

    Ranks are numbered tensor first, then context, then data, then pipeline, as Megatron does by default.

    Attributes:
        tp: tensor parallelism.
        pp: pipeline parallelism.
        dp: data parallelism, of everything but experts.
        ep: expert parallelism; experts are spread over the ranks of one pipeline stage, whatever these hold of
            the other layers, so `ep * expert_tp` divides `tp * cp * dp`.
        etp: tensor parallelism of experts; None for the same as the other layers, as in Megatron.
        cp: context parallelism. It has ranks and process groups, but the local layer spec cannot run it.
        vpp: virtual pipeline stages of each rank, or None.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    vpp: int | None = None

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def expert_tp(self) -> int:
        """Tensor parallelism of experts."""
        return self.tp if self.etp is None else self.etp


class _NoRngTracker:
    """Stands in for Megatron's CUDA random state: nothing is random after construction, dropout is off."""

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        del name
        yield


_NO_RNG_TRACKER = _NoRngTracker()


def _cpu_device() -> torch.device:
    return torch.device("cpu")


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _rng_tracker(*_args: Any, **_kwargs: Any) -> _NoRngTracker:
    return _NO_RNG_TRACKER


def _stay(tensor: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return tensor


def patch_for_cpu() -> None:
    """Replace the names through which megatron-core insists on CUDA; calling it again changes nothing.

    The patches are process-wide (`torch.cuda.*`, `Tensor.cuda`, Megatron's random state): for a process that
    does nothing else.
    """
    patches: tuple[tuple[Any, str, Any], ...] = (
        # Buffers are created on "the current device", and checkpoint saving waits for it.
        (torch.cuda, "current_device", _cpu_device),
        (torch.cuda, "synchronize", _nothing),
        # Attention asks for the tracker through the package, embeddings through the module.
        (megatron.core.tensor_parallel, "get_cuda_rng_tracker", _rng_tracker),
        (megatron.core.tensor_parallel.random, "get_cuda_rng_tracker", _rng_tracker),
        # Tied embeddings on different pipeline stages call `.cuda()` on the shared weight.
        (torch.Tensor, "cuda", _stay),
        # Routers look whether this exists, but it is not even defined without Transformer Engine.
        (megatron.core.transformer.moe.moe_utils, "te_general_gemm", None),
    )
    for owner, name, replacement in patches:
        setattr(owner, name, replacement)
    # Megatron has torch.compile fuse small functions, which takes longer than running them and a C++ compiler.
    torch.compiler.set_stance("force_eager")


def init_rank(parallel: Parallel, rank: int, store_path: str) -> None:
    """Join the job as one rank: torch.distributed over gloo, then Megatron's process groups.

    Args:
        parallel: parallelism of the job.
        rank: this process, 0 to `parallel.world_size - 1`.
        store_path: a file that all ranks see and that does not exist before the first of them makes it; one
            left over from another job makes ranks wait for each other for ever.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=parallel.world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        # Its gloo copies of the groups would be gloo beside gloo.
        create_gloo_process_groups=False,
    )


def shutdown() -> None:
    """Leave the job; the process may join another one afterwards."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def check_joined(parallel: Parallel) -> None:
    """Raise ValueError when Megatron's groups are of another shape: the ranks would wait for ever."""
    joined = Parallel(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        dp=parallel_state.get_data_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        etp=parallel_state.get_expert_tensor_parallel_world_size(),
        cp=parallel_state.get_context_parallel_world_size(),
        vpp=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
    )
    if joined != replace(parallel, etp=parallel.expert_tp):
        raise ValueError(f"this rank has joined a job of {joined}, not of {parallel}")


class _BiasedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]  # megatron-core is untyped
    """An output projection with a bias, whatever `add_bias_linear` says, which governs the MLP as well."""

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        del bias
        super().__init__(*args, bias=True, **kwargs)


@dataclass(frozen=True)
class _Biases:
    """Linear layers of a model family that have a bias."""

    qkv: bool
    attention_output: bool
    mlp: bool

    @classmethod
    def of(cls, hf_config: PretrainedConfig) -> _Biases:
        if hf_config.model_type == "qwen2":
            return cls(qkv=True, attention_output=False, mlp=False)
        attention = bool(getattr(hf_config, "attention_bias", False))
        return cls(qkv=attention, attention_output=attention, mlp=bool(getattr(hf_config, "mlp_bias", False)))


def _refuse_unsupported(hf_config: PretrainedConfig) -> None:
    """Raise NotImplementedError for a configuration that would build a model other than the one described."""
    reason = None
    if hf_config.model_type not in FAMILIES:
        reason = f"model_type {hf_config.model_type!r} is not one of {', '.join(FAMILIES)}"
    elif hf_config.hidden_act != "silu":
        reason = f"hidden_act {hf_config.hidden_act!r} is not 'silu'"
    elif (scaling := rope_scaling(hf_config)) is not None:
        reason = f"rope_scaling {scaling!r} is not None"
    elif getattr(hf_config, "use_sliding_window", False):
        reason = "use_sliding_window is set"
    elif _Biases.of(hf_config).mlp and not _Biases.of(hf_config).attention_output:
        reason = "mlp_bias without attention_bias: Megatron's add_bias_linear covers both"
    if reason is not None:
        raise NotImplementedError(f"cannot build this model with megatron-core on CPU: {reason}")


def rotary_base(hf_config: PretrainedConfig) -> float:
    """`rope_theta`, which transformers 5 keeps in `rope_parameters`."""
    parameters = getattr(hf_config, "rope_parameters", None)
    base: float = hf_config.rope_theta if parameters is None else parameters["rope_theta"]
    return base


def rope_scaling(hf_config: PretrainedConfig) -> dict[str, Any] | None:
    """Scaling of rotary positions; None if there is none. transformers 5 keeps it beside the base."""
    parameters: dict[str, Any] | None = getattr(hf_config, "rope_parameters", None)
    if parameters is None:
        found: dict[str, Any] | None = getattr(hf_config, "rope_scaling", None)
        return found
    return None if parameters.get("rope_type", "default") == "default" else parameters


def _refuse_uneven(hf_config: PretrainedConfig, parallel: Parallel, padded_vocab_size: int) -> None:
    """Raise ValueError when the model does not divide by the parallelism."""
    divisions = (
        ("num_attention_heads", hf_config.num_attention_heads, "tp", parallel.tp),
        ("num_key_value_heads", hf_config.num_key_value_heads, "tp", parallel.tp),
        ("intermediate_size", hf_config.intermediate_size, "tp", parallel.tp),
        ("padded_vocab_size", padded_vocab_size, "tp", parallel.tp),
        ("num_hidden_layers", hf_config.num_hidden_layers, "pp", parallel.pp),
    )
    for field, value, axis, size in divisions:
        if value % size:
            raise ValueError(f"{field}={value} does not divide by {axis}={size}")
    if padded_vocab_size < hf_config.vocab_size:
        raise ValueError(f"padded_vocab_size={padded_vocab_size} is less than vocab_size={hf_config.vocab_size}")


def common_config(hf_config: PretrainedConfig, parallel: Parallel, dtype: torch.dtype) -> dict[str, Any]:
    """Fields of a `TransformerConfig` that all families share, those that keep it off CUDA among them."""
    return {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": hf_config.initializer_range,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        # The fused kernels, and norms that know sequence parallelism, are for CUDA.
        "use_cpu_initialization": True,
        "sequence_parallel": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
    }


def build_model(
    hf_config: PretrainedConfig,
    parallel: Parallel,
    *,
    dtype: torch.dtype = torch.float32,
    padded_vocab_size: int | None = None,
) -> GPTModel:
    """Make this rank's stage, with random weights, of the model that a Hugging Face configuration describes.

    Weights are drawn from torch's global generator, so ranks that seed it alike hold shards of one model.

    Args:
        hf_config: configuration of a llama, qwen2 or qwen3 model, its embeddings tied or not.
        parallel: the parallelism that `init_rank` was called with.
        dtype: dtype of all parameters, norms included.
        padded_vocab_size: rows of the embedding and of the output layer; `vocab_size` if None.

    Raises:
        NotImplementedError: the configuration asks for something this cannot build faithfully.
        ValueError: heads, vocabulary or layers do not divide by the parallelism, or `parallel` is not the job
            that this rank has joined.
    """
    check_joined(parallel)
    if parallel.vpp is not None or parallel.cp != 1:
        raise NotImplementedError(f"cannot build this model with megatron-core on CPU: {parallel} has vpp or cp")
    _refuse_unsupported(hf_config)
    rows = hf_config.vocab_size if padded_vocab_size is None else padded_vocab_size
    _refuse_uneven(hf_config, parallel, rows)
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    biases = _Biases.of(hf_config)
    qk_layernorm = hf_config.model_type == "qwen3"
    config = TransformerConfig(
        **common_config(hf_config, parallel, dtype),
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=head_dim,
        qk_layernorm=qk_layernorm,
        add_bias_linear=biases.mlp,
        add_qkv_bias=biases.qkv,
    )
    spec = copy.deepcopy(get_gpt_layer_local_spec(qk_layernorm=qk_layernorm, normalization="RMSNorm"))
    if biases.attention_output:
        spec.submodules.self_attention.submodules.linear_proj = _BiasedRowParallelLinear
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=rows,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings),
        position_embedding_type="rope",
        rotary_base=rotary_base(hf_config),
    )
    # GPTModel only knows the padded size; logits are trimmed to this one.
    model.unpadded_vocab_size = hf_config.vocab_size
    # torch's RMSNorm ignores params_dtype; Megatron's own Float16Module casts the same way.
    model.to(dtype)
    return model


def _run_stage(model: GPTModel, input_ids: Tensor, received: Tensor | None, labels: Tensor | None = None) -> Tensor:
    """One stage's forward: hidden states `[seq, batch, hidden]`, but on the last stage losses or logits.

    Losses `[batch, seq]` if there are labels, else logits `[batch, seq, padded_vocab]`.
    """
    batch, seq = input_ids.shape
    if received is not None:
        model.set_input_tensor(received)
    positions = torch.arange(seq).expand(batch, seq)
    # Megatron's convention: True is masked out.
    mask = torch.ones(1, 1, seq, seq, dtype=torch.bool).triu(1)
    output: Tensor = model(input_ids, positions, mask, labels=labels, runtime_gather_output=labels is None)
    return output


def _send(tensor: Tensor, to_rank: int) -> None:
    dist.send(tensor.contiguous(), dst=to_rank, group=parallel_state.get_pipeline_model_parallel_group())


def _receive(model: GPTModel, input_ids: Tensor, from_rank: int) -> Tensor:
    """Hidden states, or gradients of them, `[seq, batch, hidden]`."""
    batch, seq = input_ids.shape
    tensor = torch.empty(seq, batch, model.config.hidden_size, dtype=model.config.pipeline_dtype)
    dist.recv(tensor, src=from_rank, group=parallel_state.get_pipeline_model_parallel_group())
    return tensor


@torch.no_grad()
def forward_logits(model: GPTModel, input_ids: Tensor, parallel: Parallel) -> Tensor | None:
    """Run the whole pipeline forward with a causal mask.

    Args:
        model: this rank's stage.
        input_ids: int64 `[batch, seq]`, the same on all ranks that share a data-parallel rank.
        parallel: the parallelism that `init_rank` was called with.

    Returns:
        On every rank of the last stage float32 logits `[batch, seq, vocab_size]`, gathered over tensor
        parallelism and without the padding of the vocabulary; None on other stages.

    Raises:
        ValueError: `parallel` is not the job that this rank has joined.
    """
    check_joined(parallel)
    previous_rank = parallel_state.get_pipeline_model_parallel_prev_rank()
    received = None if model.pre_process else _receive(model, input_ids, previous_rank)
    output = _run_stage(model, input_ids, received)
    if not model.post_process:
        _send(output, parallel_state.get_pipeline_model_parallel_next_rank())
        return None
    return output[..., : model.unpadded_vocab_size].float()


def forward_backward(model: GPTModel, input_ids: Tensor, labels: Tensor, parallel: Parallel) -> Tensor | None:
    """Run the whole pipeline forward and backward; gradients are those of this rank's part of the batch.

    Padding rows of the vocabulary take part in the softmax, as they do in Megatron.

    Args:
        model: this rank's stage.
        input_ids: int64 `[batch, seq]`, the part of the global batch that belongs to this data-parallel rank.
        labels: int64 `[batch, seq]`, the token expected at each position (already shifted), all of them in
            the vocabulary.
        parallel: the parallelism that `init_rank` was called with.

    Returns:
        The mean cross entropy of this part of the batch, on every rank of the last stage; None on other stages.

    Raises:
        ValueError: `parallel` is not the job that this rank has joined.
    """
    check_joined(parallel)
    previous_rank = parallel_state.get_pipeline_model_parallel_prev_rank()
    next_rank = parallel_state.get_pipeline_model_parallel_next_rank()
    received = None
    if not model.pre_process:
        received = _receive(model, input_ids, previous_rank).requires_grad_()
    loss = None
    if model.post_process:
        loss = _run_stage(model, input_ids, received, labels).mean()
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        hidden = _run_stage(model, input_ids, received)
        _send(hidden.detach(), next_rank)
        hidden.backward(_receive(model, input_ids, next_rank))  # type: ignore[no-untyped-call]
    if received is not None:
        assert received.grad is not None
        _send(received.grad, previous_rank)
    return None if loss is None else loss.detach()


def train_step(
    model: GPTModel,
    optimizer: torch.optim.Optimizer,
    input_ids: Tensor,
    labels: Tensor,
    parallel: Parallel,
) -> float | None:
    """One optimizer step: forward and backward through the pipeline, gradients combined, weights updated.

    Args:
        model: this rank's stage.
        optimizer: over `model.parameters()` of this rank.
        input_ids, labels: as for `forward_backward`.
        parallel: the parallelism that `init_rank` was called with.

    Returns:
        The mean cross entropy of the global batch before the update, on every rank of the last stage; None on
        other stages.

    Raises:
        ValueError: `parallel` is not the job that this rank has joined.
    """
    optimizer.zero_grad(set_to_none=True)
    loss = forward_backward(model, input_ids, labels, parallel)
    _combine_gradients(model, parallel)
    optimizer.step()
    return None if loss is None else mean_loss(loss, parallel)


def mean_loss(loss: Tensor, parallel: Parallel) -> float:
    """The mean over data parallelism of losses of parts of the batch, on ranks of the last stage."""
    total = loss.clone()
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total.item() / parallel.dp


def _combine_gradients(model: GPTModel, parallel: Parallel) -> None:
    """Make gradients of parameters on several ranks whole, as Megatron's `finalize_model_grads` does."""
    tied_over_stages = parallel.pp > 1 and model.share_embeddings_and_output_weights
    if tied_over_stages and (model.pre_process or model.post_process):
        # Input side and output side each have a part of the gradient of the one weight.
        dist.all_reduce(model.shared_embedding_or_output_weight().grad, group=parallel_state.get_embedding_group())
    for name, parameter in model.named_parameters():
        # One weight for all heads, but this rank has only seen its own heads.
        if parallel.tp > 1 and (".q_layernorm." in name or ".k_layernorm." in name):
            dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
        if parallel.dp > 1:
            dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())
            parameter.grad.div_(parallel.dp)
