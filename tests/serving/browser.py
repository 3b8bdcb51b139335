"""A headless chromium, driven through its debugging protocol."""

import base64
import contextlib
import http.client
import itertools
import json
import subprocess
import time
from pathlib import Path

from websockets.sync.client import connect

from tests.support import chromium

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-dev-shm-usage", "--disable-extensions", "--mute-audio", "--remote-debugging-port=0",
)  # fmt: skip


class Browser:
    """One tab."""

    def __init__(self, profile):
        command = [chromium(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        file = Path(profile) / "DevToolsActivePort"
        until = time.monotonic() + 60
        while not (file.exists() and len(file.read_text().split()) == 2):
            assert self._process.poll() is None, "the browser ended"
            assert time.monotonic() < until, "the browser does not start"
            time.sleep(0.1)
        connection = http.client.HTTPConnection("127.0.0.1", int(file.read_text().split()[0]), timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/json")
            tab = next(tab for tab in json.loads(connection.getresponse().read()) if tab["type"] == "page")
        self._stack = contextlib.ExitStack()
        self._socket = self._stack.enter_context(connect(tab["webSocketDebuggerUrl"], max_size=None))
        self._ids = itertools.count()
        self.problems = []
        self.requested = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Return the result of a command, and collect errors of the page meanwhile."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, method, parameters):
        if method == "Runtime.exceptionThrown":
            self.problems.append(parameters["exceptionDetails"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])

    def run(self, code):
        """Return the value of a JavaScript expression."""
        response = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in response, response
        return response["result"].get("value")

    def open(self, url):
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def until(self, code, seconds=60):
        """Wait until JavaScript is true."""
        end = time.monotonic() + seconds
        while not self.run(code):
            assert time.monotonic() < end, f"never: {code}; {self.problems}"
            time.sleep(0.02)

    def type(self, text):
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key, code, **more):
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text, **more)

    def click(self, selector):
        """Click in the middle of an element."""
        center = self.run(
            f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=center[0], y=center[1], button="left", clickCount=1)

    def size(self, width, height, mobile=False):
        """Change the window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def screenshot(self, path):
        """Save a picture of the window."""
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self):
        """End the browser."""
        with contextlib.suppress(Exception):
            self.call("Browser.close")
        self._stack.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
