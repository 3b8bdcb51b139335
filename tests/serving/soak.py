"""A server under random load for a long time: python -m tests.serving.soak --seconds 1800

python -m tests.serving.soak --only fuzz --clients 10000
python -m tests.serving.soak --only vanish --clients 1000

Clients ask, chat, stream, disconnect at any point and send malformed bodies. Replies are compared with what `generate`
gives alone. Every half minute the server's memory and descriptors are noted. At the end it must have nothing left to
do, no more descriptors than at the beginning and, after ten minutes or more, no more memory than in the second quarter
of the time.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

from anymamba.generation import ByteTokenizer, Grammar, compile_grammar
from tests.serving.bodies import bodies
from tests.serving.running import IDLE, PATIENCE, Running, make_model

CLIENTS = 8
SEGMENT = 32
GROWTH = 1.02  # of memory, for what the allocator does
SETTLED = 600  # seconds: in shorter runs memory still grows, until every kind of request has met every other


class Soak:
    """The load and what it found."""

    def __init__(self, server, model, seconds, seed, only, most):
        self.server = server
        self.seed = seed
        self.counts = Counter()
        self.problems = []
        self.known = list(_make_known(model, random.Random(seed)))
        every = [self.exact, self.exact, self.vanish, self.vanish, self.talk, self.talk, self.fuzz, self.scattered]
        self.kinds = [kind for kind in every if only in (None, kind.__name__)]
        self.most = most
        self.until = time.monotonic() + seconds

    def work(self, number):
        """Act as one client after another."""
        chance = random.Random(f"{self.seed}/{number}")
        fuzzed = bodies(10**9, seed=self.seed * CLIENTS + number)
        while time.monotonic() < self.until and not self.problems and self.counts.total() < self.most:
            kind = chance.choice(self.kinds)
            try:
                kind(chance, fuzzed)
                self.counts[kind.__name__] += 1
            except Exception as error:
                self.problems.append(f"{kind.__name__}: {error!r}")

    def post(self, path, body):
        status, _, content = self.server.ask(path, body, timeout=PATIENCE)
        assert status == 200, (status, content[:300])
        return json.loads(content)

    def exact(self, chance, _):
        """Check that a reply is what `generate` gives alone."""
        body, expected = chance.choice(self.known)
        tokens = self.post("/v1/completions", body)["choices"][0]["token_ids"]
        assert tokens == expected, (body, tokens, expected)

    def talk(self, chance, _):
        """Hold a conversation of a few turns, with a name or without."""
        messages, session = [], chance.choice([{}, {"session": f"s{chance.randrange(30)}"}])
        for _ in range(chance.randrange(1, 5)):
            messages.append({"role": "user", "content": "x" * chance.randrange(1, 200)})
            body = {"messages": messages, "max_tokens": chance.randrange(1, 40), **session}
            status, _, content = self.server.ask("/v1/chat/completions", body, timeout=PATIENCE)
            if status == 409 and session:  # another client talks under this name
                return
            assert status == 200, (status, content[:300])
            reply = json.loads(content)["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": reply})

    def scattered(self, chance, _):
        """Read a stream of several samples in parts."""
        body = {"prompt": "y" * chance.randrange(1, 400), "n": 3, "max_tokens": 30, "stream": True, "logprobs": 2}
        with self.connection() as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = b""
            while part := response.read(chance.randrange(1, 3000)):
                content += part
            assert content.endswith(b"data: [DONE]\n\n"), content[-300:]

    def fuzz(self, _, fuzzed):
        """Send a malformed body."""
        path, body = next(fuzzed)
        status, _, content = self.server.ask(path, body, timeout=PATIENCE)
        assert status == 200 or (400 <= status < 500 and json.loads(content)["error"]["message"]), (status, body[:300])

    def vanish(self, chance, _):
        """Disconnect before the response ends."""
        body = {"prompt": "z" * chance.randrange(1, 2000), "max_tokens": 4000, "n": 2, "stream": chance.random() < 0.7}
        content = json.dumps(body).encode()
        content = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + (
            f"Content-Length: {len(content)}\r\n\r\n".encode() + content
        )
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE) as connection:
            cut = len(content) if chance.random() < 0.8 else chance.randrange(len(content))
            connection.sendall(content[:cut])
            if cut == len(content):
                time.sleep(chance.random() * 0.1)
                if body["stream"] and chance.random() < 0.5:
                    connection.recv(chance.randrange(1, 10_000))

    def connection(self):
        return contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE))


def _make_known(model, chance):
    """Yield requests, every third one constrained, and what `generate` gives each alone."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "string", "maxLength": 20}}}
    grammar = compile_grammar(Grammar.from_schema(schema), ByteTokenizer())
    schema_format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    for seed in range(24):
        ids = [chance.randrange(256) for _ in range(chance.choice([1, 5, 31, 32, 33, 100, 250]))]
        n = chance.randrange(1, 60)
        options = {"seed": seed, "temperature": chance.choice([0.0, 1.0])}
        is_constrained = seed % 3 == 0
        mask = {"grammar": grammar} if is_constrained else {}
        expected = model.generate(torch.tensor([ids]), n, segment_len=SEGMENT, **options, **mask).rows()[0]
        options |= {"response_format": schema_format} if is_constrained else {}
        yield {"prompt": ids, "max_tokens": n, **options, "return_token_ids": True, "ignore_eos": True}, expected


