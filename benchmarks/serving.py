"""A server under load compared with `generate` and llama-server; turns of a conversation; memory of conversations.

python -m benchmarks.serving throughput --model mamba2-130m --clients 1 8 32 64
python -m benchmarks.serving llama --server path/to/llama-server --clients 1 8
python -m benchmarks.serving turns --model mamba2-130m
python -m benchmarks.serving memory

A server is a separate process with two threads, and its clients share the two cores with it. A client asks for 64
tokens after a prompt of 64, and again when it has them.

throughput: `generate` gets as many such prompts as there are clients and reads them as one batch, or one by one, as the
server has to for exactness; then it decodes all rows together. llama: llama.cpp's server with eight slots has the same
random weights of the mamba2-130m shape in a GGUF file, and gets the same requests; both take the likeliest token. In
each, the contenders take turns, and a ratio is that of their medians. `--tiny` runs a model with one small layer: it
shows that a command works, not how fast it is.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, closing, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch is imported, as in __main__.py

import torch

from anymamba.generation import prefill
from anymamba.generation.generate import generate
from anymamba.generation.state import GenerationState
from anymamba.models import MambaLM, MambaLMConfig
from anymamba.serving.load_test import IntRange, LoadPlan, LoadTest, Target, TargetModel, stream, summarize
from benchmarks.generation import CONFIGS, our_model
from benchmarks.machine import describe_machine

READ, WRITE = 64, 64
# 64 conversations of 100,000 tokens are read in minutes, and a byte per token would add 2 %.
TWO_SMALL_LAYERS = MambaLMConfig(d_model=128, n_layer=2, vocab_size=256, ssm_cfg={"layer": "Mamba2"})
SEGMENT_LEN = 256


@contextmanager
def start_server(directory: str, *options: str, threads: int = 2) -> Iterator[Target]:
    """Start our server of a model in a separate process."""
    command = [sys.executable, "-m", "anymamba", "serve", directory, "--port", "0", "--threads", str(threads), *options]
    with start_process(command) as target:
        yield target


@contextmanager
def start_process(command: list[str]) -> Iterator[Target]:
    """Start a server, wait for the line with its address, and stop it at the end of the context."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = []
        try:
            for line in process.stdout:
                lines.append(line)
                if address := re.search(r"listening on (http\S+)", line):
                    break
            else:
                raise RuntimeError(f"{' '.join(command)} does not listen:\n{''.join(lines[-5:])}")
            threading.Thread(target=process.stdout.read, daemon=True).start()  # or a full pipe would stop it
            yield Target.from_url(address[1])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


