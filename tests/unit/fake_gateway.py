"""A program that answers as a gateway would: `fake_gateway.py PORT HOW`.

HOW is "split", "local" (nothing transferred), "broken" (the stream breaks off), "refusing" (429) or
"failing" (an error event in the stream).
"""

from __future__ import annotations

import http.server
import json
import signal
import sys
import time

TIMING = "queue;dur=0.25, tokenise;dur=0.5, prefill;dur=2, transfer;dur=0.25, ttft;dur=3.5"
LEDGER = {
    "request_id": "req/1",
    "outcome": "finished",
    "phases_ms": {"queue": 0.5, "prefill": 1.5, "transfer": 1.0, "unattributed": 0.0},
    "ttft_ms": 3.0,
    "e2e_ms": 9.0,
    "transferred_bytes": 4096,
    "prefill_worker": "prefill-0",
    "decode_worker": "decode-0",
    "why": "least loaded",
}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    how = "split"

    def do_GET(self) -> None:
        answers: dict[str, object] = {
            "/ready": {},
            "/v1/models": {"data": [{"id": "tiny"}]},
            "/admin/requests/req%2F1": LEDGER,
            "/admin/requests/odd": {"phases_ms": 3},
        }
        found = answers.get(self.path)
        unknown = {"error": {"message": "the request has not ended yet"}}
        self._json(404 if found is None else 200, unknown if found is None else found)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "tiny"
        assert body["stream"] is True
        if self.how == "refusing":
            self._json(429, {"error": {"message": "too many requests"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("x-request-id", "req/1")
        self.send_header("Server-Timing", TIMING)
        self.send_header("x-twofold-transferred", "0" if self.how == "local" else "4096")
        self.end_headers()
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        time.sleep(0.01)
        for text in ("Paris, ", "of course."):
            self._event({"choices": [{"index": 0, "delta": {"content": text}}]})
        if self.how == "broken":
            self.close_connection = True
            return
        if self.how == "failing":
            self._event({"error": {"message": "decode-0 is gone"}})
        self._event({"choices": [], "usage": {}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def _json(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _event(self, value: object) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


def main() -> None:
    port, Handler.how = int(sys.argv[1]), sys.argv[2]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(f"ready on port {port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
