"""Sealing and opening datagrams: AES-128-GCM through `cryptography`, in place over the rows of a burst.

One call each, on views of the burst's memory: 1.2 us at 1,400 bytes. `encrypt` into a new object that is
then copied takes as long as `encrypt_into`, needs no newer release, and does not hang on what the library
makes of input and output in one memory. The key of each direction, stripe and phase comes from the session's
secret by HKDF; the nonce is the datagram's number, which never comes twice. Source: docs/ltp.md,
"Keys, seals and replays".
"""

from __future__ import annotations

import math
import struct

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.wire.datagrams import HEADER, SEAL_BYTES, Bytes, records_of

SECRET_BYTES = 32  # of a session, from the authenticated channel; for one session only
KEY_BYTES = 16
NONCE_BYTES = 12
KEEP_OLD_SECONDS = 3.0  # until the session sets three of its round trips

_INFO = b"atoll ltp 1"
_HEADER = HEADER.itemsize
_PHASE = HEADER.names.index("phase") if HEADER.names else 0  # the header's third byte
_NUMBER = 8  # where the number starts in the header


def derive_key(secret: bytes, *, client: bool, stripe: int, phase: int) -> bytes:
    """Return the key for the client's datagrams (or else the server's) on a stripe; `phase` is the whole
    count."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes, not {SECRET_BYTES}")
    info = _INFO + struct.pack("<BBQ", 1 if client else 2, stripe, phase)
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


class Sealer:
    """Seals one end's datagrams on a stripe. `client` says which end this is. With `seal` False the room
    for the seal stays zero: both ends must have agreed on that through the authenticated channel."""

    def __init__(self, secret: bytes, *, client: bool, stripe: int, seal: bool = True) -> None:
        self._secret, self._client, self._stripe, self._seal = secret, client, stripe, seal
        self.phase = 0
        self._cipher = self._cipher_of(0)
        self._last = -1

    def seal(self, frames: Bytes) -> None:
        """Seal a burst in place, (n, size): headers and bodies, with room of SEAL_BYTES at each row's end.

        The header's phase may be the last one's or the next. Raises ValueError for another, and for numbers
        that do not rise: a repeated nonce would give the key's stream away.
        """
        numbers = records_of(frames, HEADER, 0)["number"].astype(np.int64)
        if not len(numbers):
            return
        if numbers[0] <= self._last or (np.diff(numbers) <= 0).any():
            raise ValueError(f"numbers from {numbers[0]} do not rise, after {self._last}")
        phases = frames[:, _PHASE]
        if (phases != phases[0]).any() or phases[0] not in (self.phase & 0xFF, self.phase + 1 & 0xFF):
            raise ValueError(f"a burst of phase {phases[0]}, where {self.phase} is open")
        if phases[0] != self.phase & 0xFF:
            self.phase += 1
            self._cipher = self._cipher_of(self.phase)
        self._last = int(numbers[-1])
        if not self._seal:
            frames[:, -SEAL_BYTES:] = 0
            return
        memory, stride = _memory_of(frames)
        nonces, encrypt = _nonces_of(frames), self._cipher.encrypt
        start, size = 0, frames.shape[1]
        for nonce in nonces:
            body, end = start + _HEADER, start + size
            memory[body:end] = encrypt(nonce, memory[body : end - SEAL_BYTES], memory[start:body])
            start += stride

    def _cipher_of(self, phase: int) -> AESGCM:
        return AESGCM(derive_key(self._secret, client=self._client, stripe=self._stripe, phase=phase))


class Opener:
    """Opens the other end's datagrams on a stripe; `client` says which end this is. It holds the keys of
    three phases: the open one, the next, and for `keep_old` seconds the one before, for late datagrams."""

    def __init__(self, secret: bytes, *, client: bool, stripe: int, seal: bool = True) -> None:
        self._secret, self._client, self._stripe, self._seal = secret, client, stripe, seal
        self.phase = 0  # the highest that a good seal had
        self.refused = 0  # datagrams whose seal was not good
        self.keep_old = KEEP_OLD_SECONDS
        self._old_until = -math.inf
        self._ciphers = {phase: self._cipher_of(phase) for phase in (0, 1)}

    def open(self, frames: Bytes, sizes: npt.NDArray[np.int64], now: float = 0.0) -> npt.NDArray[np.bool_]:
        """Open a burst in place, (n, width), whose rows are filled up to `sizes`, seal included (as
        checked by headers_untrusted). Return which seals were good, (n,); the other rows are unchanged."""
        good = np.zeros(len(frames), dtype=bool)
        if not len(frames):
            return good
        if now >= self._old_until:
            self._ciphers.pop(self.phase - 1, None)
        phases = frames[:, _PHASE]
        if not self._seal:
            self._open_unsealed(frames, sizes, good)
        elif (phases == phases[0]).all():
            self._open_of(int(phases[0]), frames, sizes, range(len(frames)), good, now)
        else:
            base = self.phase - 1  # the old one first: a burst may have the change in it
            for phase in sorted(set(phases.tolist()), key=lambda phase: (phase - base) & 0xFF):
                rows = np.flatnonzero(phases == phase).tolist()
                self._open_of(phase, frames, sizes, rows, good, now)
        self.refused += len(good) - int(np.count_nonzero(good))
        return good

    def _open_of(
        self,
        phase: int,
        frames: Bytes,
        sizes: npt.NDArray[np.int64],
        rows: list[int] | range,
        good: npt.NDArray[np.bool_],
        now: float,
    ) -> None:
        known = [each for each in self._ciphers if each & 0xFF == phase]
        if not known:
            return
        decrypt = self._ciphers[known[0]].decrypt
        memory, stride = _memory_of(frames)
        nonces = _nonces_of(frames)
        ends = sizes.tolist()
        for row in rows:
            start = row * stride
            body, end = start + _HEADER, start + ends[row]
            try:
                memory[body : end - SEAL_BYTES] = decrypt(nonces[row], memory[body:end], memory[start:body])
            except InvalidTag:
                continue
            good[row] = True
        if known[0] > self.phase and good[rows].any():
            self.phase = known[0]
            self._old_until = now + self.keep_old
            self._ciphers = {each: self._ciphers[each] for each in (self.phase - 1, self.phase)}
            self._ciphers[self.phase + 1] = self._cipher_of(self.phase + 1)

    def _open_unsealed(
        self, frames: Bytes, sizes: npt.NDArray[np.int64], good: npt.NDArray[np.bool_]
    ) -> None:
        """Mark rows whose room for the seal is zero as good. Other rows were sealed, since the ends
        disagree, or changed on the way."""
        for size in np.unique(sizes).tolist():
            rows = sizes == size
            good[rows] = ~frames[rows, size - SEAL_BYTES : size].any(axis=1)

    def _cipher_of(self, phase: int) -> AESGCM:
        return AESGCM(derive_key(self._secret, client=not self._client, stripe=self._stripe, phase=phase))


def _nonces_of(frames: Bytes) -> list[bytes]:
    nonces = np.zeros((len(frames), NONCE_BYTES), dtype=np.uint8)
    nonces[:, 4:] = frames[:, _NUMBER:_HEADER]
    joined = nonces.tobytes()
    return [joined[start : start + NONCE_BYTES] for start in range(0, len(joined), NONCE_BYTES)]


def _memory_of(frames: Bytes) -> tuple[memoryview, int]:
    """Return the burst's memory from its first byte to its last, and the bytes from row to row: rows may
    lie apart, as in an arena whose rows are wider."""
    count, size = frames.shape
    if count == 1 and frames.strides[1] == 1:
        return memoryview(frames[0]), size
    stride = frames.strides[0] if count > 1 else size
    if frames.strides[1] != 1 or stride < size:
        raise ValueError("a row's bytes must lie side by side, and rows one after another")
    flat = np.lib.stride_tricks.as_strided(frames, shape=((count - 1) * stride + size,), strides=(1,))
    return memoryview(flat), stride  # type: ignore[arg-type]  # numpy says Buffer from 3.12 on
