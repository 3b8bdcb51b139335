"""The options of serve and bench-serve; like all options, without torch."""

from __future__ import annotations

import argparse
from typing import Any

from anymamba.cli.options import add_model, integer, number, parse_name_value, repeatable

KEY_VARIABLE = "ANYMAMBA_API_KEY"


def add_serve(commands: Any) -> None:
    """Add the options of `anymamba serve`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, with an OpenAI-compatible API and a chat page",
        description="Serve a model over HTTP: /v1/completions and /v1/chat/completions, for OpenAI's and other "
        "clients, and a chat page at /. A conversation needs the same memory at any length, and no part of it is read "
        "twice.",
    )
    add_model(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s, for this machine)"
    )
    parser.add_argument(
        "--port", **integer(), default=8080, help="port to listen on; 0 for any free one (default: %(default)s)"
    )
    parser.add_argument("--name", help="model name that clients use (default: the directory's name)")
    parser.add_argument(
        "--chat-template", metavar="DIR", help="directory with the chat template (default: the model's own)"
    )
    parser.add_argument(
        "--tool-format",
        choices=("hermes", "llama3", "mistral", "granite", "nemotron", "json"),
        help="how the model writes tool calls (default: as its chat template does)",
    )
    parser.add_argument("--verbose", action="store_true", help="print a line for every request")
    safety = parser.add_argument_group("access")
    safety.add_argument(
        "--api-key", metavar="KEY", help=f"key that clients must send (default: ${KEY_VARIABLE}, or none)"
    )
    safety.add_argument(
        "--allow-host",
        **repeatable("NAME"),
        help="additional host name that requests may be addressed to, or '*' for any; repeatable",
    )
    safety.add_argument(
        "--cors", **repeatable("ORIGIN"), help="site (https://...) whose pages may send requests; repeatable"
    )
    states = parser.add_argument_group("cached states")
    states.add_argument("--states", metavar="DIR", help="also keep states on disk, so that sessions survive a restart")
    states.add_argument(
        "--state-memory", **integer("MIB"), default=1024, help="memory for states (default: %(default)s)"
    )
    states.add_argument(
        "--state-disk", **integer("MIB"), default=8192, help="disk space for states (default: %(default)s)"
    )
    work = parser.add_argument_group("scheduling")
    work.add_argument("--rows", **integer(), default=64, help="rows decoded together (default: 64)")
    work.add_argument(
        "--together",
        action="store_true",
        default=None,
        help="decode rows together even without the compiled kernels: faster, but the last bits of a reply then depend "
        "on other requests",
    )
    work.add_argument(
        "--exact",
        action="store_true",
        help="read prompts so that a reply has the same bits wherever its text was cut into turns and cached states; "
        "reading takes longer",
    )
    work.add_argument("--segment-len", **integer(), default=256, help="prompt tokens computed at once (default: 256)")
    work.add_argument(
        "--stall",
        **number("SECONDS"),
        default=0.1,
        help="how long reading prompts may delay running replies (default: %(default)s)",
    )
    _add_limits(parser)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits")
    for name, kind, default, text in (
        ("max-body", integer("MIB"), 4, "largest body of a request"),
        ("max-prompt", integer(), 131_072, "largest number of tokens in a prompt"),
        ("max-tokens", integer(), 4096, "largest number of tokens in a reply"),
        ("max-n", integer(), 16, "largest number of replies to a request"),
        (
            "max-requests",
            integer(),
            256,
            "largest number of open requests, waiting ones included; others get status 429",
        ),
        ("max-connections", integer(), 1024, "largest number of connections"),
        ("request-seconds", number("S"), 600.0, "time limit for a request, after which its reply ends"),
        ("body-seconds", number("S"), 10.0, "time limit for a request to arrive"),
        ("grace", number("S"), 10.0, "time for running requests to finish when the server is stopped"),
    ):
        limits.add_argument(f"--{name}", **kind, default=default, help=f"{text} (default: {default})")


def add_bench_serve(commands: Any) -> None:
    """Add the options of `anymamba bench-serve`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench-serve",
        help="send requests to a server and measure its latency and throughput",
        description="Send requests of random tokens to a server, and measure the time to the first token, the time "
        "between tokens and the throughput. It first prints what it will send. Without --rate, --concurrency requests "
        "are open at any time (a closed loop). With --rate, requests are sent at that rate, however fast the server "
        "answers (an open loop), and their waiting time counts.",
    )
    parser.add_argument("url", metavar="URL", help="address of the server, such as http://127.0.0.1:8080")
    load = parser.add_argument_group("the load")
    load.add_argument(
        "--requests", **integer(), help="number of requests (default: 64, or as many as --seconds allows)"
    )
    load.add_argument("--seconds", **number("S"), help="time after which no more requests are sent")
    load.add_argument("--concurrency", **integer(), default=8, help="requests open at a time (default: %(default)s)")
    load.add_argument("--rate", **number("R"), help="requests per second, at random times")
    for name, default, text in (("prompt", 128, "prompt"), ("output", 64, "reply")):
        load.add_argument(
            f"--{name}-tokens",
            type=_parse_range,
            default=(default, default),
            metavar="N or N-M",
            help=f"tokens in each {text} (default: {default})",
        )
    load.add_argument("--seed", **integer(), default=0, help="random seed for prompts and times (default: %(default)s)")
    load.add_argument("--warm-up", **integer(), default=2, help="requests sent first and not counted (default: 2)")
    load.add_argument("--timeout", **number("S"), default=600.0, help="time limit of a request (default: 600)")
    load.add_argument("--model", metavar="NAME", help="model to request (default: the server's first)")
    load.add_argument(
        "--field",
        **repeatable("NAME=VALUE", parse_name_value),
        help="extra field for every request, such as temperature=0; repeatable",
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"the server's key (default: ${KEY_VARIABLE}, or none)")
    parser.add_argument("--json", metavar="FILE", help="write all figures and the time of every token to it")
    parser.add_argument("--plot", metavar="FILE", help="plot the times to it (.png, .svg or .pdf; needs matplotlib)")


def _parse_range(text: str) -> tuple[int, int]:
    """Parse N or N-M, both above 0."""
    low, dash, high = text.partition("-")
    try:
        limits = (int(low), int(high if dash else low))
    except ValueError:
        limits = (0, 0)
    if not 1 <= limits[0] <= limits[1]:
        raise argparse.ArgumentTypeError(f"expected an integer above 0, or two as in 100-200, got {text!r}")
    return limits
