import json
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from anymamba.generation.sampling import hash_tokens
from anymamba.generation.tokenizers import ByteTokenizer
from tests.serving.running import IDLE, PATIENCE, Running

openai = pytest.importorskip("openai")

SEGMENT = 32  # of the shared server


def ids_of(text):
    return ByteTokenizer().encode(text)


def alone(model, prompt, n, **options):
    """Return the tokens that `generate` gives a prompt alone."""
    return model.generate(torch.tensor([prompt]), n, segment_len=SEGMENT, **options).rows()[0]


def render(messages):
    return "".join(f"<{m['role']}>{m['content']}</>\n" for m in messages) + "<assistant>"


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as official:
        yield official


class TestTheOfficialClient:
    def test_lists_the_model(self, client, served):
        (model,) = client.models.list().data
        assert (model.id, client.models.retrieve("tiny").id) == ("tiny", "tiny")
        with pytest.raises(openai.NotFoundError, match="there is no model"):
            client.models.retrieve("other")

    def test_a_completion_is_what_generate_gives(self, client, served):
        done = client.completions.create(
            model="tiny", prompt="Hello", max_tokens=20, seed=3, temperature=0.8, extra_body={"return_token_ids": True}
        )
        expected = alone(served[0], ids_of("Hello"), 20, seed=3, temperature=0.8)
        assert done.choices[0].token_ids == expected
        assert done.choices[0].text == ByteTokenizer().decode(expected)
        assert done.choices[0].finish_reason == "length"
        assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (5, 20, 25)

    def test_every_option_of_sampling_reaches_the_tokens(self, client, served):
        options = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.5, "frequency_penalty": 0.3, "seed": 8}
        extra = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1}
        done = client.completions.create(
            model="tiny",
            prompt=ids_of("The"),
            max_tokens=24,
            logit_bias={"65": 2.5},
            **options,
            extra_body={**extra, "return_token_ids": True},
        )
        expected = alone(served[0], ids_of("The"), 24, **options, **extra, logit_bias={65: 2.5})
        assert done.choices[0].token_ids == expected

    def test_samples_and_prompts_draw_differently_as_rows_of_a_batch_do(self, client, served):
        done = client.completions.create(
            model="tiny", prompt=["ab", "ab", "cde"], n=3, max_tokens=9, seed=4, extra_body={"return_token_ids": True}
        )
        twins = served[0].generate(torch.tensor([ids_of("ab")] * 6), 9, seed=4, temperature=1.0).rows()
        others = served[0].generate(torch.tensor([ids_of("cde")] * 3), 9, seed=4, temperature=1.0).rows()
        assert [choice.token_ids for choice in done.choices] == twins + others
        assert [choice.index for choice in done.choices] == list(range(9))
        assert done.usage.prompt_tokens == 7

    def test_a_stream_is_the_answer_in_pieces(self, client):
        asked = {"model": "tiny", "messages": [user("hi")], "max_tokens": 30, "seed": 5, "n": 2}
        whole = client.chat.completions.create(**asked)
        texts, roles, reasons = ["", ""], ["", ""], ["", ""]
        usage = None
        for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles[choice.index] += choice.delta.role or ""
                reasons[choice.index] += choice.finish_reason or ""
        assert texts == [choice.message.content for choice in whole.choices]
        assert roles == ["assistant"] * 2
        assert reasons == [choice.finish_reason for choice in whole.choices]
        assert usage.completion_tokens == whole.usage.completion_tokens == 60

    def test_a_conversation_is_rendered_with_the_models_template(self, client, served):
        messages = [{"role": "system", "content": "Be brief."}, user("hi")]
        done = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=12, seed=1, extra_body={"return_token_ids": True}
        )
        expected = alone(served[0], ids_of(render(messages)), 12, seed=1, temperature=1.0)
        assert done.choices[0].token_ids == expected

    def test_a_stop_text_ends_a_reply_and_is_not_sent(self, client, served):
        text = ByteTokenizer().decode(alone(served[0], ids_of("Hello"), 60, seed=2, temperature=1.0))
        stop = next(text[i : i + 2] for i in range(4, 50) if "\ufffd" not in text[i : i + 2])
        for stream in (False, True):
            done = client.completions.create(
                model="tiny", prompt="Hello", max_tokens=60, seed=2, stop=[stop, "never"], stream=stream
            )
            parts = list(done) if stream else [done]
            assert "".join(part.choices[0].text for part in parts) == text[: text.index(stop)]
            assert parts[-1].choices[0].finish_reason == "stop"

    def test_log_probabilities_are_those_of_the_model(self, client, served):
        model, prompt = served[0], ids_of("Hello")
        asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 6, "temperature": 0}
        done = client.completions.create(**asked, logprobs=3, echo=True, extra_body={"return_token_ids": True})
        choice = done.choices[0]
        assert choice.token_ids[:5] == prompt
        with torch.no_grad():
            logprobs = model(torch.tensor([choice.token_ids])).logits[0].log_softmax(-1)
        expected = [logprobs[i - 1, token].item() for i, token in enumerate(choice.token_ids)][1:]
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)
        assert max(choice.logprobs.top_logprobs[7].values()) == pytest.approx(logprobs[6].max().item(), abs=1e-3)
        assert choice.text == "Hello" + client.completions.create(**asked).choices[0].text
        assert done.usage.completion_tokens == 6
        chat = client.chat.completions.create(
            model="tiny", messages=[user("x")], max_tokens=4, seed=1, logprobs=True, top_logprobs=2
        )
        assert all(len(entry.top_logprobs) == 2 for entry in chat.choices[0].logprobs.content)

    def test_reading_without_writing(self, client):
        done = client.completions.create(model="tiny", prompt="Hello", max_tokens=0, echo=True, logprobs=0)
        assert (done.choices[0].text, done.usage.completion_tokens) == ("Hello", 0)
        assert len(done.choices[0].logprobs.tokens) == 5

    def test_a_mistake_is_the_clients_own_error(self, client):
        with pytest.raises(openai.BadRequestError, match="temperature must be a number from 0") as error:
            client.completions.create(model="tiny", prompt="x", temperature=-1)
        assert (error.value.param, error.value.type) == ("temperature", "invalid_request_error")
        with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
            client.completions.create(model="gpt", prompt="x")
        with pytest.raises(openai.BadRequestError, match="did you mean temperature"):
            client.completions.create(model="tiny", prompt="x", extra_body={"temperatur": 1})
        with pytest.raises(openai.BadRequestError, match="may have at most 4096 tokens, got at least 5000"):
            client.completions.create(model="tiny", prompt="x" * 5000)


