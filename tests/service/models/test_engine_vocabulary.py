"""Is a padded vocabulary zero where there are no words, and one that does not divide refused?"""

from __future__ import annotations

import math

import pytest
import torch

from tests.service.models.engine_models import Source, by_hand, real_bridge, same, weights_of
from tests.support.reference import tiny_config
from weighbridge import TensorParallel
from weighbridge.errors import InvalidArgument


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("vocabulary", "multiple"), [(128, 64), (130, 64), (131, 8), (5, 64), (130, 2)])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_padded_vocabulary_is_zero_where_there_are_no_words(
    tied: bool, vocabulary: int, multiple: int, size: int
) -> None:
    config = tiny_config("llama", tied=tied, vocab_size=vocabulary)
    source = Source(real_bridge(config), weights_of(config))
    padded = math.ceil(vocabulary / multiple) * multiple
    if padded % size:
        with pytest.raises(InvalidArgument, match=r"embed_tokens\.weight.*cut into 8"):
            source.rank(size, 0, vocab_multiple=multiple)
        return
    for rank in range(size):
        found = source.rank(size, rank, vocab_multiple=multiple)
        # the output layer of a vocabulary that does not divide by the size cannot be cut by hand; it is set below
        output = {} if tied else {"lm_head.weight": torch.zeros(size)}
        expected = by_hand(source.state | output, 4, size, rank)
        for name in ("model.embed_tokens.weight", *(() if tied else ("lm_head.weight",))):
            whole = torch.cat([source.state[name], torch.zeros(padded - vocabulary, 64)])
            expected[name] = whole.chunk(size)[rank]
            layout = source.layout(TensorParallel(size, rank, vocab_multiple=multiple))
            assert layout.tensors[name].shape == (padded, 64)
        same(found, expected)


def test_a_vocabulary_that_does_not_divide_is_refused_with_what_to_do() -> None:
    config = tiny_config("llama", tied=False, vocab_size=130)
    source = Source(real_bridge(config), weights_of(config))
    with pytest.raises(InvalidArgument, match=r"lm_head\.weight[\s\S]*vocab_multiple"):
        source.rank(4, 0)
