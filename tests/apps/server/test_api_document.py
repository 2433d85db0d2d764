"""The OpenAPI document says of every endpoint what it takes, what it answers and how it refuses."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from tests.support.markers import subcases
from tests.support.running_server import RunningServer

REFUSALS = {"400", "401", "403", "404", "408", "413", "429", "503", "4XX"}


@pytest.fixture(scope="module")
def document(server: RunningServer) -> Any:
    return server.http.get("/openapi.json").json()


def response_schema(document: Any, path: str, method: str, status: str = "200") -> Any:
    """The schema of an answer, with the components it refers to."""
    content = document["paths"][path][method]["responses"][status]["content"]["application/json"]
    return content["schema"] | {"components": document["components"]}


def test_every_endpoint_documents_its_answer_and_our_refusals_only(document: Any) -> None:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["responses"].keys() == REFUSALS | {"200"}, (method, path)
            if method == "post":
                ((kind, sends),) = operation["requestBody"]["content"].items()
                assert kind == "application/json" and "$ref" in sends["schema"]


@subcases(
    "method, path, body",
    [
        ("get", "/health", None),
        ("get", "/tokenizer_info", None),
        ("post", "/tokenize", {"prompt": "a heron"}),
        ("post", "/detokenize", {"tokens": [97]}),
        ("post", "/v1/completions", {"prompt": "A heron", "max_tokens": 4, "logprobs": 1}),
        ("post", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
        ("post", "/v1/slipstream/replay", {"request": {"prompt": "x", "temperature": 0}, "token_ids": [1]}),
    ],
)
def test_answers_and_refusals_match_their_documented_schemas(
    server: RunningServer, document: Any, method: str, path: str, body: dict[str, Any] | None
) -> None:
    answer = server.http.request(method, path, json=body)
    jsonschema.validate(answer.json(), response_schema(document, path, method))
    if body is not None:
        refused = server.http.request(method, path, json=[])
        assert refused.status_code == 400
        jsonschema.validate(refused.json(), response_schema(document, path, method, "400"))
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(refused.json(), response_schema(document, path, method))


@pytest.mark.parametrize(
    "path", ["/api/chat", "/api/generate", "/api/show", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"]
)
def test_other_apis_document_their_own_refusals(server: RunningServer, document: Any, path: str) -> None:
    for body in ([], {"model": 5}):
        refused = server.http.post(path, json=body)
        assert refused.status_code == 400
        jsonschema.validate(refused.json(), response_schema(document, path, "post", "400"))


def test_streams_are_documented_beside_whole_answers(document: Any) -> None:
    kinds = {"/api/chat": "application/x-ndjson", "/api/generate": "application/x-ndjson"}
    kinds |= dict.fromkeys(("/v1/completions", "/v1/chat/completions"), "text/event-stream")
    kinds |= dict.fromkeys(("/v1/messages", "/v1/responses"), "text/event-stream")
    for path, kind in kinds.items():
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert content.keys() == {"application/json", kind}


def test_a_wrong_method_is_refused_with_the_allowed_methods(server: RunningServer, document: Any) -> None:
    for path, operations in document["paths"].items():
        answer = server.http.request("TRACE", path.replace("{", "").replace("}", ""))
        assert answer.status_code == 405
        allowed = ", ".join(sorted(method.upper() for method in operations))
        assert answer.headers["allow"] == allowed
        error = answer.json()["error"]  # of Ollama's API, a string
        message = error if isinstance(error, str) else error["message"]
        assert message.endswith(f"method not allowed; allowed: {allowed}")


def test_fields_are_documented_with_their_bounds(document: Any) -> None:
    schemas = document["components"]["schemas"]
    whole, number = (schemas["ChatFields"]["properties"][name]["anyOf"][0] for name in ("n", "top_p"))
    assert whole == {"type": "integer", "minimum": 1, "maximum": 16}
    assert number == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}


def test_the_fields_of_structured_outputs_are_documented(document: Any) -> None:
    schemas = document["components"]["schemas"]
    for name in ("ChatFields", "CompletionFields"):
        reference = schemas[name]["properties"]["structured_outputs"]["anyOf"][0]["$ref"]
        assert reference == "#/components/schemas/StructuredOutputs"
    fields = schemas["StructuredOutputs"]["properties"]
    assert fields.keys() == {"json", "json_object", "regex", "choice", "grammar"}
    assert all(field["description"] for field in fields.values())
