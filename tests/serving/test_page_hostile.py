"""The page before a server, or a proxy in between, that sends anything: it says so, and stays usable."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files

import pytest

from tests.serving.browser import Browser
from tests.support import chromium

pytestmark = pytest.mark.skipif(chromium() is None, reason="no chromium to open the page with")

TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
MARKUP = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
NOT_A_PART = "The server sent something that is not a part of a reply."
COUNTS = {"prompt_tokens": 1, "total_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}


class Server(ThreadingHTTPServer):
    """Serves the page, and as every reply the same bytes."""

    daemon_threads = True

    def __init__(self):
        self.status = 200
        self.kind = "text/event-stream"
        self.reply = b""
        self.length = None
        self.model = {"id": "model", "max_tokens": 100, "state_bytes": 1000}
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/v1/models":
            self._send(200, "application/json", json.dumps({"data": [self.server.model]}).encode())
            return
        name = self.path.partition("?")[0].rpartition("/")[2] or "index.html"
        content = (files("anymamba.serving") / "static" / name).read_bytes()
        self._send(200, TYPES[name.rpartition(".")[2]], content)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(self.server.status, self.server.kind, self.server.reply, self.server.length)

    def _send(self, status, kind, content, length=None):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    tab = Browser(tmp_path_factory.mktemp("profile"))
    yield tab
    tab.close()


@pytest.fixture
def server(browser):
    with Server() as running:
        browser.open(f"http://127.0.0.1:{running.server_address[1]}/")
        browser.run("localStorage.clear(); sessionStorage.clear()")
        browser.problems.clear()
        yield running


def chunk(content, **fields):
    return {"choices": [{"delta": {"content": content}, "token_ids": [1]}], **fields}


def events(*values):
    return b"".join(b"data: " + (x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n\n" for x in values)


def say(browser, text="hello"):
    """Send a message; return the text of the last reply and what the page says about it."""
    count = browser.run("document.querySelectorAll('article').length")
    browser.run("document.getElementById('input').focus()")
    browser.type(text)
    browser.press("Enter", 13)
    browser.until(f"document.querySelectorAll('article .tools').length === {count + 2}")
    last = "[...document.querySelectorAll('article')].at(-1)"
    return browser.run(f"[{last}.querySelector('.text').textContent, {last}.querySelector('.problem')?.textContent]")


WHOLE = events(chunk("fine"), {"choices": [], "usage": COUNTS}, b"[DONE]")
REPLIES = {
    "markup": (events(chunk(MARKUP), b"[DONE]"), MARKUP, None),
    "a part": (events(chunk("half"), chunk(" a")), "half a", "The reply was cut off."),
    "nothing": (b"", "", "The reply was cut off."),
    "no end of an event": (events(chunk("half"))[:-1], "", "The reply was cut off."),
    "not JSON": (events(chunk("half"), b"{"), "half", NOT_A_PART),
    "a page": (f"data: {MARKUP}\n\n".encode(), "", NOT_A_PART),
    "null": (events(b"null"), "", NOT_A_PART),
    "no choices": (events({}), "", NOT_A_PART),
    "no delta": (events({"choices": [{}]}), "", NOT_A_PART),
    "other counts": (events(chunk("half"), {"choices": [], "usage": {"prompt_tokens": 1}}), "half", NOT_A_PART),
    "text as counts": (events({"choices": [], "usage": {**COUNTS, "total_tokens": MARKUP}}), "", NOT_A_PART),
    "an object as text": (events(chunk({"a": [MARKUP]}), b"[DONE]"), "[object Object]", None),
    "an error": (events(chunk("half"), {"error": {"message": MARKUP}}), "half", MARKUP),
    "an error of nothing": (events({"error": {}}), "", "The server reported an error."),
    "bytes that are no text": (events(b'{"choices": [{"delta": {"content": "\xff"}}]}', b"[DONE]"), "\ufffd", None),
    "comments": (b": ping\n\nevent: x\n\n" + events(chunk("a"), b"[DONE]", chunk("b")), "a", None),
    "text from right to left": (events(chunk("\u202eevil\u0000"), b"[DONE]"), "\u202eevil\u0000", None),
    "much": (events(*[chunk("x " * 500)] * 100, b"[DONE]"), "x " * 50_000, None),
}


@pytest.mark.parametrize("name", REPLIES)
def test_any_stream_is_shown_or_reported_and_the_next_message_is_answered(browser, server, name):
    server.reply, text, problem = REPLIES[name]
    assert say(browser) == [text, problem]
    server.reply = WHOLE
    assert say(browser, "again") == ["fine", None]
    assert browser.run("document.title") == "model"
    assert browser.problems == []


def test_a_connection_that_breaks_is_reported(browser, server):
    server.reply, server.length = events(chunk("half")), 1000
    assert say(browser)[1]


@pytest.mark.parametrize("reply", [b"<html>" + MARKUP.encode(), b'{"error": 5}', b"[", b'{"error": {"message": null}}'])
def test_an_error_that_is_no_json_is_reported_with_its_status(browser, server, reply):
    server.status, server.kind, server.reply = 502, "text/html", reply
    text, problem = say(browser)
    assert text == ""
    assert "502" in problem


def test_a_name_of_a_model_is_never_markup(browser, server):
    server.model = {"id": MARKUP, "max_tokens": MARKUP, "state_bytes": MARKUP}
    browser.open(f"http://127.0.0.1:{server.server_address[1]}/?")
    browser.until(f"document.getElementById('model').textContent === {json.dumps(MARKUP)}")
    assert browser.run("document.title") == MARKUP
    server.reply = WHOLE
    assert say(browser) == ["fine", None]
