"""Errors in OpenAI's shape."""

from __future__ import annotations

from typing import Final

import msgspec

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


class ApiError(Exception):
    """A request that is answered with an error.

    `message` says what is wrong and what would be right; `param` names the field, if it is one.
    `retry_after_s` above 0 becomes a Retry-After header.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        retry_after_s: int = 0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The JSON body that goes with `status`."""
        return error_body(self.status, self.code, self.message, self.param)


def error_body(status: int, code: str, message: str, param: str | None = None) -> bytes:
    """OpenAI's error object as JSON bytes."""
    error = {
        "message": message,
        "type": _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error"),
        "param": param,
        "code": code,
    }
    return msgspec.json.encode({"error": error})


def error_event(status: int, code: str, message: str) -> bytes:
    """The server-sent event that ends a stream which cannot be completed."""
    return b"data: " + error_body(status, code, message) + b"\n\n"
