"""The server as its clients see it: the ``openai`` package, raw requests, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from answering import small
from conftest import tokenizer
from families import tiny
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client import Counter, Gauge, Histogram
from running import ASK, BODY, CHAT, KEYS, TEXT, bearer, figures, post, program, serving, streamed

import kvkeep
from kvkeep import KeepCache
from kvkeep.decode.prompt import encode
from kvkeep.models.loading import Loaded
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.body import MAX_BODY_BYTES, RequestMemory
from kvkeep.serve.http.metrics import Metrics


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Engine]]:
    with serving() as running:
        yield running


@pytest.fixture
def address(server: tuple[str, Engine]) -> str:
    return server[0]


@pytest.fixture
def engine(server: tuple[str, Engine]) -> Engine:
    return server[1]


@pytest.fixture
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEYS[0], max_retries=0)


def wanted(new: int) -> kvkeep.Generation:
    ids = encode(tokenizer(), ASK)
    return kvkeep.generate(tiny("llama"), tokenizer(), ids, KeepCache(tiny("llama"), "full"), max_new_tokens=new)


def test_an_answer_is_what_generate_gives_and_usage_counts_its_tokens(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=12, temperature=0)  # type: ignore[arg-type]
    alone = wanted(12)
    assert found.choices[0].message.content == alone.text and found.choices[0].finish_reason == "length"
    assert found.usage is not None and found.usage.completion_tokens == 12
    assert found.usage.prompt_tokens == alone.prompt_tokens


def test_a_stream_has_a_role_pieces_an_end_and_usage(client: openai.OpenAI, address: str) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [*client.chat.completions.create(model="tiny", messages=ASK, max_tokens=12, temperature=0, **options)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in chunks[:-1]) == wanted(12).text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    raw = post(address, {"model": "tiny", "messages": ASK, "max_tokens": 2, "stream": True}).text
    assert raw.endswith("data: [DONE]\n\n") and all(json.loads(line[6:]) for line in raw.split("\n\n")[:-2])


def test_texts_probabilities_models_and_tokens(client: openai.OpenAI, address: str) -> None:
    found = client.completions.create(model="tiny", prompt="the river", max_tokens=3, temperature=0, logprobs=2)
    told = found.choices[0].logprobs
    assert told is not None and told.tokens is not None and len(told.tokens) == 3
    assert told.top_logprobs is not None and told.token_logprobs is not None
    assert max(told.top_logprobs[0].values()) == pytest.approx(told.token_logprobs[0])
    chat = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=3, logprobs=True, top_logprobs=1)  # type: ignore[arg-type]
    assert chat.choices[0].logprobs is not None and len(chat.choices[0].logprobs.content or []) == 3
    assert [one.id for one in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]
    with pytest.raises(openai.NotFoundError, match="model 'org/large' does not exist"):
        client.models.retrieve("org/large")
    assert post(address, {"messages": ASK}, path="/tokenize").json()["tokens"] == encode(tokenizer(), ASK)


def test_tokens_of_probabilities_are_the_text_up_to_a_stop_string_and_no_end(
    client: openai.OpenAI, address: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = wanted(12)
    words = whole.text.split()
    for stop in (None, words[4][1:], whole.text[9:30], "nowhere"):
        options: Any = {"stop": stop, "logprobs": True, "stream": True, "temperature": 0, "max_tokens": 12}
        chunks = [one.choices[0] for one in client.chat.completions.create(model="tiny", messages=ASK, **options)]
        text = "".join(one.delta.content or "" for one in chunks)
        told = [token for one in chunks if one.logprobs for token in one.logprobs.content]
        assert "".join(one.token for one in told) == bytes(byte for one in told for byte in one.bytes).decode() == text
        assert text == whole.text.partition(stop or "\0")[0]
        assert (len(told) == 12) == (stop in (None, "nowhere"))
    end = max(whole.tokens, key=whole.tokens.index)
    monkeypatch.setattr(engine, "ends", [end])
    body = {"model": "tiny", "prompt": encode(tokenizer(), ASK), "max_tokens": 12, "temperature": 0, "logprobs": 0}
    (found,) = post(address, body, path=TEXT).json()["choices"]
    tokens, offsets = found["logprobs"]["tokens"], found["logprobs"]["text_offset"]
    assert found["finish_reason"] == "stop" and len(tokens) == whole.tokens.index(end) > 2
    assert "".join(tokens) == found["text"] and offsets == [len("".join(tokens[:n])) for n in range(len(tokens))]


def test_a_session_is_its_keys_own(address: str) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 4, "temperature": 0}
    body["kvkeep"] = {"session": "talk", "method": "h2o", "budget": 24}
    first = post(address, body).json()
    more = [*ASK, {"role": "assistant", "content": first["choices"][0]["message"]["content"]}, *ASK]
    again = {**body, "messages": more}
    other = post(address, again, key=KEYS[1]).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    own = post(address, again).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert other == 0 and own > 0
    error = post(address, again | {"kvkeep": {"session": "talk", "method": "full"}}).json()["error"]
    assert error["param"] == "kvkeep.session" and "'h2o' and budget '24'" in error["message"]


def test_a_session_continues_beyond_the_positions_if_its_requests_say_so(address: str) -> None:
    """The model has 512 positions."""
    text = "the river and the stone " * 88
    body: dict[str, Any] = {**BODY, "messages": [{"role": "user", "content": text}]}
    options: dict[str, Any] = {"session": "long", "budget": 32, "at_end": "endless"}
    first = post(address, body | {"kvkeep": options}).json()
    assert first["usage"]["prompt_tokens"] < 508 and "exact_tokens" not in first["usage"]
    answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    body["messages"] = [*body["messages"], answer, {"role": "user", "content": text}]
    assert post(address, body).json()["error"]["code"] == "context_length_exceeded"
    usage = post(address, body | {"kvkeep": options}).json()["usage"]
    assert usage["exact_tokens"] == 512 < usage["prompt_tokens"] and usage["prompt_tokens_details"]["cached_tokens"]
    found = httpx.get(f"{address}/v1/sessions", headers=bearer()).json()["data"]
    (facts,) = [one for one in found if one["name"] == "long"]
    assert facts["method"].startswith("endless") and facts["exact_tokens"] == 512
    without = post(address, body | {"kvkeep": {"session": "long", "at_end": "endless"}}).json()["usage"]
    assert without["exact_tokens"] == 512, "its method and budget are fixed, and need not be sent again"
    for wrong in ({"method": "h2o", "budget": 32}, {"budget": 450}):
        refused = post(address, BODY | {"kvkeep": {"at_end": "endless", **wrong}})
        if "method" in wrong:
            error = refused.json()["error"]
            assert refused.status_code == 400 and error["param"] == "kvkeep.at_end", error
            assert "'h2o' does not keep every entry" in error["message"]
        else:
            assert refused.status_code == 200, "a budget that leaves no position for a block becomes a quarter of them"


def test_an_answer_goes_on_from_what_there_is_of_it(address: str) -> None:
    whole = wanted(12).text
    begun = {"role": "assistant", "content": " " + " ".join(whole.split()[:5])}
    body = {**BODY, "messages": [*ASK, begun], "max_tokens": 7, "continue_final_message": True}
    assert post(address, body).json()["choices"][0]["message"]["content"].split() == whole.split()[5:]
    refused = post(address, {**body, "messages": ASK})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "continue_final_message"
    refused = post(address, {**body, "messages": [*ASK, begun | {"reasoning_content": "So."}]})
    assert refused.status_code == 400 and "has 'reasoning_content'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tools": [{}]}, "tools"),
        ({"logit_bias": {"5": 1000}}, "logit_bias.5"),
        ({"n": 200}, "n"),
        ({"n": 2, "kvkeep": {"session": "one"}}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"stream": "yes"}, "stream"),
        ({"stop": ["x"] * 20}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"kvkeep": {"color": "red"}}, "kvkeep.color"),
        ({"model": "\ud800"}, "model"),
        ({"stop": ["x", "\ud800"]}, "stop.1"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "messages.0.content"),
        ({"\ud800": 1}, None),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"repetition_penalty": 1e-5}, "repetition_penalty"),
        ({"top_p": -1e-12}, "top_p"),
        ({"kvkeep": {"method": "magic"}}, "kvkeep.method"),
        ({"kvkeep": {"method": "h2o"}}, "kvkeep.budget"),
        ({"kvkeep": {"method": "h2o", "budget": 3}}, "kvkeep.budget"),
        ({"kvkeep": {"session": "a/b"}}, "kvkeep.session"),
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_else_changes(
    address: str, change: dict[str, Any], field: str | None
) -> None:
    asked = {"model": "tiny", "messages": ASK, "max_tokens": 2} | change
    found = post(address, json.dumps(asked).encode())  # escaped, as httpx sends no half of a character
    error = found.json()["error"]
    assert found.status_code == 400 and error["type"] == "invalid_request_error", error
    assert field is None or (error["param"] or "").startswith(field), error
    assert error["code"] and "Unknown method 'stock'" not in error["message"] and "or 0" not in error["message"]
    assert error["message"].endswith((".", "?")) and "Traceback" not in error["message"]
    assert not re.search("[Ii]nput|valid|Literal", error["message"]), error
    assert post(address, {"model": "tiny", "messages": ASK, "max_tokens": 2}).status_code == 200


def test_an_answer_ends_where_the_context_does(address: str) -> None:
    """Agents ask for 32,000 tokens, whatever the model has. This one has 512 positions."""
    found = post(address, BODY | {"messages": [{"role": "user", "content": "the " * 400}], "max_tokens": 32_000}).json()
    assert found["choices"][0]["finish_reason"] == "length" and found["usage"]["total_tokens"] == 512


def test_replies_are_of_the_types_of_the_openai_package(address: str) -> None:
    """Strictly: no field is missing or of another type."""
    texts = {"model": "tiny", "prompt": "the river", "max_tokens": 3}
    for path, body, whole, chunk in (
        (CHAT, BODY | {"logprobs": True, "top_logprobs": 2}, ChatCompletion, ChatCompletionChunk),
        (TEXT, texts | {"logprobs": 2}, Completion, Completion),
    ):
        whole.model_validate_json(post(address, body, path=path).text, strict=True)
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        lines = [line[6:] for line in post(address, body | stream, path=path).text.split("\n\n") if line]
        assert len(lines) > 3 and lines.pop() == "[DONE]"
        for line in lines:  # but for a null that OpenAI's own streams of texts have, too
            chunk.model_validate_json(
                line if path == CHAT else line.replace('reason":null', 'reason":"stop"'), strict=True
            )


def test_what_changes_nothing_is_taken_as_clients_send_it(client: openai.OpenAI, address: str) -> None:
    """Nulls wherever they are, as in an answer that is sent back, lists of one prompt, and values that are void."""
    said = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=2).choices[0].message.model_dump()  # type: ignore[arg-type]
    empty = {"tool_calls": [], "annotations": []}
    part = [{"type": "text", "text": "and the stone", "cache_control": None}]
    void: dict[str, Any] = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "store": False, "stop": []}
    void |= {"logit_bias": {}, "metadata": {}, "response_format": {"type": "text"}, "kvkeep": {"session": None}}
    messages = [*ASK, said, *ASK, said | empty, {"role": "user", "content": part}]
    found = post(address, {**BODY, **void, "messages": messages})
    assert "refusal" in said and found.status_code == 200, found.text
    text = {"model": "tiny", "max_tokens": 2, "temperature": 0, "suffix": "", "best_of": 1}
    ids = post(address, {"prompt": "the river"}, path="/tokenize").json()["tokens"]
    answers = [post(address, {**text, "prompt": one}, path=TEXT) for one in ("the river", ["the river"], ids, [ids])]
    assert len({one.json()["choices"][0]["text"] for one in answers}) == 1
    assert "one prompt at a time" in post(address, {**text, "prompt": ["a", "b"]}, path=TEXT).text


def test_no_request_names_a_file_but_for_the_servers_own_method(address: str, tmp_path: Path) -> None:
    """Whatever is there, the answer is the same, and nothing is opened: who opens a pipe waits for its writer."""
    there, pipe, scores = tmp_path / "there", tmp_path / "pipe", tmp_path / "scores"
    there.write_text("another-key\n")
    os.mkfifo(pipe)
    text = {"model": "tiny", "prompt": "the river", "max_tokens": 2}
    for path, asked in ((CHAT, BODY), (TEXT, text), (TEXT, text | {"stream": True})):
        for own in ({}, {"session": "of-files"}):
            told = set()
            for place in (there, pipe, tmp_path / "nowhere", "/dev/zero"):
                kind = own | {"method": f"duo-attention:scores={place}", "budget": 64}
                error = (found := post(address, asked | {"kvkeep": kind}, path=path)).json()["error"]
                assert found.status_code == 400 and error["param"] == "kvkeep.method"
                told.add(error["message"])
            assert len(told) == 1 and "may name a file" in told.pop()
    scores.write_text("0.9 0.1\n0.2 0.8\n0.3 0.1\n0.7 0.2\n")
    kind = {"method": f"duo-attention:scores={scores}", "budget": 64}
    with serving(engine=Engine(small(), 10**8, **kind)) as (own, _):  # type: ignore[arg-type]
        for said in ({}, kind):
            assert post(own, BODY | {"kvkeep": said}).status_code == 200
        other = post(own, BODY | {"kvkeep": kind | {"method": f"{kind['method']}x"}}).json()["error"]
        assert "may name a file" in other["message"]


def test_other_refusals_have_their_status(address: str, client: openai.OpenAI) -> None:
    body = {"model": "tiny", "messages": ASK, "max_tokens": 2}
    assert post(address, body, key="wrong").status_code == 401
    assert httpx.post(f"{address}/v1/chat/completions", json=body).json()["error"]["code"] == "invalid_api_key"
    assert post(address, {**body, "model": "gpt-4"}).status_code == 404
    assert post(address, b"{nope").json()["error"]["code"] == "invalid_json"
    assert "Content-Type: application/json" in httpx.post(address + TEXT, content=b"{}", headers=bearer()).text
    assert "a JSON object" in post(address, b"[]").json()["error"]["message"]
    assert post(address, b"[" * 100_000).status_code == 400
    assert post(address, b"x" * (MAX_BODY_BYTES + 1)).status_code == 413
    parts = (b" " * 10**6 for _ in range(MAX_BODY_BYTES // 10**6 + 1))  # of no stated length
    headers = bearer() | {"Content-Type": "application/json"}
    assert httpx.post(f"{address}/v1/completions", content=parts, headers=headers, timeout=30).status_code == 413
    unread = httpx.post(f"{address}/v1/completions", content=b"{nope")
    assert unread.status_code == 401  # before the body is looked at
    assert httpx.get(f"{address}/nowhere", headers=headers).json()["error"]["type"] == "not_found_error"
    assert post(address, {**body, "messages": [{"role": "user", "content": "the " * 700}]}).json()["error"]["code"] == (
        "context_length_exceeded"
    )
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=ASK, n=200)  # type: ignore[arg-type]
    assert httpx.get(f"{address}/health").status_code == httpx.get(f"{address}/ready").status_code == 200


def test_every_route_needs_a_key_but_for_what_tells_nothing(address: str) -> None:
    public = {"/", "/health", "/ready", "/page/style.css"}
    private = {"/v1/models", "/v1/methods", "/v1/memory", "/v1/sessions", "/v1/sessions/a", "/v1/sessions/a/cache"}
    for path in public | private | {"/metrics", "/nowhere", "/docs", "/openapi.json"}:
        assert (httpx.get(address + path).status_code == 401) == (path not in public), path


def test_metrics_count_what_was_done_and_hold_no_text(address: str, engine: Engine) -> None:
    before = figures(address)
    body: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 6, "temperature": 0}
    body["kvkeep"] = {"session": "secret-name", "method": "h2o", "budget": 24}
    usage = [post(address, body).json()["usage"] for _ in range(2)][1]
    assert post(address, body | {"n": 700}).status_code == 400
    assert post(address, body | {"kvkeep": {"session": "secret-name", "method": "full"}}).status_code == 400
    assert httpx.get(f"{address}/metrics").status_code == 401
    after = figures(address)
    change = {name: after[name] - before.get(name, 0) for name in after}
    assert change["kvkeep_generated_tokens_total"] == 12
    prompt = sum(change[f'kvkeep_prompt_tokens_total{{source="{one}"}}'] for one in ("read", "cached"))
    assert prompt == 2 * usage["prompt_tokens"]
    assert change['kvkeep_requests_rejected_total{reason="invalid_value"}'] == 1
    assert change['kvkeep_requests_rejected_total{reason="session_differs"}'] == 1
    assert 'kvkeep_requests_ended_total{reason="failed"}' not in after  # a client's mistakes are no failures
    assert change['kvkeep_requests_rejected_total{reason="invalid_api_key"}'] == 1
    assert after["kvkeep_sessions"] == len(engine.sessions.memory)
    held = sum(value for name, value in after.items() if name.startswith("kvkeep_cache_bytes"))
    assert 0 < held <= after["kvkeep_cache_limit_bytes"] == engine.arbiter.total
    raw = httpx.get(f"{address}/metrics", headers=bearer()).text
    assert not any(word in raw for word in ("river", "secret", *KEYS))


def test_the_documentation_has_every_figure_with_its_labels() -> None:
    section = (Path(__file__).parents[2] / "docs" / "serving.md").read_text().partition("## Metrics")[2]
    rows = [line.split("|")[1] for line in section.partition("```")[0].splitlines() if line.startswith("| `")]
    found = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    own, made = set(), Metrics(Engine(Loaded(tiny("llama"), tokenizer(), "tiny", "tiny"), 10**8), RequestMemory(0))
    for one in made.registry._collector_to_names:
        if isinstance(one, Counter | Gauge | Histogram):
            labels = "{" + ",".join(one._labelnames) + "}" if one._labelnames else ""
            own.add(one._name.removeprefix("kvkeep_") + ("_total" if isinstance(one, Counter) else "") + labels)
    assert found == own


def test_the_command_serves_drains_and_ends(model_folder: Path) -> None:
    with program("--model", str(model_folder), "--memory", "50MB", "-x", "full", keys=[], fork=True) as running:
        body = {**BODY, "model": running.model, "max_tokens": 200}
        with streamed(running.address, body) as found:
            lines = found.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"  # what ran has ended
        assert running.process.wait(30) == 0


def test_a_bias_changes_which_tokens_are_chosen(address: str) -> None:
    asked = BODY | {"max_tokens": 3}
    plain = post(address, asked | {"logprobs": True, "top_logprobs": 2}).json()["choices"][0]["logprobs"]["content"]
    best = [one["token"] for one in plain[0]["top_logprobs"]]
    ids = [post(address, {"prompt": one}, path="/tokenize").json()["tokens"] for one in best]
    assert best[0] == plain[0]["token"]
    pushed = post(address, asked | {"logit_bias": {str(ids[1][-1]): 100}}).json()["choices"][0]["message"]["content"]
    assert pushed.split()[0] == best[1].strip()
    refused = post(address, asked | {"logit_bias": {"999999": 1}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logit_bias"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_several_answers_are_those_of_several_requests(address: str, path: str) -> None:
    given = {"messages": ASK} if path == CHAT else {"prompt": "the river"}
    asked = {"model": "tiny", "max_tokens": 5, "temperature": 1.5, "seed": 7, "top_k": 0, "top_p": 1, **given}

    def text(choice: Any) -> str:
        return str(choice["message"]["content"] if path == CHAT else choice["text"])

    found = post(address, asked | {"n": 3}, path=path).json()
    assert [one["index"] for one in found["choices"]] == [0, 1, 2]
    each = [post(address, asked | {"seed": 7 + number}, path=path).json() for number in range(3)]
    texts = [text(one["choices"][0]) for one in each]
    assert [text(one) for one in found["choices"]] == texts and len(set(texts)) > 1
    written = sum(one["usage"]["completion_tokens"] for one in each)
    assert found["usage"]["completion_tokens"] == written
    options = {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    lines = [line[6:] for line in post(address, asked | options, path=path).text.split("\n\n") if line]
    streamed, usage = {0: "", 1: "", 2: ""}, []
    assert lines.pop() == "[DONE]" and "[DONE]" not in lines
    for line in map(json.loads, lines):
        usage += [line["usage"]] * (not line["choices"])
        for choice in line["choices"]:
            part = choice["delta"].get("content", "") if path == CHAT else choice["text"]
            streamed[choice["index"]] += part
    assert [*streamed.values()] == texts and [one["completion_tokens"] for one in usage] == [written]
