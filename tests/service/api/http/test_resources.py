"""Is what is there shown, tagged and verified over HTTP as by every other client?"""

from __future__ import annotations

from tests.service.api.http.web import MODEL, MODEL_URL, Web, is_problem


def test_models_versions_and_refs_are_shown(web: Web) -> None:
    [model] = web.http.get("/v1/models").json()["models"]
    assert model == web.http.get(MODEL_URL).json()
    assert model["name"] == MODEL
    assert model["model_type"] == "qwen2"
    assert model["dtype"] == "F32"
    assert model["refs"] == {"latest": 2, "live": 2}
    assert web.http.get("/v1/models", params={"after": MODEL}).json() == {"models": []}

    versions = web.http.get(f"{MODEL_URL}/versions").json()["versions"]
    assert [(v["number"], v["step"], v["state"]) for v in versions] == [
        (2, 20, "durable"),
        (1, 10, "durable"),
    ]
    assert web.http.get(f"{MODEL_URL}/versions", params={"limit": 1}).json()["versions"] == versions[:1]
    assert web.http.get(f"{MODEL_URL}/versions", params={"before": 2}).json()["versions"] == versions[1:]
    assert web.http.get(f"{MODEL_URL}/versions/latest").json() == versions[0]
    assert web.http.get(f"{MODEL_URL}/versions/1").json() == versions[1]


def test_tags_are_set_and_taken_away(web: Web) -> None:
    assert web.http.put(f"{MODEL_URL}/refs/prod", json={"version": 1}).json()["number"] == 1
    assert web.http.get(f"{MODEL_URL}/refs").json() == {
        "refs": {"latest": 2, "live": 2, "prod": 1},
        "protections": [],
        "requests": [],
    }
    assert web.http.put(f"{MODEL_URL}/refs/prod", json={"version": "latest"}).json()["number"] == 2
    gone = web.http.delete(f"{MODEL_URL}/refs/prod")
    assert (gone.status_code, gone.content) == (204, b"")
    is_problem(web.http.delete(f"{MODEL_URL}/refs/prod"), 404, "not_found")
    is_problem(web.http.put(f"{MODEL_URL}/refs/latest", json={"version": 1}), 400, "invalid_argument")
    is_problem(web.http.put(f"{MODEL_URL}/refs/prod", json={"version": 99}), 404, "not_found")


def test_verification_reads_every_byte(web: Web) -> None:
    found = web.http.post(f"{MODEL_URL}/versions/latest/verify").json()
    assert found["number"] == 2
    assert found["problems"] == []
    assert found["tensors_checked"] == len({p.data_ptr() for p in web.hf_model.parameters()})
    assert found["bytes_checked"] > sum(p.nbytes for p in web.hf_model.parameters())


def test_probes_metrics_and_documentation(web: Web) -> None:
    assert web.http.get("/livez").status_code == 200
    assert 'weighbridge_versions{state="durable"} 2.0' in web.http.get("/metrics").text
    assert web.http.get("/docs").status_code == 200
    document = web.http.get("/openapi.json").json()
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations) == 39
    for operation in operations:
        assert operation["description"]
        assert "application/problem+json" in operation["responses"]["default"]["content"]
        assert "422" not in operation["responses"]
