"""A real server process on a free local port."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_model(directory, **fields):
    """Save a small model of bytes with a chat template in a directory."""
    from tests.models.cases import small_lm

    model = small_lm(**{"vocab_size": 256, "pad_vocab_size_multiple": 1, **fields})
    model.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return model


# Metrics that are 0 when nothing is left to do.
IDLE = ("anymamba_rows_running", "anymamba_rows_ready", "anymamba_rows_waiting", "anymamba_requests_open")
PATIENCE = 3600  # seconds, only for a server that hangs: a busy machine may slow one down a hundredfold


class Running:
    """A server; `stop` ends it and returns its exit code."""

    alive = []  # noqa: RUF012

    def __init__(self, directory, *options):
        command = [
            sys.executable,
            "-X",
            "faulthandler",
            "-m",
            "anymamba",
            "serve",
            str(directory),
            "--port",
            "0",
            "--threads",
            "1",
            *options,
        ]
        self.process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
        )
        self.alive.append(self)
        self.errors = []
        self._reader = threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True)
        self._reader.start()
        match = re.match(r"listening on (http://127\.0\.0\.1:(\d+))", self.process.stdout.readline())
        if match is None:
            self.process.wait()
            self._reader.join()
            raise RuntimeError("".join(self.errors))
        self.url = match[1]
        self.port = int(match[2])

    @classmethod
    def abort_all(cls):
        """End every server, and print what each of its threads was doing."""
        for server in cls.alive:
            server.process.send_signal(signal.SIGABRT)
            server.process.wait()
            server._reader.join()
            print("".join(server.errors), file=sys.stderr)

    def ask(self, path, body=None, *, method=None, headers=(), timeout=60):
        """Send a request; return status, headers and content. A body that is not bytes is sent as JSON."""
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            connection.request(method or ("GET" if body is None else "POST"), path, content, {**kind, **dict(headers)})
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def post(self, path, **body):
        """Send a request, which must succeed, and return the object in the response."""
        status, _, content = self.ask(path, body)
        assert status == 200, content
        return json.loads(content)

    def metrics(self, **headers):
        """Return every number of /metrics that has no labels."""
        _, _, content = self.ask("/metrics", headers=headers, timeout=PATIENCE)
        lines = [line.split() for line in content.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines if "{" not in name}

    def wait_until_idle(self):
        """Return the metrics once nothing is left to do, or after `PATIENCE`."""
        until = time.monotonic() + PATIENCE
        while True:
            metrics = self.metrics()
            if not any(metrics[name] for name in IDLE) or time.monotonic() >= until:
                return metrics
            time.sleep(0.05)

    def kill(self):
        """End the process at once, as a crash does."""
        self.process.kill()
        self.process.wait()
        self.alive.remove(self)
        self._reader.join()
        self.process.stdout.close()
        self.process.stderr.close()

    def stop(self, number=signal.SIGTERM):
        """End the process, and assert that it reported no error."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        self.alive.remove(self)
        self._reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        assert "Traceback" not in "".join(self.errors), "".join(self.errors)
        return code
