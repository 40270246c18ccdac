"""How the application is served."""

from typing import Final

import uvicorn
from starlette.types import ASGIApp

from skerry.api.protocol import HttpProtocol

BACKLOG: Final = 512
KEEP_ALIVE_S: Final = 75
WS_MESSAGE_MAX: Final = 1024 * 1024


def server_config(app: ASGIApp, *, stop_grace_s: int) -> uvicorn.Config:
    """`stop_grace_s`: how long requests under way have, after the server was told to stop."""
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="websockets-sansio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=stop_grace_s,
        ws_max_size=WS_MESSAGE_MAX,
    )