@contextmanager
def save_model(model: MambaLM) -> Iterator[str]:
    """Write a model with random weights, and a tokenizer in which every token is a word, into a directory."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    size = model.config.vocab_size
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory, format="official")
        tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(Path(directory) / "tokenizer.json"))
        yield directory


def offline(model: MambaLM, rows: int, seed: int, *, one_by_one: bool = False) -> float:
    """Measure the tokens per second of `generate` with so many rows, whose prompts are read together or one by one."""
    ids_bt = torch.randint(model.config.vocab_size, (rows, READ), generator=torch.Generator().manual_seed(seed))
    began = time.perf_counter()
    if one_by_one:
        state = GenerationState.cat([prefill(model, ids_1t, segment_len=SEGMENT_LEN) for ids_1t in ids_bt.split(1)])
        generate(model, None, WRITE, cache=state, seed=seed, temperature=1.0)
    else:
        generate(model, ids_bt, WRITE, seed=seed, temperature=1.0, segment_len=SEGMENT_LEN)
    return rows * WRITE / (time.perf_counter() - began)


def load(target: Target, model: TargetModel, clients: int, waves: int, seed: int, **fields: Any) -> dict[str, Any]:
    """Run so many clients, each of which sends `waves` requests with these fields."""
    plan = LoadPlan(
        requests=clients * waves,
        seconds=None,
        concurrency=clients,
        rate=None,
        prompt_tokens=IntRange(READ, READ),
        output_tokens=IntRange(WRITE, WRITE),
        warm_up=0,
        seed=seed,
        timeout=600.0,
        fields=fields,
    )
    load_test = LoadTest(target, plan, model)
    asyncio.run(load_test.run())
    summary = summarize(load_test.results)
    if summary["errors"]:
        raise RuntimeError(f"requests failed: {summary['errors']}, {summary['error_messages']}")
    if summary["written_tokens"] != clients * waves * WRITE:
        raise RuntimeError(f"expected {clients * waves * WRITE} tokens, got {summary['written_tokens']}")
    return summary


def throughput(name: str, clients: list[int], rounds: int, waves: int, tiny: bool) -> None:
    """Compare the tokens per second of the server with those of `generate` with as many rows."""
    model = our_model(name, tiny)
    print(f"| {name}: clients | server, tokens/s | generate | ratio | prompts one by one | ratio | first token, p50 |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    with save_model(model) as directory, start_server(directory) as target:
        served = TargetModel(Path(directory).name, model.config.vocab_size)
        for count in clients:
            load(target, served, count, 1, 99)
            offline(model, count, 99)
            batched, single, served_there = [], [], []
            for i in range(rounds):
                batched.append(offline(model, count, i))
                served_there.append(load(target, served, count, waves, i))
                single.append(offline(model, count, i, one_by_one=True))
            ours = statistics.median(summary["written_tokens_per_second"] for summary in served_there)
            first = statistics.median(summary["first_token_seconds"]["p50"] for summary in served_there)
            ratios = (f"{x:.1f} | {ours / x:.2f}" for x in map(statistics.median, (batched, single)))
            print(f"| {count} | {ours:.1f} | {' | '.join(ratios)} | {1e3 * first:.0f} ms |", flush=True)


def llama(server: str, weights: str, clients: list[int], rounds: int, waves: int, tiny: bool) -> None:
    """Compare the tokens per second of our server with those of llama.cpp's, on the same weights."""
    from benchmarks.llama import FORMATS, gguf_file

    model = our_model("mamba2-130m", tiny)
    file = str(gguf_file(FORMATS[weights], tiny))
    # Random prompts have nothing in common, so that its caches of prompts would only cost it time.
    off = ("--cache-ram", "0", "--ctx-checkpoints", "0", "--no-ui")
    theirs = [server, "-m", file, "-np", "8", "-t", "2", "-c", "8192", "--port", str(free_port()), *off]
    options = () if weights == "float32" else ("--weights", weights)
    with save_model(model) as directory, start_server(directory, *options) as ours, start_process(theirs) as other:
        names = {
            ours: TargetModel(Path(directory).name, model.config.vocab_size),
            other: TargetModel(file, model.config.vocab_size),
        }
        print(f"of 8 prompts, both continue {agreement(names)} with the same token", file=sys.stderr)
        print(f"| {weights}: clients | anymamba, tokens/s | llama-server | ratio | first token, p50 | llama-server |")
        print("|---:|---:|---:|---:|---:|---:|")
        for count in clients:
            results_by_target: dict[Target, list[dict[str, Any]]] = {ours: [], other: []}
            for i in range(rounds + 1):
                for target, results in results_by_target.items():
                    results.append(load(target, names[target], count, waves if i else 1, i, temperature=0))
            speeds, firsts = [], []
            for results in results_by_target.values():  # the first round is to warm up
                speeds.append(statistics.median(r["written_tokens_per_second"] for r in results[1:]))
                firsts.append(1e3 * statistics.median(r["first_token_seconds"]["p50"] for r in results[1:]))
            row = f"| {count} | {speeds[0]:.1f} | {speeds[1]:.1f} | {speeds[0] / speeds[1]:.2f} |"
            print(f"{row} {firsts[0]:.0f} ms | {firsts[1]:.0f} ms |", flush=True)


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def agreement(servers: dict[Target, TargetModel]) -> int:
    """Count the prompts, of 8, that both servers continue with the same likeliest token.

    Raises:
        RuntimeError: fewer than half, so that they cannot have the same weights.
    """
    chance, same = random.Random(1), 0
    for _ in range(8):
        body = {"prompt": [chance.randrange(256) for _ in range(READ)], "max_tokens": 1, "temperature": 0}
        # The names of tokens in the GGUF file are <0>, <1>, ...; in our tokenizer, w0, w1, ...
        texts = {
            re.sub(r"\D", "", post(target, {**body, "model": model.name})["choices"][0]["text"])
            for target, model in servers.items()
        }
        same += len(texts) == 1
    if same < 4:
        raise RuntimeError(f"the servers continue only {same} of 8 prompts with the same token")
    return same