def test_concurrent_clients_get_what_generate_gives_each_alone(server, served):
    chance = random.Random(1)
    asked = []
    for i in range(64):
        prompt = [chance.randrange(256) for _ in range(chance.choice([1, 3, 31, 32, 33, 64, 100]))]
        asked.append(
            {
                "prompt": prompt,
                "max_tokens": chance.randrange(1, 24),
                "seed": i,
                "temperature": chance.choice([0.0, 1.0]),
            }
        )

    def ask(body):
        return server.post("/v1/completions", **body, return_token_ids=True)["choices"][0]["token_ids"]

    with ThreadPoolExecutor(64) as pool:
        responses = list(pool.map(ask, asked))
    for body, tokens in zip(asked, responses, strict=True):
        options = {"seed": body["seed"], "temperature": body["temperature"]}
        assert tokens == alone(served[0], body["prompt"], body["max_tokens"], **options)


class TestStates:
    def turn(self, server, messages, **options):
        before = server.metrics()["anymamba_read_tokens_total"]
        asked = {"messages": messages, "max_tokens": 10, "seed": 6, "return_token_ids": True, **options}
        answer = server.post("/v1/chat/completions", **asked)
        choice = answer["choices"][0]
        read = server.metrics()["anymamba_read_tokens_total"] - before
        return choice["message"]["content"], choice["token_ids"], answer["usage"], read

    def test_a_turn_reads_only_its_new_text_and_equals_a_replay_bit_for_bit(self, server, served):
        model, messages, state = served[0], [user("A first question, of some length. " * 3)], None
        known = ""
        for turn in range(4):
            text = render(messages)
            new = ids_of(text[len(known) :])
            reply, tokens, usage, read = self.turn(server, messages)
            assert read == len(new)
            assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] == len(new)
            # The same segments, and then the same steps, from the state of the turn before.
            if state is not None:
                key = torch.tensor([hash_tokens(torch.tensor(ids_of(text)))])
                state = state._replace(keys=key, counts=torch.zeros(1, dtype=torch.int64))
            asked = {"segment_len": SEGMENT, "seed": 6, "temperature": 1.0}
            replay = model.generate(torch.tensor([new]), 10, cache=state, return_state=True, **asked)
            assert tokens == replay.rows()[0]
            state, known = replay.state, text + reply
            messages = [*messages, assistant(reply), user(f"And {turn}?")]

    def test_another_try_reads_nothing_and_a_branch_its_own_text(self, server):
        first = [user("Something nobody asked before, to begin with.")]
        reply, tokens, _, _ = self.turn(server, first)
        again, same, _, read = self.turn(server, first)
        assert (again, same, read) == (reply, tokens, 0)
        _, other, _, read = self.turn(server, first, seed=7)
        assert read == 0
        assert other != tokens
        for question in ("One way.", "Another way."):
            messages = [*first, assistant(reply), user(question)]
            _, _, _, read = self.turn(server, messages)
            assert read == len(ids_of(f"</>\n<user>{question}</>\n<assistant>"))

    def test_a_completion_starts_from_what_was_read_and_gives_the_same_bits(self, server, served):
        prompt = [random.Random(9).randrange(256) for _ in range(5 * SEGMENT + 3)]
        asked = {"max_tokens": 20, "seed": 3, "return_token_ids": True}
        server.post("/v1/completions", prompt=prompt, **asked)
        longer = prompt[: 4 * SEGMENT + 9] + [1, 2, 3] * 20
        before = server.metrics()["anymamba_read_tokens_total"]
        answer = server.post("/v1/completions", prompt=longer, **asked)
        assert server.metrics()["anymamba_read_tokens_total"] - before == len(longer) - 4 * SEGMENT
        assert answer["choices"][0]["token_ids"] == alone(served[0], longer, 20, seed=3, temperature=1.0)

    def test_sessions_survive_a_restart(self, served, tmp_path):
        messages = [user("Remember this: 4711.")]
        name = "../../etc/passwd\u0000 of mine"
        server = Running(served[1], "--states", tmp_path / "states", "--segment-len", SEGMENT)
        reply, _, _, _ = self.turn(server, messages, session=name)
        text = server.post(
            "/v1/completions", prompt="Once", max_tokens=7, seed=1, session="a text", return_token_ids=True
        )
        assert server.ask("/v1/sessions/a%20text")[0] == 200
        assert server.stop(signal.SIGINT) == 0

        server = Running(served[1], "--states", tmp_path / "states", "--segment-len", SEGMENT)
        messages = [*messages, assistant(reply), user("What was it?")]
        _, _, usage, read = self.turn(server, messages, session=name)
        assert read == len(ids_of("</>\n<user>What was it?</>\n<assistant>"))
        more = server.post(
            "/v1/completions", prompt=" upon", max_tokens=7, seed=1, session="a text", return_token_ids=True
        )
        assert more["usage"]["prompt_tokens_details"]["cached_tokens"] == 4 + 7
        # A session of text is `generate` continued from the state that it returned.
        first = served[0].generate(torch.tensor([ids_of("Once")]), 7, seed=1, temperature=1.0, return_state=True)
        second = served[0].generate(torch.tensor([ids_of(" upon")]), 7, cache=first.state, seed=1, temperature=1.0)
        assert text["choices"][0]["token_ids"] == first.rows()[0]
        assert more["choices"][0]["token_ids"] == second.rows()[0]
        assert json.loads(server.ask("/v1/sessions/a%20text")[2])["tokens"] == 4 + 7 + 5 + 7
        assert server.ask("/v1/sessions/a%20text", method="DELETE")[0] == 200
        assert server.ask("/v1/sessions/a%20text")[0] == 404
        assert server.stop() == 0
        files = [file for file in (tmp_path / "states").rglob("*") if file.is_file()]
        assert files
        assert not any("passwd" in str(file) or file.stat().st_mode & 0o077 for file in files)

    def test_a_session_deleted_during_its_reply_stays_deleted(self, server):
        body = {"prompt": "x", "max_tokens": 300, "session": "short-lived", "stream": True, "ignore_eos": True}
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as held:
            send(held, body)
            content = held.recv(100)
            status, _, answer = server.ask("/v1/sessions/short-lived", method="DELETE")
            assert (status, json.loads(answer)["deleted"]) == (200, True)
            while not content.endswith(b"0\r\n\r\n"):
                content += held.recv(2**16)
        assert b"[DONE]" in content
        assert server.ask("/v1/sessions/short-lived")[0] == 404

    def test_a_chat_session_without_memory_is_429_and_unfinished_files_are_removed(self, served, tmp_path):
        server = Running(served[1], "--state-memory", "0")
        for stream in (False, True):
            body = {"messages": [user("hi")], "session": "mine", "stream": stream}
            status, headers, content = server.ask("/v1/chat/completions", body)
            assert (status, headers["Retry-After"], json.loads(content)["error"]["code"]) == (
                429,
                "60",
                "session_limit",
            )
        assert server.stop() == 0
        (tmp_path / "sessions").mkdir()
        (tmp_path / "sessions" / ".x.safetensors.1.tmp").write_bytes(b"unfinished")
        server = Running(served[1], "--states", tmp_path)
        assert server.metrics()["anymamba_unfinished_files_total"] == 1
        assert server.stop() == 0
        assert "removed 1 unfinished files" in "".join(server.errors)
        assert not list(tmp_path.rglob("*.tmp"))

    def test_a_session_is_for_one_request_at_a_time(self, server):
        body = {"prompt": "x", "max_tokens": 2000, "session": "busy", "stream": True}
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as held:
            send(held, body)
            assert held.recv(100)
            status, _, content = server.ask("/v1/completions", {"prompt": "y", "session": "busy"})
        assert (status, json.loads(content)["error"]["code"]) == (409, "session_in_use")
        assert server.ask("/v1/completions", {"prompt": "y", "session": "b", "n": 2})[0] == 400


