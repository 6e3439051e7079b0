"""Files besides the weights that a version pushed from a folder has: the folder's, and of the registered ones those that it does not replace. Pure."""

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
    """Whether files with these names are, or make, a tokenizer."""
    return any(
        name.startswith(_IS_TOKENIZER) or name.endswith(_TOKENIZER_ENDINGS)
        for name in files
        if "/" not in name
    )


def is_of_tokenizer(name: str) -> bool:
    """Whether a file belongs to the tokenizer: together with those of another one it would make a third."""
    if "/" in name:
        return name.startswith(_TOKENIZER_FOLDER)
    return name.startswith(_TOKENIZER) or name.endswith(_TOKENIZER_ENDINGS)


def carried_files(registered: Mapping[str, bytes], folder: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a version whose weights come from a folder.

    The folder's files are what its weights were saved with. Trainers often save a config alone, so the registered files that the folder does
    not have stay, but for those of the tokenizer if the folder brings one.

    Args:
        registered: by name, as the model is registered.
        folder: by name, as they lie beside the weights.
    """
    brings_tokenizer = has_tokenizer(folder)
    stay = {
        name: content
        for name, content in registered.items()
        if not (brings_tokenizer and is_of_tokenizer(name))
    }
    return {**stay, **folder}
