"""The options of `anymamba serve` and `anymamba bench-serve`; like all options, without torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

KEY_VARIABLE = "ANYMAMBA_API_KEY"


def add_serve(
    commands: Any,
    add_model: Callable[[argparse.ArgumentParser], None],
    whole: Callable[[str], Any],
    real: Callable[[str], Any],
) -> None:
    """MODEL, where to listen, who may send requests, and the limits of one."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="answer HTTP requests in OpenAI's form, with a page to talk to the model",
        description="Answer requests over HTTP: /v1/completions and /v1/chat/completions as OpenAI's clients send "
        "them, and a page at / to talk to the model. A conversation takes the same memory at any length, and is not "
        "read twice.",
    )
    add_model(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine)")
    parser.add_argument(
        "--port",
        type=whole,
        default=8080,
        metavar="N",
        help="port to listen on; 0: any free one (default: %(default)s)",
    )
    parser.add_argument("--name", help="name of the model, for clients (default: its directory's)")
    parser.add_argument(
        "--chat-template", metavar="DIR", help="directory with the chat template (default: the model's)"
    )
    parser.add_argument("--verbose", action="store_true", help="print a line for every request")
    safety = parser.add_argument_group("who may send requests")
    safety.add_argument(
        "--api-key", metavar="KEY", help=f"key that clients must send (default: ${KEY_VARIABLE}, or none)"
    )
    safety.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name by which the server may be reached; repeatable",
    )
    safety.add_argument(
        "--cors", action="append", default=[], metavar="ORIGIN", help="site whose pages may send requests; repeatable"
    )
    states = parser.add_argument_group("kept states")
    states.add_argument("--states", metavar="DIR", help="also keep states on disk, so that sessions survive a restart")
    states.add_argument(
        "--state-memory", type=whole, default=1024, metavar="MIB", help="memory for states (default: %(default)s)"
    )
    states.add_argument(
        "--state-disk", type=whole, default=8192, metavar="MIB", help="disk space for states (default: %(default)s)"
    )
    work = parser.add_argument_group("how work is divided")
    work.add_argument(
        "--rows", type=whole, default=64, metavar="N", help="rows decoded together, at most 64 (default: 64)"
    )
    work.add_argument(
        "--together",
        action="store_true",
        default=None,
        help="decode rows together even without the compiled kernels: faster, but the last bits of a reply then "
        "depend on the other requests",
    )
    work.add_argument("--segment-len", type=whole, default=256, metavar="N", help="tokens read at once (default: 256)")
    work.add_argument(
        "--stall",
        type=real,
        default=0.1,
        metavar="SECONDS",
        help="how long reading prompts may hold up writing (default: %(default)s)",
    )
    _add_limits(parser, whole, real)


def _add_limits(parser: argparse.ArgumentParser, whole: Callable[[str], Any], real: Callable[[str], Any]) -> None:
    limits = parser.add_argument_group("limits")
    for name, kind, default, unit, text in (
        ("max-body", whole, 4, "MIB", "size of a request"),
        ("max-prompt", whole, 131_072, "N", "tokens of a prompt"),
        ("max-tokens", whole, 4096, "N", "tokens of a reply"),
        ("max-n", whole, 16, "N", "replies to a request"),
        ("max-requests", whole, 256, "N", "requests at a time, waiting ones included; others get status 429"),
        ("max-connections", whole, 1024, "N", "connections at a time"),
        ("request-seconds", real, 600.0, "S", "time for a request, after which its reply ends"),
        ("body-seconds", real, 10.0, "S", "time for a request to arrive"),
        ("grace", real, 10.0, "S", "time for running requests to finish when the server is stopped"),
    ):
        limits.add_argument(f"--{name}", type=kind, default=default, metavar=unit, help=f"{text} (default: {default})")


def add_bench_serve(
    commands: Any, whole: Callable[[str], Any], real: Callable[[str], Any], option: Callable[[str], Any]
) -> None:
    """URL, the load, and where the figures go."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench-serve",
        help="send requests to a server, and measure how long tokens take",
        description="Send requests of random tokens to a server, and measure the time to the first token, the time "
        "between tokens and the throughput. The command first prints what it will send. Without --rate, --concurrency "
        "requests are open at a time (a closed loop). With --rate, requests are sent at that rate however fast the "
        "server is (an open loop), and the time that they wait counts.",
    )
    parser.add_argument("url", metavar="URL", help="address of the server, such as http://127.0.0.1:8080")
    load = parser.add_argument_group("the load")
    load.add_argument(
        "--requests", type=whole, metavar="N", help="number of requests (default: 64, or as many as --seconds allows)"
    )
    load.add_argument("--seconds", type=real, metavar="S", help="time after which no more requests are sent")
    load.add_argument(
        "--concurrency", type=whole, default=8, metavar="N", help="requests open at a time (default: %(default)s)"
    )
    load.add_argument("--rate", type=real, metavar="R", help="requests per second, sent at random times")
    for name, default, text in (("prompt", 128, "tokens to read"), ("output", 64, "tokens to write")):
        load.add_argument(
            f"--{name}-tokens",
            type=_range,
            default=(default, default),
            metavar="N or N-M",
            help=f"{text} for each request (default: {default})",
        )
    load.add_argument(
        "--seed", type=whole, default=0, metavar="N", help="seed of prompts and times (default: %(default)s)"
    )
    load.add_argument(
        "--warm-up", type=whole, default=2, metavar="N", help="requests sent first, which do not count (default: 2)"
    )
    load.add_argument("--timeout", type=real, default=600.0, metavar="S", help="time for a request (default: 600)")
    load.add_argument("--model", metavar="NAME", help="model to ask for (default: the server's first)")
    load.add_argument(
        "--field",
        type=option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="field of every request, such as temperature=0; repeatable",
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"key of the server (default: ${KEY_VARIABLE}, or none)")
    parser.add_argument("--json", metavar="FILE", help="file for all figures and the time of every token")
    parser.add_argument(
        "--plot", metavar="FILE", help="file for a plot of the times (.png, .svg or .pdf; needs matplotlib)"
    )


def _range(text: str) -> tuple[int, int]:
    """N or N-M, both above 0."""
    low, dash, high = text.partition("-")
    try:
        found = int(low), int(high if dash else low)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, or two as in 100-200, got {text!r}")
    return found
