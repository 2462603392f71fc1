"""Reads a multipart/form-data body that is in memory.

Owns: what counts as a form here.
Reads: `oarlock.backend_api`.
Never: opens a file by a name that it reads; decodes a part's content.

    --B CRLF  Content-Disposition: form-data; name="purpose" CRLF CRLF  batch CRLF  --B-- CRLF
"""

from __future__ import annotations

from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser

from oarlock.backend_api import RouteError

MAX_PARTS = 16
MAX_HEAD = 4096  # bytes of the headers of one part
MAX_BOUNDARY = 70  # RFC 2046, section 5.1.1


@dataclass(frozen=True, slots=True)
class Part:
    """One field of a form."""

    filename: str | None
    data: bytes


def _bad(message: str) -> RouteError:
    return RouteError(400, message, None, "invalid_form")


def parse_form(content_type: str, body: bytes) -> dict[str, Part]:
    """The parts by name. Raises RouteError 400. Linear in the body."""
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not 1 <= len(boundary) <= MAX_BOUNDARY or not boundary.isascii():
        raise _bad("Send the file as a form, with the header Content-Type: multipart/form-data; boundary=….")
    fence = b"\r\n--" + boundary.encode()
    pieces = (b"\r\n" + body).split(fence, MAX_PARTS + 2)
    if len(pieces) > MAX_PARTS + 2:
        raise _bad(f"The form has more than {MAX_PARTS} parts.")
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise _bad("The form does not end with its boundary.")
    parts: dict[str, Part] = {}
    for piece in pieces[1:-1]:
        head, separator, data = piece.lstrip(b" \t").partition(b"\r\n\r\n")
        if not separator or not head.startswith(b"\r\n") or len(head) > MAX_HEAD:
            raise _bad("A part of the form has no headers, or too many.")
        name, filename = _names(head[2:])
        if name in parts:
            raise _bad(f"The form has {name[:100]!r} twice.")
        parts[name] = Part(filename, data)
    return parts


def _names(head: bytes) -> tuple[str, str | None]:
    try:
        headers = HeaderParser().parsestr(head.decode("utf-8"))
    except UnicodeDecodeError:
        raise _bad("The headers of a part of the form are not UTF-8.") from None
    name = headers.get_param("name", header="content-disposition")
    if headers.get_content_disposition() != "form-data" or not isinstance(name, str):
        raise _bad("A part of the form has no name.")
    if headers.get("content-transfer-encoding", "binary").strip().lower() not in ("binary", "8bit", "7bit"):
        raise _bad(f"The part {name[:100]!r} of the form has a Content-Transfer-Encoding; send it as it is.")
    filename = headers.get_filename()
    return name, filename
