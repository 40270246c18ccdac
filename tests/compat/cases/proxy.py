"""A proxy for plain HTTP, as small as can be: one request of each connection, its head kept."""

import socket
import threading
from typing import Self
from urllib.parse import urlsplit


class Proxy:
    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        with client:
            head = b""
            while b"\r\n\r\n" not in head:
                piece = client.recv(65_536)
                if not piece:
                    return
                head += piece
            self.heads.append(head)
            at = urlsplit(head.split()[1].decode())
            with socket.create_connection((at.hostname, at.port)) as server:
                server.sendall(head)
                threading.Thread(target=_copy, args=(client, server), daemon=True).start()
                _copy(server, client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while piece := source.recv(65_536):
            target.sendall(piece)
    except OSError:
        return
