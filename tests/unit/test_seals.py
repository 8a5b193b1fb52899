"""Sealing and opening: what was sealed opens, and nothing else does."""

from __future__ import annotations

import hmac

import numpy as np
import numpy.typing as npt
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from atoll.ltp.replay import ReplayWindow
from atoll.net.seals import Opener, Sealer, derive_key
from atoll.wire.datagrams import HEADER, SEAL_BYTES, Bytes, Kind, new_frames, records_of, write_headers

SECRET = bytes(range(32))
SIZE = 300


def burst(count: int = 8, first: int = 0, phase: int = 0, size: int = SIZE) -> Bytes:
    frames = new_frames(count, size - HEADER.itemsize - SEAL_BYTES)
    frames[:, :-SEAL_BYTES] = np.random.default_rng(first).integers(0, 256, frames[:, :-SEAL_BYTES].shape)
    write_headers(frames, Kind.DATA, phase, stripe=3, session=11, first_number=first)
    return frames


def sizes_of(frames: Bytes) -> npt.NDArray[np.int64]:
    return np.full(len(frames), frames.shape[1])


def ends(seal: bool = True) -> tuple[Sealer, Opener]:
    return (
        Sealer(SECRET, client=True, stripe=3, seal=seal),
        Opener(SECRET, client=False, stripe=3, seal=seal),
    )


@pytest.mark.parametrize("seal", [True, False])
@pytest.mark.parametrize("size", [33, 60, SIZE, 1400, 65_000])
def test_what_was_sealed_opens(seal: bool, size: int) -> None:
    sealer, opener = ends(seal)
    frames = burst(5, size=size)
    plain = frames.copy()
    sealer.seal(frames)
    assert (frames[:, : HEADER.itemsize] == plain[:, : HEADER.itemsize]).all()
    assert (frames[:, HEADER.itemsize :] == plain[:, HEADER.itemsize :]).all() == (not seal)
    assert opener.open(frames, sizes_of(frames)).all()
    assert (frames[:, :-SEAL_BYTES] == plain[:, :-SEAL_BYTES]).all()
    assert opener.refused == 0


def test_the_seal_is_aes_gcm_with_the_number_as_nonce() -> None:
    sealer, _ = ends()
    frames = burst(3, first=2**40)
    plain = frames.copy()
    sealer.seal(frames)
    cipher = AESGCM(derive_key(SECRET, client=True, stripe=3, phase=0))
    for row, sealed in zip(plain, frames, strict=True):
        number = int(records_of(row[None], HEADER, 0)["number"][0])
        nonce = bytes(4) + number.to_bytes(8, "little")
        expected = cipher.encrypt(nonce, row[16:-SEAL_BYTES].tobytes(), row[:16].tobytes())
        assert sealed[16:].tobytes() == expected


@pytest.mark.parametrize("seal", [True, False])
def test_rows_of_an_arena_are_opened_where_they_lie(seal: bool) -> None:
    sealer, opener = ends(seal)
    arena = np.full((6, 2 * SIZE), 0xEE, dtype=np.uint8)
    plain = burst(6)
    arena[:, :SIZE] = plain
    sealer.seal(arena[:, :SIZE])
    sizes = sizes_of(plain)
    short = burst(1, first=100, size=120)
    sealer.seal(short)
    arena[4, :120], sizes[4] = short[0], 120
    assert opener.open(arena, sizes).all()
    keep = [0, 1, 2, 3, 5]
    assert (arena[keep, : SIZE - SEAL_BYTES] == plain[keep, :-SEAL_BYTES]).all()
    assert (arena[4, : 120 - SEAL_BYTES] == burst(1, first=100, size=120)[0, :-SEAL_BYTES]).all()
    assert (arena[:, SIZE:] == 0xEE).all()


def test_rows_that_lie_otherwise_are_refused() -> None:
    sealer, _ = ends()
    upwards = burst(4)[::-1]
    write_headers(upwards, Kind.DATA, 0, stripe=3, session=11, first_number=0)
    with pytest.raises(ValueError, match="rows one after another"):
        sealer.seal(upwards)