def post(target: Target, body: dict[str, Any]) -> Any:
    """Return the response to a completion request."""
    with closing(http.client.HTTPConnection(target.host, target.port, timeout=3600)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {content[:300]!r}")
    return json.loads(content)


async def talk(target: Target, model: str, turns: int, seed: int) -> tuple[list[float], list[int]]:
    """Hold a conversation; return the seconds to the first token of each turn, and the tokens read for it."""
    chance, messages, seconds, read = random.Random(seed), [], [], []
    for _ in range(turns):
        messages.append({"role": "user", "content": " ".join(f"w{chance.randrange(50_000)}" for _ in range(READ))})
        body = {"model": model, "messages": messages, "max_tokens": 16, "seed": seed}
        body |= {"return_token_ids": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
        began, first, text = time.perf_counter(), None, ""
        async with aclosing(stream(target, "/chat/completions", body)) as moments:
            async for moment in moments:
                for choice in moment.data["choices"]:
                    text += choice["delta"].get("content") or ""
                    first = first or (moment.time if choice["token_ids"] else None)
                if usage := moment.data.get("usage"):
                    read.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
        assert first is not None
        seconds.append(first - began)
        messages.append({"role": "assistant", "content": text})
    return seconds, read


def turns(name: str, conversations: int, tiny: bool) -> None:
    """Print the time to the first token by turn of a conversation whose turns have equally much new text."""
    print(f"| {name}: turn | time to first token (median of {conversations}) | tokens read |")
    print("|---:|---:|---:|")
    with save_model(our_model(name, tiny)) as directory, start_server(directory) as target:
        served = Path(directory).name
        asyncio.run(talk(target, served, 2, 10_000))
        timings = [asyncio.run(talk(target, served, 20, seed)) for seed in range(conversations)]
    middle = [statistics.median(seconds[turn] for seconds, _ in timings) for turn in range(20)]
    for turn in (0, 1, 4, 9, 19):
        print(f"| {turn + 1} | {1e3 * middle[turn]:.1f} ms | {timings[0][1][turn]} |")
    print(f"\nturn 20 against turn 1: {middle[19] / middle[0]:.2f}")


def resident(target: Target) -> int:
    """Return the server's resident memory in bytes."""
    with closing(http.client.HTTPConnection(target.host, target.port)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    return int(re.findall(r"^process_resident_memory_bytes (\d+)$", text, re.M)[0])


def open_conversations(target: Target, vocab_size: int, count: int, tokens: int) -> None:
    """Open sessions that have read so many tokens and generated a few."""
    chance = random.Random(tokens)
    for i in range(count):
        ids = [chance.randrange(vocab_size) for _ in range(tokens)]
        post(target, {"prompt": ids, "max_tokens": 4, "session": f"{tokens}/{i}", "ignore_eos": True, "seed": i})
        print(f"{i + 1} of {count} conversations of {tokens:,} tokens", file=sys.stderr, flush=True)


def memory(count: int, long: int, short: int) -> None:
    """Compare the memory of a server with so many long conversations and with as many short ones."""
    model, vocab, resident_bytes = MambaLM(TWO_SMALL_LAYERS).eval(), TWO_SMALL_LAYERS.vocab_size, {}
    size, patient = model.init_cache(1).nbytes, ("--request-seconds", "3600")
    width = TWO_SMALL_LAYERS.d_model
    print(f"Mamba-2, two layers, d_model {width}: {size / 2**10:.0f} KiB of state per conversation\n")
    for tokens in (short, long):
        with save_model(model) as directory, start_server(directory, *patient, threads=1) as target:
            # Reading a long prompt takes memory for a while, which the process keeps. Both servers read two of them
            # first and one at the end: otherwise short conversations would be stored where the long prompts had been.
            open_conversations(target, vocab, 2, long + 1)
            before = resident(target)
            open_conversations(target, vocab, count, tokens)
            open_conversations(target, vocab, 1, long + 2)
            time.sleep(5)  # an idle server gives freed memory back
            resident_bytes[tokens] = before, resident(target)
    print(f"| {count} conversations of | server's memory before | with them open |\n|---:|---:|---:|")
    for tokens, (before, after) in resident_bytes.items():
        print(f"| {tokens:,} tokens | {before / 2**20:.1f} MiB | {after / 2**20:.1f} MiB |")
    print(f"\nlong against short: {resident_bytes[long][1] / resident_bytes[short][1]:.4f}")


def main() -> int:
    """Run the program, and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("throughput", help="tokens per second compared with generate")
    one.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64])
    two = commands.add_parser("llama", help="tokens per second compared with llama.cpp's server")
    two.add_argument("--server", required=True, metavar="PATH", help="the program llama-server")
    two.add_argument("--weights", choices=["float32", "bfloat16", "int8", "int4"], default="float32")
    two.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    for command in (one, two):
        command.add_argument("--rounds", type=int, default=3)
        command.add_argument("--waves", type=int, default=2, help="requests of each client in a round")
    three = commands.add_parser("turns", help="time to the first token of each turn of a conversation")
    three.add_argument("--conversations", type=int, default=5)
    for command in (one, three):
        command.add_argument("--model", choices=list(CONFIGS), default="mamba2-130m")
    for command in (one, two, three):
        command.add_argument("--tiny", action="store_true", help="a model with one small layer, to try the command")
    four = commands.add_parser("memory", help="memory of a server with long conversations open, and with short ones")
    four.add_argument("--conversations", type=int, default=64)
    four.add_argument("--long", type=int, default=100_000, help="tokens of a long conversation")
    four.add_argument("--short", type=int, default=100, help="tokens of a short one")
    options = parser.parse_args()
    torch.set_num_threads(2)
    print(f"{describe_machine()}\n", file=sys.stderr)
    if options.command == "throughput":
        throughput(options.model, options.clients, options.rounds, options.waves, options.tiny)
    elif options.command == "llama":
        llama(options.server, options.weights, options.clients, options.rounds, options.waves, options.tiny)
    elif options.command == "turns":
        turns(options.model, options.conversations, options.tiny)
    else:
        memory(options.conversations, options.long, options.short)
    return 0


if __name__ == "__main__":
    sys.exit(main())
