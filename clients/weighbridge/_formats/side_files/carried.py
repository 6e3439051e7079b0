"""Files, other than weights, of a version that is pushed from a folder: the folder's files, and the registered files
that they do not replace. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_TOKENIZER = (
    "tokeniz",
    "vocab",
    "merges",
    "tekken",
    "special_tokens_map",
    "added_tokens",
    "chat_template",
    "bpe.codes",
    "spiece",
    "sentencepiece",
)
_TOKENIZER_ENDINGS = (".model", ".tiktoken", ".spm", ".bpe")
_TOKENIZER_FOLDER = "additional_chat_templates/"
_IS_TOKENIZER = ("tokeniz", "vocab", "merges", "tekken", "spiece", "sentencepiece")


def has_tokenizer(files: Iterable[str]) -> bool:
    """Whether files with these names form a tokenizer."""
    return any(name.startswith(_IS_TOKENIZER) or name.endswith(_TOKENIZER_ENDINGS) for name in files if "/" not in name)


def is_of_tokenizer(name: str) -> bool:
    """Whether a file belongs to the tokenizer. Mixed with files of another tokenizer, it would form a third one."""
    if "/" in name:
        return name.startswith(_TOKENIZER_FOLDER)
    return name.startswith(_TOKENIZER) or name.endswith(_TOKENIZER_ENDINGS)


def carried_files(registered: Mapping[str, bytes], folder: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a version whose weights come from a folder.

    The folder's files were saved together with its weights. Trainers often save only a config, so registered files that
    the folder lacks are kept, except tokenizer files if the folder contains a tokenizer.

    Args:
        registered: the model's registered files, by name.
        folder: files next to the weights, by name.
    """
    brings_tokenizer = has_tokenizer(folder)
    stay = {name: content for name, content in registered.items() if not (brings_tokenizer and is_of_tokenizer(name))}
    return {**stay, **folder}
