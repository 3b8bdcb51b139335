"""Errors in the API's form: a status, and a JSON object that says what was expected and what came."""

from __future__ import annotations

from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error that is sent to the client.

    Attributes:
        status: the status of HTTP.
        message: one sentence.
        param: the field that is wrong, if there is one.
        code: a word for programs.
        headers: to send with it.
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
        """An error with this status and message."""
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str, message: str) -> ApiError:
    """A field of the request that is wrong."""
    return ApiError(400, message, param=param, code="invalid_value")


def too_many_requests(count: int) -> ApiError:
    """The answer to a request beyond the limit on open ones."""
    message = f"the server has reached its limit of {count} open requests; try again later"
    return ApiError(429, message, code="too_many_requests", headers={"Retry-After": "1"})
