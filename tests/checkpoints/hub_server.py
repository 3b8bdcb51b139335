"""A stand-in for the hub on this machine: the few requests of its API that uploads and downloads make."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


@contextmanager
def hub(rejects_writes=False):
    """Yield the address and the repositories: files by name, by "owner/name"."""
    repositories = {}

    class Handler(BaseHTTPRequestHandler):
        def answer(self, content=b"", code=200, **headers):
            self.send_response(code)
            for name, value in {"content_length": len(content), **headers}.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def answer_json(self, value, code=200, **headers):
            self.answer(json.dumps(value).encode(), code, content_type="application/json", **headers)

        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if rejects_writes or self.headers["authorization"] != "Bearer stand-in":
                self.answer_json({"error": "forbidden"}, 403, X_Error_Message="you may not write here")
            elif self.path == "/api/repos/create":
                value = json.loads(body)
                name = f"{value['organization']}/{value['name']}"
                repositories.setdefault(name, {})
                self.answer_json({"url": f"{address}/{name}", "name": name, "private": value.get("private")})
            elif self.path == "/api/validate-yaml":  # of a card
                self.answer_json({"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                files = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(body)["files"]]
                self.answer_json({"files": [{**file, "shouldIgnore": False} for file in files]})
            elif "/commit/" in self.path:
                name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
                entries = [json.loads(line) for line in body.splitlines()]
                files = {e["value"]["path"]: e["value"]["content"] for e in entries if e["key"] == "file"}
                repositories[name] |= {path: base64.b64decode(content) for path, content in files.items()}
                self.answer_json({"commitOid": COMMIT, "commitUrl": f"{address}/{name}/commit/{COMMIT}"})
            else:
                self.answer_json({"error": f"not found: {self.path}"}, 404)

        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            if path.startswith("/api/models/"):
                name = "/".join(path.split("/")[3:5])
                files = repositories[name].items()
                if "/tree/" in path:
                    entries = [{"path": file, "size": len(content), "oid": COMMIT} for file, content in files]
                    self.answer_json([{"type": "file", **entry} for entry in entries])
                else:
                    siblings = [{"rfilename": file} for file, _ in files]
                    self.answer_json({"id": name, "sha": COMMIT, "siblings": siblings})
            else:
                name, _, file = path.removeprefix("/").partition(f"/resolve/{COMMIT}/")
                content = repositories.get(name, {}).get(file)
                if content is None:
                    self.answer_json({"error": "not found"}, 404)
                    return
                etag = hashlib.sha256(content).hexdigest()
                self.answer(content, ETag=f'"{etag}"', X_Repo_Commit=COMMIT, X_Linked_Size=len(content))

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *arguments):
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield address, repositories
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
