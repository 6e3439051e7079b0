"""Are versions held, approved and listed by their metadata over HTTP as by every other client?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.service.api.http.web import MODEL, MODEL_URL, Web, is_problem, web_of_two_versions
from weighbridge import NotFound, TrainerClient, Version
from weighbridge.errors import FailedPrecondition, InvalidArgument


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    """One of its own: other tests count on versions that stay as they are."""
    with web_of_two_versions(tmp_path_factory) as found:
        yield found


def pushed(web: Web, **options: Any) -> Version:
    with TrainerClient(web.running.address) as trainer:
        return trainer.push_folder(MODEL, web.hf_folder, **options).wait(timeout=60)


def test_a_candidate_is_shown_and_approved(web: Web) -> None:
    assert web.http.get(f"{MODEL_URL}/gate").json() == {"approval_required": False, "allow_nonfinite": False}
    number = pushed(web, candidate=True).number
    shown = web.http.get(f"{MODEL_URL}/versions/{number}").json()
    assert shown["held"] == ["candidate"]
    assert web.http.get(f"{MODEL_URL}/refs").json()["refs"] == {"latest": 2, "live": 2}
    assert "weighbridge_versions_held 1.0" in web.http.get("/metrics").text
    approved = web.http.post(f"{MODEL_URL}/versions/{number}/approve", json={"note": "looked at it"}).json()
    assert (approved["held"], approved["approved_reasons"]) == ([], ["candidate"])
    assert approved["approved_note"] == "looked at it"
    assert approved["approved_by"], "the address of the caller"
    assert web.http.get(f"{MODEL_URL}/refs").json()["refs"] == {"latest": number, "live": number}
    again = web.http.post(f"{MODEL_URL}/versions/{number}/approve", json={"by": "somebody else"})
    assert again.json() == approved


def test_a_gate_is_set_and_what_is_left_out_is_not_said(web: Web) -> None:
    both = {"approval_required": True, "allow_nonfinite": True}
    assert web.http.put(f"{MODEL_URL}/gate", json=both).json() == both
    assert pushed(web).held == ("candidate",)
    none = web.http.put(f"{MODEL_URL}/gate", json={}).json()
    assert none == web.http.get(f"{MODEL_URL}/gate").json() == dict.fromkeys(both, False)
    assert pushed(web).held == ()
    is_problem(web.http.put(f"{MODEL_URL}/gate", json={"approval_required": 1}), 400, "invalid_argument")
    is_problem(web.http.put(f"{MODEL_URL}/gate", json={"approval": True}), 400, "invalid_argument")


def test_metadata_keeps_its_kinds_and_versions_are_listed_by_it(web: Web) -> None:
    said = {"reward": 0.5, "epoch": 1, "ok": True, "note": "1", "whole": 2.0}
    number = pushed(web, metadata=said).number
    found = web.http.get(f"{MODEL_URL}/versions/{number}").json()["metadata"]
    assert {key: (value, type(value)) for key, value in found.items()} == {
        key: (value, type(value)) for key, value in said.items()
    }
    asked = {"where": ["reward>=0.5", "ok=true"]}
    [listed] = web.http.get(f"{MODEL_URL}/versions", params=asked).json()["versions"]
    assert listed["number"] == number
    assert web.http.get(f"{MODEL_URL}/versions", params={"where": "reward>1"}).json()["versions"] == []
    is_problem(web.http.get(f"{MODEL_URL}/versions", params={"where": "reward"}), 400, "invalid_argument")


def test_what_cannot_be_approved_is_refused(web: Web) -> None:
    is_problem(web.http.post(f"{MODEL_URL}/versions/99/approve", json={}), 404, "not_found")
    is_problem(web.http.post(f"{MODEL_URL}/versions/latest/approve", json={}), 400, "invalid_argument")
    number = pushed(web, candidate=True).number
    with TrainerClient(web.running.address) as client:
        with pytest.raises(InvalidArgument):
            client.approve(MODEL, number, note="two\nlines")
        with pytest.raises(InvalidArgument):
            client.approve(MODEL, number, by="x" * 257)
        with pytest.raises(InvalidArgument):
            client.approve(MODEL, 0)
        with pytest.raises(NotFound):
            client.approve("no/model", 1)
        assert client.version(MODEL, number).held
        client.delete_version(MODEL, number)  # no ref names it
        with pytest.raises(FailedPrecondition, match="taken out of history"):
            client.approve(MODEL, number)


@pytest.mark.parametrize("text", ["1.0", "+1", "1_0", "%201", "\u0661"])
def test_a_path_names_a_version_by_its_digits_alone(web: Web, text: str) -> None:
    """The other texts that Python reads as numbers may be names of refs, for which callers have other rights."""
    url = f"{MODEL_URL}/versions/{text}"
    is_problem(web.http.post(f"{url}/approve", json={}), 400, "invalid_argument")
    is_problem(web.http.delete(url), 400, "invalid_argument")
    is_problem(web.http.post(f"{url}/signatures", content=b"{}"), 400, "invalid_argument")
    assert web.http.get(f"{MODEL_URL}/versions/1").json()["state"] == "durable"


def test_numbers_out_of_range_are_refused_by_name_and_a_large_limit_is_none(web: Web) -> None:
    with TrainerClient(web.running.address) as client:
        for approvals in (-1, 1 << 32):
            with pytest.raises(InvalidArgument, match="out of range"):
                client.protect_ref(MODEL, "prod", approvals=approvals)
        assert client.versions(MODEL, limit=1 << 32) == client.versions(MODEL)
