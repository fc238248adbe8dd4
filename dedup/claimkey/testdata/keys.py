#!/usr/bin/env python3
"""Makes keys.tsv: id (hex) and key (hex) by a second implementation of the key encoding.

The file only grows. An edit to a line is mass duplication for whoever has claims
under it.
"""
import hashlib, sys, uuid

CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def key(raw: bytes) -> bytes:
    try:
        text = raw.decode("ascii")
    except UnicodeDecodeError:
        text = ""
    if len(text) == 36 and [text[i] for i in (8, 13, 18, 23)] == ["-"] * 4:
        digits = text.replace("-", "")
        if len(digits) == 32 and all(c in "0123456789abcdefABCDEF" for c in digits):
            return uuid.UUID(text).bytes
    if len(text) == 26 and text[0] in "01234567" and all(c in CROCKFORD for c in text):
        number = 0
        for c in text:
            number = number * 32 + CROCKFORD.index(c)
        return number.to_bytes(16, "big")
    return hashlib.sha256(len(b"id").to_bytes(4, "big") + b"id" + raw).digest()[:16]


ids = [
    b"a", b"b", b"ab", b"\x00", b"\x00\x00", b"\xff", b"\xff\xfe", "é".encode(), "e\u0301".encode(), "\U0001F600".encode(),
    b"x" * (64 << 10), b"0", b"00", b"order-1", b"order-2", b"ORDER-1",
    b"00000000-0000-0000-0000-000000000000", b"ffffffff-ffff-ffff-ffff-ffffffffffff", b"FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF",
    b"0190163d-8694-739b-aea5-966c26f8ad90", b"550e8400-e29b-41d4-a716-446655440000", b"550E8400-E29B-41D4-A716-446655440000",
    b"550e8400e29b41d4a716446655440000", b"{550e8400-e29b-41d4-a716-446655440000}", b"urn:uuid:550e8400-e29b-41d4-a716-446655440000",
    b"550e8400-e29b-41d4-a716-44665544000g", b"550e8400-e29b-41d4-a716-4466554400000", b"550e8400-e29b-41d4-a716-44665544000",
    b"01ARZ3NDEKTSV4RRFFQ69G5FAV", b"01arz3ndektsv4rrffq69g5fav", b"7ZZZZZZZZZZZZZZZZZZZZZZZZZ", b"8ZZZZZZZZZZZZZZZZZZZZZZZZZ",
    b"00000000000000000000000000", b"01ARZ3NDEKTSV4RRFFQ69G5FAI", b"01ARZ3NDEKTSV4RRFFQ69G5FAU", b"01ARZ3NDEKTSV4RRFFQ69G5FA",
    b"3:abc,2:de,", b"2:ab,3:cde,", bytes(range(256)), b" a", b"a ", b"a\n", b"-" * 36,
]
for raw in ids:
    sys.stdout.write(f"{raw.hex()}\t{key(raw).hex()}\n")
