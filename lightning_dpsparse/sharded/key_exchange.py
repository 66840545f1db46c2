"""How all ranks come to know the run's key, without telling whoever listens.

Noise is only noise to those who do not know the key: whoever reads it off the network can subtract
the noise. So rank 0 never sends it in the clear. Every rank makes a key pair for this one exchange
(X25519) and publishes the public half. Rank 0 encrypts the run's key for each rank, under a secret
that the two halves give (HKDF, AES-GCM), and publishes what comes out.

That stops everyone who only listens. Somebody who can also change what the ranks send could step
in between. Operators who must rule that out give all ranks one secret, in a file that
`LIGHTNING_DPSPARSE_SECRET_FILE` names or in `LIGHTNING_DPSPARSE_SECRET`: it enters the derivation,
so that a stranger's half opens nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.process_group import from_rank_zero, on_all_ranks

SECRET, SECRET_FILE = "LIGHTNING_DPSPARSE_SECRET", "LIGHTNING_DPSPARSE_SECRET_FILE"
_SHORTEST = 16
"""Least number of characters of a secret that operators give."""
_NONCE = bytes(12)  # every secret that is agreed on encrypts one message


def agree_on_key(make: Callable[[], RunKey]) -> RunKey:
    """The key that rank 0 makes, on all ranks.

    Guarantees: what is sent tells nothing of the key to those who only listen.
    """
    if dist.get_world_size() == 1:
        return make()
    pair = X25519PrivateKey.generate()
    halves = on_all_ranks(pair.public_key().public_bytes_raw)
    key: RunKey | None = None

    def seal() -> tuple[bool, list[bytes]]:
        nonlocal key
        key = make()
        return key.is_fixed, [_sealed(key.secret, pair, half) for half in halves]

    is_fixed, letters = from_rank_zero(seal)

    def open_letter() -> None:
        nonlocal key
        if key is None:
            secret = _opened(letters[dist.get_rank()], pair, halves[0])
            key = RunKey(secret, is_fixed=is_fixed)

    on_all_ranks(open_letter)
    assert key is not None
    return key


def _sealed(message: bytes, pair: X25519PrivateKey, half: bytes) -> bytes:
    """A message from the owner of a pair that only the owner of a public half can read."""
    sender = pair.public_key().public_bytes_raw()
    return AESGCM(_shared(pair, half, half + sender)).encrypt(_NONCE, message, None)


def _opened(letter: bytes, pair: X25519PrivateKey, sender: bytes) -> bytes:
    mine = pair.public_key().public_bytes_raw()
    try:
        return AESGCM(_shared(pair, sender, mine + sender)).decrypt(_NONCE, letter, None)
    except InvalidTag:
        raise Refused(
            f"Expected the run's key from rank 0, found a message under another secret. Give all "
            f"ranks the same {SECRET} or {SECRET_FILE}, or none of them; if they have, somebody "
            "meddles with the network between the ranks."
        ) from None


def _shared(pair: X25519PrivateKey, other: bytes, halves: bytes) -> bytes:
    """What two ranks can compute, each from its own key pair and the other's public half."""
    agreed = pair.exchange(X25519PublicKey.from_public_bytes(other))
    salt = hashlib.sha256(_operators_secret()).digest()
    return HKDF(SHA256(), 32, salt, b"lightning_dpsparse run key" + halves).derive(agreed)


def _operators_secret() -> bytes:
    """What operators gave all ranks, or nothing."""
    file = os.environ.get(SECRET_FILE)
    try:
        found = os.environ.get(SECRET, "").encode() if file is None else Path(file).read_bytes()
    except OSError as error:
        raise Refused(
            f"Expected a secret in the file {file!r} that {SECRET_FILE} names, found none "
            f"({error.strerror}). Make one with: openssl rand -hex 32"
        ) from None
    found = found.strip()
    if (found and len(found) < _SHORTEST) or (file is not None and not found):
        raise Refused(
            f"Expected a secret of at least {_SHORTEST} characters in {SECRET} or {SECRET_FILE}, "
            f"found {len(found)}. Make one with: openssl rand -hex 32"
        )
    return found