def soak(seconds, seed, only=None, most=float("inf")):
    """Run the load; return a line for each error."""
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model")
        options = ["--states", f"{directory}/states", "--state-memory", 1, "--state-disk", 4, "--segment-len", SEGMENT]
        server = Running(Path(directory) / "model", *options, "--body-seconds", 600, "--request-seconds", 6000)
        load = Soak(server, model, seconds, seed, only, most)
        load.talk(random.Random(0), None)  # which starts what renders templates
        load.post("/v1/completions", load.known[0][0])  # which starts what compiles grammars
        start = server.wait_until_idle()["process_open_fds"]
        clients = [threading.Thread(target=load.work, args=(i,)) for i in range(CLIENTS)]
        for client in clients:
            client.start()
        samples = []
        while any(client.is_alive() for client in clients):
            time.sleep(max(0.1, min(30, seconds / 40)))
            samples.append(note(server, load, seconds))
        problems = load.problems + judge(samples, server.wait_until_idle(), seconds, start)
        print(", ".join(f"{count} {name}" for name, count in sorted(load.counts.items())))
        return problems + stop(server)


def stop(server):
    """End the server; return what went wrong."""
    try:
        code = server.stop()
    except subprocess.TimeoutExpired:
        server.abort_all()
        return [f"the server did not end within {PATIENCE} seconds"]
    except AssertionError as error:
        return [f"the server's log has a traceback: {error}"]
    return [f"the server ended with {code}"] if code else []


def note(server, load, seconds):
    """Print the time and the server's memory, and return both."""
    metrics = server.metrics()
    moment, size = seconds - (load.until - time.monotonic()), metrics["process_resident_memory_bytes"]
    rest = f"{metrics['process_open_fds']:3.0f} descriptors  {sum(load.counts.values())} clients"
    print(f"{moment:6.0f} s  {size / 2**20:7.1f} MiB  {rest}", flush=True)
    return moment, size


def judge(samples, end, seconds, start):
    """Check what is left at the end, and how memory has grown."""
    states, tokens = end["anymamba_states"], end["anymamba_written_tokens_total"]
    print(f"{tokens:,.0f} tokens written, {end['anymamba_disconnects_total']:.0f} disconnects")
    print(f"at the end {end['process_open_fds']:.0f} descriptors, {states:.0f} states in memory")
    problems = [f"{name} is {end[name]:.0f} at the end" for name in IDLE if end[name]]
    if end["process_open_fds"] > start:
        problems.append(f"{end['process_open_fds']:.0f} descriptors at the end, {start:.0f} at the start")
    early = [size for moment, size in samples if seconds / 4 <= moment < seconds / 2]
    late = [size for moment, size in samples if moment >= 3 * seconds / 4]
    if early and late:
        ratio = statistics.median(late) / statistics.median(early)
        print(f"memory in the last quarter against the second: {ratio:.4f}")
        if ratio > GROWTH and seconds >= SETTLED:
            problems.append(f"memory grew to {ratio:.4f} of what it was")
    return problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", choices=["exact", "vanish", "talk", "fuzz", "scattered"], help="one kind of client")
    parser.add_argument("--clients", type=int, default=10**9, help="stop after so many")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    wrong = soak(args.seconds, seed, args.only, args.clients)
    print("\n".join(wrong) or "nothing went wrong")
    sys.exit(bool(wrong))
