"""Proofs of receipts: verify that an actor's claim comes from a learner of this run.

A receipt carries the incarnation of the learner and a MAC over it, the recipient, the sequence
number and the unrolls accepted up to it. The actor returns them when it joins, and a learner that
resumed after a crash uses them to count the losses. Messages that this learner acknowledged itself
are not lost. The key is in LOGDIR, so that only learners of this run can make proofs.
"""

import hashlib
import hmac
import logging
import pathlib
import secrets
import struct

from impala.logdir import atomic
from impala.logdir.directory import RECEIPT_KEY_BYTES

_log = logging.getLogger(__name__)

_MAC_BYTES = 16
_LEARNER = struct.Struct(">Q")  # precedes the MAC


class ReceiptProofs:
    """Makes and verifies proofs with a key.

    Args:
      key: 32 random bytes.
      learner: this learner's incarnation.
    """

    def __init__(self, key: bytes, learner: int) -> None:
        self._key = key
        self._learner = learner

    def make(self, actor: str, incarnation: int, sequence: int, unrolls: int) -> bytes:
        """Returns the proof that so many unrolls were accepted up to a message of an actor."""
        return self._make(self._learner, actor, incarnation, sequence, unrolls)

    def of_earlier_learner(
        self, proof: bytes, actor: str, incarnation: int, sequence: int, unrolls: int
    ) -> bool:
        """Returns whether another learner with this key made `proof` for exactly these values."""
        if len(proof) != _LEARNER.size + _MAC_BYTES:
            return False
        (learner,) = _LEARNER.unpack_from(proof)
        expected = self._make(learner, actor, incarnation, sequence, unrolls)
        return learner != self._learner and hmac.compare_digest(proof, expected)

    def _make(
        self, learner: int, actor: str, incarnation: int, sequence: int, unrolls: int
    ) -> bytes:
        name = actor.encode()
        numbers = struct.pack(">QQQQ", learner, incarnation, sequence, unrolls)
        stated = b"impala.v1.Receipt" + struct.pack(">Q", len(name)) + name + numbers
        mac = hmac.digest(self._key, stated, hashlib.sha256)[:_MAC_BYTES]
        return _LEARNER.pack(learner) + mac


def load_key(path: pathlib.Path) -> bytes:
    """Returns the key in a file, or a new one, which is saved for later learners.

    Without the previous learner's key its losses cannot be counted, but the run goes on.
    """
    try:
        key = path.read_bytes()
        if len(key) == RECEIPT_KEY_BYTES:
            return key
        found = f"is damaged ({len(key)} bytes instead of {RECEIPT_KEY_BYTES})"
    except FileNotFoundError:
        found = "is new"
    except OSError as error:
        found = f"cannot be read ({error.strerror})"
    _log.log(
        logging.INFO if found == "is new" else logging.WARNING,
        "%s %s: what actors were acknowledged by an earlier learner cannot be proven.",
        path,
        found,
    )
    key = secrets.token_bytes(RECEIPT_KEY_BYTES)
    try:
        atomic.write(path, key, mode=0o600)
    except OSError as error:
        _log.warning("%s cannot be written (%s).", path, error.strerror)
    return key
