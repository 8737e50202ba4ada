"""Serve moto's S3, and none of the other services that `moto.server` looks for at each request."""

from __future__ import annotations

import services.botocore_data  # noqa: F401 - parses each time once
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

_APP = create_backend_app("s3")
_APP.debug = False  # with it, Flask defines a class for each request


class _Handler(MotoRequestHandler):
    protocol_version = "HTTP/1.1"  # as S3: a client keeps its connections

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Errors alone are logged."""


def serve(host: str, port: int) -> None:
    """Answer requests until the process ends."""
    make_server(host, port, _APP, threaded=True, request_handler=_Handler).serve_forever()
