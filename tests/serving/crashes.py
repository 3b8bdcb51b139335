"""Two servers on one directory, killed at random under load: python -m tests.serving.crashes --seconds 60

Clients append to shared sessions through both servers, which are killed and started again. At the end both servers
report the same sessions, every acknowledged turn is part of them, and no unfinished file is left.
"""

import argparse
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from tests.serving.running import Running, make_model

CLIENTS = 6
SESSIONS = 3


class Crashes:
    """The load, and what the servers acknowledged."""

    def __init__(self, directory, seconds, seed):
        self.seed = seed
        self.until = time.monotonic() + seconds
        self.counts = Counter()
        self.problems = []
        self.acknowledged = {f"s{i}": [0] for i in range(SESSIONS)}  # tokens after each turn
        self._directory = directory
        self.servers = [self.start(), self.start()]

    def start(self):
        options = ["--states", self._directory / "states", "--state-memory", "1", "--segment-len", "32"]
        return Running(self._directory / "model", *options)

    def append(self, number):
        """Append to sessions as a client until the time is over."""
        chance = random.Random(f"{self.seed}/{number}")
        while time.monotonic() < self.until and not self.problems:
            name = chance.choice(list(self.acknowledged))
            body = {"prompt": "x" * chance.randrange(1, 40), "max_tokens": 3, "session": name, "ignore_eos": True}
            try:
                status, _, content = chance.choice(self.servers).ask("/v1/completions", body)
            except (OSError, http.client.HTTPException):
                self.counts["killed meanwhile"] += 1
                time.sleep(0.1)
                continue
            response = json.loads(content)
            if status == 200:
                self.acknowledged[name].append(response["usage"]["total_tokens"])
                self.counts["turns"] += 1
            elif status == 409:
                self.counts[response["error"]["code"]] += 1
            else:
                self.problems.append(f"status {status}: {content[:200]}")

    def kill(self):
        """Kill a server, and start another, until the time is over."""
        chance = random.Random(self.seed)
        while time.monotonic() < self.until:
            time.sleep(chance.uniform(1, 4))
            i = chance.randrange(2)
            self.servers[i].kill()
            self.servers[i] = self.start()
            self.counts["kills"] += 1


def run(directory, seconds, seed):
    """Run the load; return a line for each problem."""
    make_model(directory / "model")
    load = Crashes(directory, seconds, seed)
    threads = [threading.Thread(target=load.append, args=(i,)) for i in range(CLIENTS)]
    for thread in (*threads, killer := threading.Thread(target=load.kill)):
        thread.start()
    for thread in (*threads, killer):
        thread.join()
    problems = load.problems
    for name, totals in load.acknowledged.items():
        sessions = [json.loads(server.ask(f"/v1/sessions/{name}")[2]) for server in load.servers]
        if sessions[0] != sessions[1] or sessions[0].get("tokens", 0) < max(totals):
            problems.append(f"{name}: {max(totals)} tokens were acknowledged, the servers have {sessions}")
        if len(set(totals)) < len(totals):
            problems.append(f"{name}: two turns ended with the same number of tokens")
    for server in load.servers:
        server.stop()
    load.start().stop()  # which removes what the last kill has left
    problems += [f"{file} is left" for file in directory.rglob("*.tmp")]
    print(", ".join(f"{count} {name}" for name, count in sorted(load.counts.items())))
    return problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        problems = run(Path(temporary), args.seconds, args.seed)
    print("\n".join(problems) or "nothing was lost")
    sys.exit(bool(problems))
