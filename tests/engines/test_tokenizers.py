"""Does the tokenizer of a version come with it, and is it said where there is none?"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.support.raw_clients import tiny_folder
from tests.support.services import running_service
from weighbridge import NotFound, TrainerClient
from weighbridge.integrations.transformers import tokenizer_from_weighbridge

MODEL = "acme/tiny"


def test_a_tokenizer_comes_with_its_model_and_none_is_made_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_folder(tmp_path / "hf").folder
    with running_service(tmp_path / "store") as service, TrainerClient(service.address) as trainer:
        with caplog.at_level(logging.WARNING):
            trainer.import_folder(MODEL, folder).wait(timeout=60)
        assert "has no tokenizer" in caplog.text
        caplog.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", "1")  # rank 0 says it for all
            trainer.register_model(MODEL, folder)
        assert "has no tokenizer" not in caplog.text
        with pytest.raises(
            NotFound, match=r"has no tokenizer: its files besides the weights are config\.json"
        ) as refused:
            tokenizer_from_weighbridge(MODEL, service.address)
        assert "register_model" in refused.value.fix

        words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
        caplog.clear()
        trainer.import_folder(MODEL, folder).wait(timeout=60)
        assert "has no tokenizer" not in caplog.text
        tokenizer = tokenizer_from_weighbridge(MODEL, service.address)
        assert tokenizer.convert_tokens_to_ids(["b", "a"]) == [1, 0]
