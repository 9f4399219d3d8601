"""A small S3 in memory, over HTTP: what pyarrow's client asks of a bucket when it writes, reads and lists objects.

An object appears when its upload is completed, and not before; a listing comes in pages of three.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 3


class S3(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        """By bucket/key."""
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.refused = False
        """Whether every request is refused, as without rights."""

    def uri(self, place: str, user: str = "someone:sec%2Fret") -> str:
        where = f"scheme=http&endpoint_override=127.0.0.1:{self.server_address[1]}&region=us-east-1"
        return f"s3://{user}@{place}?{where}"


@contextmanager
def s3_server() -> Iterator[S3]:
    server = S3()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: S3

    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        return unquote(parts.path).strip("/"), dict(parse_qsl(parts.query, keep_blank_values=True))

    def do_HEAD(self) -> None:
        place, _ = self._asked()
        data = self.server.objects.get(place)
        if "/" not in place:
            self._answer(200)  # the bucket
        elif data is None:
            self._answer(404)
        else:
            self._answer(200, b"", {"Content-Length": str(len(data)), "ETag": '"x"', "Last-Modified": _DATE})

    def do_GET(self) -> None:
        place, query = self._asked()
        if "list-type" in query:
            self._list(place, query)
            return
        data = self.server.objects.get(place)
        if data is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        wanted = self.headers.get("Range")
        if wanted is None:
            self._answer(200, data)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        self._answer(206, data[int(first) : int(last) + 1])

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        keys = [place.removeprefix(f"{bucket}/") for place in self.server.objects if place.startswith(f"{bucket}/")]
        below = sorted(key for key in keys if key.startswith(prefix))
        entries: dict[str, str] = {}
        for key in below:
            head, slash, _ = key.removeprefix(prefix).partition("/")
            if slash and query.get("delimiter"):
                folder = f"{prefix}{head}/"
                entries[folder] = f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            else:
                size = len(self.server.objects[f"{bucket}/{key}"])
                entries[key] = f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size></Contents>"
        names = [name for name in sorted(entries) if name > after]
        page, rest = names[:PAGE], names[PAGE:]
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if rest else ""
        body = "".join(entries[name] for name in page)
        count = f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{'true' if rest else 'false'}</IsTruncated>"
        self._answer(200, f"<ListBucketResult>{count}{more}{body}</ListBucketResult>".encode())

    def do_PUT(self) -> None:
        place, query = self._asked()
        data = self._body()
        if "uploadId" in query:
            self.server.uploads[query["uploadId"]][int(query["partNumber"])] = data
        else:
            self.server.objects[place] = data
        self._answer(200, b"", {"ETag": '"x"'})

    def do_POST(self) -> None:
        place, query = self._asked()
        self._body()
        if "uploads" in query:
            name = f"upload-{len(self.server.uploads)}"
            self.server.uploads[name] = {}
            told = f"<UploadId>{name}</UploadId>"
            self._answer(200, f"<InitiateMultipartUploadResult>{told}</InitiateMultipartUploadResult>".encode())
        else:
            parts = self.server.uploads[query["uploadId"]]
            self.server.objects[place] = b"".join(data for _, data in sorted(parts.items()))
            self._answer(200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b"".join(_chunks(self.rfile.readline, self.rfile.read))
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            inner = BytesIO(data)  # the same once more, with signatures and checksums
            return b"".join(_chunks(inner.readline, inner.read))
        return data

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        if self.server.refused:
            status, body, headers = 403, b"<Error><Code>AccessDenied</Code></Error>", None
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


def _chunks(readline: Callable[[], bytes], read: Callable[[int], bytes]) -> Iterator[bytes]:
    """SIZE;more CRLF bytes CRLF, up to a size of 0, and lines behind that."""
    while size := int(readline().split(b";")[0], 16):
        yield read(size)
        readline()
    while readline().strip():
        pass


_DATE = "Tue, 17 Nov 2026 18:00:00 GMT"