def test_every_changed_bit_of_header_body_and_seal_is_refused() -> None:
    sealer, opener = ends()
    frames = burst(1, size=40)
    sealer.seal(frames)
    forged = np.repeat(frames, 40 * 8, axis=0)
    bits = np.arange(40 * 8)
    forged[bits, bits // 8] ^= (1 << bits % 8).astype(np.uint8)
    before = forged.copy()
    assert not opener.open(forged, sizes_of(forged)).any()
    assert (forged == before).all()
    assert opener.refused == 320
    assert opener.phase == 0  # nor does a forged phase move the keys on
    assert opener.open(frames, sizes_of(frames)).all()


def test_cut_and_joined_ones_are_refused() -> None:
    sealer, opener = ends()
    frames = burst(4)
    sealer.seal(frames)
    arena = np.concatenate([frames, frames[::-1]], axis=1)
    assert not opener.open(arena.copy(), np.array([SIZE - 1, 33, SIZE + 1, 2 * SIZE])).any()
    swapped = frames.copy()
    swapped[:2, HEADER.itemsize :] = frames[1::-1, HEADER.itemsize :]
    assert opener.open(swapped, sizes_of(swapped)).tolist() == [False, False, True, True]


def test_keys_are_of_a_direction_a_stripe_and_a_phase() -> None:
    keys = {
        derive_key(secret, client=client, stripe=stripe, phase=phase)
        for secret in (SECRET, SECRET[::-1])
        for client in (True, False)
        for stripe in range(8)
        for phase in (0, 1, 255, 256)
    }
    assert len(keys) == 2 * 2 * 8 * 4
    with pytest.raises(ValueError, match="a secret of 31 bytes"):
        derive_key(SECRET[1:], client=True, stripe=0, phase=0)


def test_a_key_is_hkdf_s() -> None:
    """RFC 5869 by hand: extracted with a salt of zeros, expanded once."""
    extracted = hmac.digest(bytes(32), SECRET, "sha256")
    info = b"atoll ltp 1" + b"\x02" + b"\x05" + (300).to_bytes(8, "little")
    expected = hmac.digest(extracted, info + b"\x01", "sha256")[:16]
    assert derive_key(SECRET, client=False, stripe=5, phase=300) == expected


@pytest.mark.parametrize(
    "opener",
    [
        Opener(SECRET[::-1], client=False, stripe=3),
        Opener(SECRET, client=True, stripe=3),  # its own direction: what was sent comes back
        Opener(SECRET, client=False, stripe=2),
        Opener(SECRET, client=False, stripe=3, seal=False),
    ],
    ids=["another secret", "another direction", "another stripe", "unsealed"],
)
def test_another_key_opens_nothing(opener: Opener) -> None:
    sealer, _ = ends()
    frames = burst()
    sealer.seal(frames)
    assert not opener.open(frames, sizes_of(frames)).any()
    assert opener.refused == 8


def test_what_is_not_sealed_does_not_open_where_seals_are_expected() -> None:
    unsealed, _ = ends(seal=False)
    _, opener = ends()
    frames = burst()
    unsealed.seal(frames)
    assert not opener.open(frames, sizes_of(frames)).any()


def test_replayed_ones_are_refused_by_the_window() -> None:
    sealer, opener = ends()
    window = ReplayWindow()
    frames = burst()
    sealer.seal(frames)
    for taken in (True, False):
        copy = frames.copy()
        assert (window.fresh(np.arange(8)) == taken).all()
        assert opener.open(copy, sizes_of(copy)).all()
        assert (window.mark(np.arange(8)) == taken).all()


# -- phases --------------------------------------------------------------------------------------------------


def test_a_change_of_keys_in_mid_burst_and_what_comes_late() -> None:
    sealer, opener = ends()
    opener.keep_old = 3.0
    old, late = burst(4), burst(4, first=4)
    new = burst(4, first=8, phase=1)
    for frames in (old, late, new):
        sealer.seal(frames)
    assert sealer.phase == 1
    mixed = np.concatenate([new[:2], old, new[2:]])
    assert opener.open(mixed, sizes_of(mixed), now=10.0).all()
    assert opener.phase == 1
    assert opener.open(late[:2], sizes_of(late[:2]), now=12.9).all()
    assert not opener.open(late[2:], sizes_of(late[2:]), now=13.0).any()


def test_phases_go_round_and_keys_do_not() -> None:
    sealer, opener = ends()
    for phase in range(600):
        frames = burst(1, first=phase, phase=phase)
        sealer.seal(frames)
        assert opener.open(frames, sizes_of(frames), now=float(phase)).all()
    assert (sealer.phase, opener.phase) == (599, 599)
    again, _ = ends()
    frames = burst(1, first=599, phase=599 & 0xFF)
    with pytest.raises(ValueError, match="a burst of phase 87, where 0 is open"):
        again.seal(frames)


@pytest.mark.parametrize("start", [0, 254, 255])
def test_two_changes_of_keys_in_one_burst(start: int) -> None:
    sealer, opener = ends()
    for phase in range(start + 1):
        frames = burst(1, first=phase, phase=phase)
        sealer.seal(frames)
        assert opener.open(frames, sizes_of(frames), now=float(phase)).all()
    parts = [burst(2, first=1000 + 2 * phase, phase=phase) for phase in range(start, start + 3)]
    for part in parts:
        sealer.seal(part)
    frames = np.concatenate([parts[2], parts[0], parts[1]])
    assert opener.open(frames, sizes_of(frames), now=999.0).all()
    assert opener.phase == start + 2


def test_a_burst_of_two_phases_is_not_sealed() -> None:
    sealer, _ = ends()
    frames = np.concatenate([burst(2), burst(2, first=2, phase=1)])
    with pytest.raises(ValueError, match="a burst of phase 0"):
        sealer.seal(frames)


def test_a_phase_that_is_not_held_is_refused() -> None:
    sealer, opener = ends()
    for phase in range(3):
        frames = burst(1, first=phase, phase=phase)
        sealer.seal(frames)
    assert not opener.open(frames, sizes_of(frames)).any()  # two ahead
    assert opener.phase == 0


def test_a_forged_next_phase_does_not_take_the_old_key_away() -> None:
    sealer, opener = ends()
    forged = burst(2, phase=1)
    genuine = burst(2)
    sealer.seal(genuine)
    mixed = np.concatenate([forged, genuine])
    assert opener.open(mixed, sizes_of(mixed), now=5.0).tolist() == [False, False, True, True]
    assert opener.phase == 0


def test_a_nonce_is_never_used_again() -> None:
    sealer, _ = ends()
    sealer.seal(burst(4, first=10))
    for frames in (
        burst(4, first=10),
        burst(1, first=13),
        burst(2, first=5),
        burst(2, first=14)[::-1].copy(),
    ):
        with pytest.raises(ValueError, match="do not rise"):
            sealer.seal(frames)
    sealer.seal(burst(1, first=14))
    sealer.seal(new_frames(0, 10))


def test_the_last_numbers_are_sealed_too() -> None:
    sealer, opener = ends()
    frames = burst(2, first=2**62 - 2)
    sealer.seal(frames)
    assert opener.open(frames, sizes_of(frames)).all()
