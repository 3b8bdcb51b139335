"""Errors in the API's form: an HTTP status, and a JSON object that names what was expected and what came."""

from __future__ import annotations

from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error that is sent to the client.

    Attributes:
        status: HTTP status.
        message: One sentence for people.
        param: Name of the invalid field, if there is one.
        code: Short name for programs.
        headers: Headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Create an error with this status and message."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the response."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid_value(param: str, message: str) -> ApiError:
    """Return the error for an invalid field."""
    return ApiError(400, message, param=param, code="invalid_value")


def too_many_requests(count: int) -> ApiError:
    """Return the error for a request beyond the limit on open requests."""
    message = f"the server has reached its limit of {count} open requests; try again later"
    return ApiError(429, message, code="too_many_requests", headers={"Retry-After": "1"})


def internal_error() -> ApiError:
    """Return the error for an unexpected failure, whose details belong in the log."""
    return ApiError(500, "internal server error; see the server's log", code="internal_error")
