import asyncio
import json
import random
import socket
import threading

import pytest

from anymamba.cli.main import main
from anymamba.serving.load_test import (
    IntRange,
    LoadPlan,
    LoadTest,
    RequestResult,
    Target,
    TargetModel,
    find_model,
    format_table,
    generate_bodies,
    percentile,
    summarize,
)


def plan(**fields):
    defaults = {
        "requests": 12,
        "seconds": None,
        "concurrency": 3,
        "rate": None,
        "prompt_tokens": IntRange(5, 40),
        "output_tokens": IntRange(3, 9),
    }
    return LoadPlan(**{**defaults, "warm_up": 1, "seed": 1, "timeout": 60.0, **fields})


def load(server, load_plan):
    target = Target.from_url(server.url)

    async def measure():
        load_test = LoadTest(target, load_plan, await find_model(target, load_plan.model))
        return await load_test.run()

    return asyncio.run(measure())


def test_every_token_of_a_closed_loop_is_counted(server):
    before = server.metrics()
    results = load(server, plan())
    after = server.metrics()
    asked = [
        body for (_, body), _ in zip(generate_bodies(plan(), TargetModel("tiny", 256), 1), range(12), strict=False)
    ]
    assert sorted(len(request.token_times) for request in results) == sorted(body["max_tokens"] for body in asked)
    assert sorted(request.prompt_tokens for request in results) == sorted(len(body["prompt"]) for body in asked)
    warm_up = next(generate_bodies(plan(), TargetModel("tiny", 256), ~1))[1]["max_tokens"]
    written = after["anymamba_written_tokens_total"] - before["anymamba_written_tokens_total"]
    assert written == summarize(results)["written_tokens"] + warm_up
    for request in results:
        assert request.error is None
        assert request.due <= request.token_times[0] <= request.token_times[-1] <= request.end
        assert request.token_times == sorted(request.token_times)
    open_at = [sum(other.due <= request.due < other.end for other in results) for request in results]
    assert max(open_at) <= 3


def test_an_open_loop_sends_at_its_own_times(server):
    chance, expected = random.Random(8), [0.0]
    while expected[-1] < 0.4:
        expected.append(expected[-1] + chance.expovariate(50))
    results = load(server, plan(requests=None, seconds=0.4, rate=50.0, seed=7))
    assert sorted(request.due for request in results) == expected[:-1]
    assert not summarize(results)["errors"]


def test_errors_are_counted_and_not_timed(server):
    results = load(server, plan(requests=3, fields={"temperature": -1}))
    figures = summarize(results)
    assert (figures["errors"], figures["written_tokens"], "first_token_seconds" in figures) == (
        {"status 400": 3},
        0,
        False,
    )
    assert "temperature must be a number from 0" in figures["error_messages"][0]
    assert "3 requests failed: status 400" in format_table(figures)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "broken off"),
        (b"SSH-2.0-x\r\n\r\n", "broken off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\ndata: {", "broken off"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", "broken off"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: [}\n\n", "invalid response"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: {}\n\n", "invalid response"),
        (b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: {"error": {"message": "x"}}\n\n', "error in the stream"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 3\r\n\r\nbad", "status 502"),
    ],
)
def test_invalid_answers_are_errors_of_their_request(answer, kind):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with listener.accept()[0] as connection:
                while b"\r\n\r\n" not in connection.recv(2**16):
                    pass
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        target = Target.from_url(f"http://127.0.0.1:{listener.getsockname()[1]}")
        (request,) = asyncio.run(LoadTest(target, plan(requests=1, warm_up=0), TargetModel("m", 9)).run())
        thread.join()
    assert request.error == kind


def test_percentiles_are_values_that_were_measured():
    values = list(map(float, range(1, 11)))
    assert [percentile(values, p) for p in (1, 50, 90, 91, 99)] == [1.0, 5.0, 9.0, 10.0, 10.0]
    request = RequestResult(due=1.0, prompt_tokens=4, token_times=[1.5, 1.75, 3.0], end=3.5)
    figures = summarize([request, RequestResult(due=0.0, prompt_tokens=4, end=2.0, error="timeout")])
    assert figures["first_token_seconds"]["p50"] == 0.5
    assert figures["between_tokens_seconds"]["max"] == 1.25
    assert figures["request_seconds"]["mean"] == 2.5
    assert figures["written_tokens_per_second"] == 3 / 3.5
    assert figures["errors"] == {"timeout": 1}


def test_a_url_is_a_server_with_or_without_v1():
    assert Target.from_url("http://localhost:80/v1/").base == Target.from_url("http://localhost").base == "/v1"
    assert Target.from_url("https://a.example/b")[1:5] == (True, "a.example", 443, "/b/v1")
    for url in ("localhost:8080", "ftp://x", "http://", "http://x:99999", "http://x/?a=1", ""):
        with pytest.raises(ValueError, match="expected a URL such as"):
            Target.from_url(url)


def test_the_command_says_what_it_sends_and_writes_what_it_found(server, tmp_path, capsys):
    command = ["bench-serve", server.url, "--requests", "4", "--output-tokens", "3-5", "--warm-up", "0"]
    assert main([*command, "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]) == 0
    out, err = capsys.readouterr()
    assert "4 requests, 8 at a time, 128 prompt tokens and 3-5 reply tokens each" in err
    assert "4 of 4 requests succeeded" in out
    assert "time to first token" in out
    written = json.loads((tmp_path / "a.json").read_text())
    assert len(written["requests"]) == written["summary"]["requests"] == 4
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--field", "n=0"], "no request succeeded"),
        (["--model", "other"], "has no model 'other'"),
        (["--requests", "0"], "--requests must be at least 1, got 0"),
        (["--rate", "0"], "--rate must be above 0, got 0"),
        (["--json", "nowhere/x.json"], "--json: there is no directory"),
        (["--plot", "x.txt"], "ends in .png, .svg or .pdf, got x.txt"),
        (["--prompt-tokens", "9-2"], "expected an integer above 0, or two as in 100-200, got '9-2'"),
    ],
)
def test_a_mistake_is_one_line(server, capsys, options, message):
    assert main(["bench-serve", server.url, *options]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_server_that_is_not_there_is_one_line(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert main(["bench-serve", f"http://127.0.0.1:{free.getsockname()[1]}"]) == 2
    assert "cannot reach http://127.0.0.1:" in capsys.readouterr().err
