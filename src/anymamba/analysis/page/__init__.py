"""The report as one HTML page that needs no network and no other files."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def render_page(data: dict[str, Any]) -> str:
    """Return the HTML page that draws `data` (`anymamba.analysis.report_data.report_data`).

    Everything that comes from the model or the text is shown as text: in the page it is JSON in which no tag can begin,
    and the content security policy of the page forbids every address.
    """
    parts = {
        name: (_HERE / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "draw.js", "page.js")
    }
    # Undecodable bytes have become lone surrogates, which UTF-8 cannot encode; ASCII JSON escapes them.
    content = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    content = content.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    title = html.escape(data["name"].encode("utf-8", "replace").decode("utf-8"))
    document = parts["page.html"]
    for marker, text in (
        ("<!-- style -->", f"<style>\n{parts['page.css']}</style>"),
        ("<!-- code -->", f"<script>\n{parts['draw.js']}{parts['page.js']}</script>"),
        ("<!-- title -->", f"<title>Inside {title}</title>"),
        ("<!-- data -->", f'<script type="application/json" id="data">{content}</script>'),
    ):
        before, after = document.split(marker)
        document = before + text + after
    return document
