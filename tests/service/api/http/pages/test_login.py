"""Do browsers sign in with a token, for as long as it is valid, and can no other site act in their name?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.cookies import SimpleCookie
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.service.api.http.pages.conftest import Place, place_of
from tests.support.identities import identity, policy_file
from tests.support.waiting import eventually
from weighbridge import Credentials, TrainerClient
from weighbridge_service.access import tokens
from weighbridge_service.api.http.pages.login import Sessions

MODEL = "acme/smol"
PAGE = f"/models/{MODEL}"


@dataclass
class Guarded:
    """A service with a policy, and the tokens of its identities."""

    place: Place
    folder: Path
    tokens: dict[str, str]

    def write_policy(self, *names: str) -> None:
        """Let the policy know these identities alone."""
        may = {
            "trainer": ["push:acme/*", "pull:acme/*"],
            "releases": ["tag:acme/smol", "manage:acme/smol"],
            "reader": ["look:acme/smol"],
            "stranger": ["pull:other/*"],
        }
        policy_file(self.folder, *(identity(name, may[name], token=self.tokens[name]) for name in names))

    @contextmanager
    def browser(self, name: str = "") -> Iterator[httpx.Client]:
        """A browser; signed in, if a name is given."""
        url = self.place.url
        with httpx.Client(base_url=url, headers={"origin": url}, timeout=30) as client:
            if name:
                answer = client.post("/login", data={"token": self.tokens[name], "next": PAGE})
                assert (answer.status_code, answer.headers["location"]) == (303, PAGE)
            yield client


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    names = ("trainer", "releases", "reader", "stranger")
    given = {name: tokens.new_token() for name in names}
    found = Guarded(None, folder, given)  # type: ignore[arg-type]
    found.write_policy(*names)
    with place_of(folder, policy=folder / "policy.toml", policy_look=0.05, standing_look=0.1) as place:
        found.place = place
        shown = Credentials(token=given["trainer"], insecure=True)
        with TrainerClient(place.running.address, credentials=shown) as trainer:
            trainer.import_folder(MODEL, place.source.folder, step=1).wait(timeout=60)
        yield found


def test_who_shows_nothing_is_asked_for_a_token_and_told_nothing_else(guarded: Guarded) -> None:
    with guarded.browser() as browser:
        for path in ("/", PAGE, f"{PAGE}/versions/1", "/models/acme/none"):
            answer = browser.get(path)
            assert answer.status_code == 401
            assert 'name="token"' in answer.text
            assert f'value="{path}"' in answer.text, "where to go on"
            assert "qwen3" not in answer.text
        assert browser.get("/events").status_code == 401


def test_a_token_begins_a_session_whose_cookie_no_script_and_no_other_site_has(guarded: Guarded) -> None:
    with guarded.browser() as browser:
        answer = browser.post("/login", data={"token": guarded.tokens["reader"], "next": PAGE})
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert guarded.tokens["reader"].lower() not in cookie
        assert browser.get(PAGE).status_code == 200
        assert browser.post("/logout").status_code == 303
        assert browser.get(PAGE).status_code == 401


def test_the_cookie_of_a_browser_behind_a_proxy_with_tls_never_goes_without_it(guarded: Guarded) -> None:
    forwarded = {"x-forwarded-proto": "https"}
    with guarded.browser() as browser:
        signing_in = {"data": {"token": guarded.tokens["reader"]}, "headers": forwarded}
        cookie = SimpleCookie(browser.post("/login", **signing_in).headers["set-cookie"])  # type: ignore[arg-type]
        [(name, kept)] = cookie.items()
        assert (name.startswith("__Host-"), kept["secure"]) == (True, True)
        browser.cookies.clear()
        shown = {**forwarded, "cookie": f"{name}={kept.value}"}
        assert browser.get(PAGE, headers=shown).status_code == 200
        assert browser.get(PAGE, headers={"cookie": shown["cookie"]}).status_code == 401


@pytest.mark.parametrize("shown", ["nonsense", "wb_" + "x" * 40])
def test_a_wrong_token_begins_nothing(guarded: Guarded, shown: str) -> None:
    with guarded.browser() as browser:
        answer = browser.post("/login", data={"token": shown})
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
        assert shown not in answer.text


@pytest.mark.parametrize(
    "following", ["https://evil.test/", "//evil.test", "/\\evil.test", "javascript:alert(1)", "/\r\nx: y"]
)
def test_signing_in_leads_to_no_other_site(guarded: Guarded, following: str) -> None:
    with guarded.browser() as browser:
        answer = browser.post("/login", data={"token": guarded.tokens["reader"], "next": following})
        assert answer.headers["location"] == "/"


def test_a_cookie_counts_on_pages_alone(guarded: Guarded) -> None:
    with guarded.browser("releases") as browser:
        assert browser.get(PAGE).status_code == 200
        assert browser.get(f"/v1/models/{MODEL}").status_code == 401
        assert browser.put(f"/v1/models/{MODEL}/refs/prod", json={"version": 1}).status_code == 401


@pytest.mark.parametrize("origin", [None, "null", "https://evil.test", "http://127.0.0.1:1"])
def test_forms_of_other_sites_are_refused(guarded: Guarded, origin: str | None) -> None:
    with guarded.browser("releases") as browser:
        del browser.headers["origin"]
        said = {} if origin is None else {"origin": origin}
        form = {"ref": "stolen", "version": "1"}
        assert browser.post(f"{PAGE}/refs", data=form, headers=said).status_code == 403
        assert browser.post("/logout", headers=said).status_code == 403
        assert browser.get(PAGE).status_code == 200, "the session goes on"
    assert "stolen" not in guarded.place.running.service.catalog.refs(MODEL)


def test_a_caller_sees_the_models_that_they_may_see_and_what_they_may_do(guarded: Guarded) -> None:
    with guarded.browser("reader") as reader:
        assert MODEL in reader.get("/").text
        page = reader.get(PAGE).text
        assert "New tag" not in page
        assert "Export a version" not in page
        assert "collection would delete" not in page
        assert reader.get(f"{PAGE}/retention").status_code == 403
        assert reader.post(f"{PAGE}/refs", data={"ref": "prod", "version": "1"}).status_code == 403
        version = reader.get(f"{PAGE}/versions/1").text
        assert "distribution.svg" not in version, "values are for those who may pull"
        picture = f"{PAGE}/versions/1/distribution.svg?tensor=model.norm.weight"
        assert reader.get(picture).status_code == 403
    with guarded.browser("releases") as releases:
        page = releases.get(PAGE).text
        assert "New tag" in page
        assert "Export a version" in page
        assert releases.post(f"{PAGE}/refs", data={"ref": "prod", "version": "1"}).status_code == 303
    assert guarded.place.running.service.catalog.refs(MODEL)["prod"] == 1
    with guarded.browser("stranger") as stranger:
        assert f"/models/{MODEL}" not in stranger.get("/").text
        there, not_there = stranger.get(PAGE), stranger.get("/models/acme/none")
        assert there.status_code == not_there.status_code == 403
        assert there.text.replace("smol", "none") == not_there.text, "they are not told whether it exists"


def test_a_session_ends_with_the_token_and_so_does_what_it_follows(guarded: Guarded) -> None:
    with guarded.browser("reader") as browser:
        try:
            with browser.stream("GET", f"{PAGE}/events") as followed:
                assert followed.status_code == 200
                guarded.write_policy("trainer", "releases", "stranger")
                for _ in followed.iter_lines():  # until it ends
                    pass
            eventually(lambda: browser.get(PAGE).status_code == 401)
        finally:
            guarded.write_policy(*guarded.tokens)


def test_sessions_are_bounded_in_time_and_number() -> None:
    now = 0.0
    sessions = Sessions(lambda: now)
    first = sessions.begin("Bearer a", "a")
    other = sessions.begin("Bearer b", "b")
    mine = [sessions.begin("Bearer a", "a") for _ in range(31)]
    assert sessions.authorization(first)
    mine.append(sessions.begin("Bearer a", "a"))
    assert sessions.authorization(first) == "", "one identity has so many, and pushes nobody else out"
    assert sessions.authorization(other) == "Bearer b"
    assert sessions.authorization(mine[0]) == "Bearer a"
    now = 12 * 3600.0
    assert sessions.authorization(other) == ""
    assert "Bearer" not in repr(vars(sessions)), "what was shown is in no log"