def send(connection, body, path="/v1/completions", host="127.0.0.1"):
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)


def vanish(server, count, seed=0):
    """Connect as many clients, each of which disconnects at a random point."""
    chance = random.Random(seed)

    def one(_):
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            body = {
                "prompt": "y" * chance.randrange(1, 300),
                "max_tokens": 4000,
                "stream": chance.random() < 0.7,
                "n": 2,
            }
            send(connection, body)
            if chance.random() < 0.8:
                time.sleep(chance.random() * 0.05)
                if body["stream"]:
                    connection.recv(chance.randrange(1, 4000))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(count)))


def test_clients_that_disconnect_leave_no_jobs_or_states(server):
    vanish(server, 16)
    before = server.wait_until_idle()
    vanish(server, 40, seed=1)
    after = server.wait_until_idle()
    assert not any(after[name] for name in IDLE)
    assert after["process_open_fds"] <= before["process_open_fds"]
    assert after["process_resident_memory_bytes"] < before["process_resident_memory_bytes"] + 16 * 2**20
    assert after["anymamba_disconnects_total"] > before["anymamba_disconnects_total"]
    written = after["anymamba_written_tokens_total"]
    time.sleep(0.1)
    assert server.metrics()["anymamba_written_tokens_total"] == written


class TestAccess:
    def test_other_hosts_origins_types_and_methods_are_rejected(self, server):
        body = {"prompt": "x", "max_tokens": 1}
        for headers, status in (
            ({"Host": "evil.example"}, 403),
            ({"Host": "evil.example:8080"}, 403),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Content-Type": "text/plain"}, 415),
            ({"Content-Type": "application/json; charset=utf-8"}, 200),
            ({"Origin": server.url, "Host": server.url[7:]}, 200),
            ({"Host": f"localhost:{server.port}"}, 200),
        ):
            actual, answer, content = server.ask("/v1/completions", body, headers=headers)
            assert (actual, "error" in json.loads(content)) == (status, status != 200), headers
            assert "access-control-allow-origin" not in answer
        assert server.ask("/v1/completions")[0] == 405
        assert server.ask("/v1/nothing")[0] == 404
        assert server.ask("/v1/completions", method="OPTIONS")[1].get("access-control-allow-origin") is None
        assert server.ask("/static/..%2f..%2fapp.py")[0] == 404

    def test_a_key_is_required_if_one_is_set(self, served):
        server = Running(
            *(served[1], "--api-key", "sésame", "--cors", "https://site.example", "--max-requests", "2"),
            *("--grace", "0.2"),
        )
        for value in ("", "Bearer ", "Bearer wrong", "Basic sésame", "Bearer sésam"):
            headers = {"Authorization": value.encode()} if value else {}
            status, answer, content = server.ask("/v1/models", headers=headers)
            assert (status, answer["WWW-Authenticate"]) == (401, "Bearer")
            assert json.loads(content)["error"]["code"] == "invalid_api_key"
            assert server.ask("/metrics", headers=headers)[0] == 401
        key = {"Authorization": "Bearer sésame".encode()}
        assert server.ask("/v1/models", headers=key)[0] == 200
        assert server.ask("/health")[0] == server.ask("/")[0] == 200
        status, answer, _ = server.ask("/v1/models", headers={**key, "Origin": "https://site.example"})
        assert (status, answer["access-control-allow-origin"]) == (200, "https://site.example")
        # Beyond the limit on requests, clients are told when to retry; running requests finish after SIGTERM.
        responses = []
        body = {"prompt": "x", "max_tokens": 4000, "temperature": 0, "n": 8, "ignore_eos": True}
        asking = [
            threading.Thread(target=lambda: responses.append(server.ask("/v1/completions", body, headers=key)))
            for _ in range(2)
        ]
        for thread in asking:
            thread.start()
        while json.loads(server.ask("/health")[2])["requests"] < 2:
            assert not responses, "the requests ended before they were seen"
            time.sleep(0.01)
        status, answer, content = server.ask("/v1/completions", body, headers=key)
        assert (status, answer["Retry-After"], json.loads(content)["error"]["type"]) == (429, "1", "rate_limit_error")
        assert server.stop() == 0
        for thread in asking:
            thread.join()
        # What does not finish within the grace period is cut.
        assert [status for status, _, _ in responses] == [200, 200]
        reasons = {choice["finish_reason"] for _, _, content in responses for choice in json.loads(content)["choices"]}
        assert reasons == {"length"}

    def test_a_signal_that_comes_at_once_ends_the_server(self, served):
        assert Running(served[1]).stop() == 0

    def test_a_client_that_does_not_read_its_answer_is_not_waited_for(self, server):
        before = server.wait_until_idle()["process_open_fds"]
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            send(connection, {"prompt": "x", "max_tokens": 4000, "n": 16, "stream": True, "logprobs": 20})
            time.sleep(0.3)
            after = server.wait_until_idle()
            assert not any(after[name] for name in IDLE)
            assert after["process_open_fds"] <= before

    def test_slow_senders_are_not_waited_for(self, server):
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: local")
            assert connection.recv(100) == b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            assert connection.recv(1000).startswith(b"HTTP/1.1 408")

    def test_large_bodies_are_rejected_before_and_while_they_arrive(self, server):
        assert server.ask("/v1/completions", b" " * (2**20 + 1))[0] == 413
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            for _ in range(17):
                connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 413")

    def test_answers_carry_the_security_policy_of_the_page(self, server):
        _, headers, content = server.ask("/")
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert b"http://" not in content.replace(b"http://www.w3.org/", b"")
        assert b"https://" not in content


def test_texts_become_tokens_and_texts_again(server):
    reply = server.post("/tokenize", prompt="né")
    assert reply == {"tokens": list("né".encode()), "count": 3, "max_model_len": 4096}
    assert server.post("/detokenize", tokens=reply["tokens"]) == {"prompt": "né"}


def test_any_host_may_be_allowed(served):
    running = Running(served[1], "--allow-host", "*")
    try:
        assert running.ask("/v1/models", headers={"Host": "models.example"})[0] == 200
        headers = {"Host": "models.example", "Origin": "https://other.example"}
        assert running.ask("/v1/models", headers=headers)[0] == 403
    finally:
        assert running.stop() == 0
