"""The end of a stream, kept in memory with its absolute offsets."""

from collections import deque

_MERGE_BELOW = 16 * 1024


class Ring:
    """Bytes `start` to `end` of one stream. Not locked: its process's lock guards it."""

    __slots__ = ("_chunks", "end", "start")

    def __init__(self) -> None:
        self._chunks: deque[bytearray | bytes] = deque()
        self.start = 0
        self.end = 0

    def __len__(self) -> int:
        return self.end - self.start

    def append(self, data: bytes) -> None:
        """Small pieces are merged, so that a program that writes single bytes costs no more than their number."""
        last = self._chunks[-1] if self._chunks else None
        if isinstance(last, bytearray) and len(last) + len(data) <= _MERGE_BELOW:
            last += data
        elif len(data) < _MERGE_BELOW:
            self._chunks.append(bytearray(data))
        else:
            self._chunks.append(data)
        self.end += len(data)

    def trim(self, keep: int, floor: int) -> int:
        """Drop whole chunks from the front while more than `keep` bytes stay and all dropped ones lie below `floor`.
        Returns how many bytes went."""
        dropped = 0
        while self._chunks and len(self) - len(self._chunks[0]) >= keep:
            size = len(self._chunks[0])
            if self.start + size > floor:
                break
            self._chunks.popleft()
            self.start += size
            dropped += size
        return dropped

    def clear(self) -> int:
        dropped = len(self)
        self._chunks.clear()
        self.start = self.end
        return dropped

    def read(self, offset: int, limit: int) -> bytes:
        """Up to `limit` bytes from `offset`, which must lie within the ring; one chunk's worth at most."""
        at = self.end
        for chunk in reversed(self._chunks):
            at -= len(chunk)
            if at <= offset:
                skip = offset - at
                return bytes(memoryview(chunk)[skip : skip + limit])
        return b""
