"""Adapters to other libraries. A library is imported only when it is used.

`engine_rank` contains the code that the adapters to engines share.
"""

# May import: `follow`, `_lazy`, `_clients` and folders below, and each the library that it is for.
#
# - `engine_rank`: the contract between engines and the service, shared by all adapters to engines.
# - `vllm`: load format and weight-transfer engine of vLLM.
# - `sglang`: plug-in of SGLang.
# - `transformers`: transformers models that load and update from the service.
# - `megatron_saving`: Megatron's save, with a push.
# - `megatron_saved_state`: state that Megatron's save receives in addition to the model.
# - `verl`: checkpoint engine and checkpoint managers of verl.
# - `nemo_rl`: checkpoint engine of NeMo-RL.
# - `trl`: weight transfer of TRL.
# - `slime`: updater of weights of slime and Miles.
# - `areal`: trainer and actors of AReaL.
# - `torch`: storage of torch.distributed.checkpoint.
# - `settings`: reader of settings that users write.
# - `weight_updates`: updates of RL frameworks, which both sides identify by a ticket.
# - `pausing`: pauses of engines' generation around an update.
# - `peft`: models with peft adapters.
# - `guarded_pushes`: pushes from hooks, which must not harm training.
# - `checkpoint_names`: training steps in names of checkpoints.
