// Package claimkey turns an id into the key that a claim stores, and a message into the
// fingerprint that reports whether two messages of one id are copies.
//
// Both are stored, so neither encoding may ever change.
package claimkey

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"

	"github.com/cespare/xxhash/v2"
)

// Key is the 16 bytes that stand for an id.
type Key [16]byte

// The namespaces of keys: no id's text hashes to the key of a place. (A producer may still
// send a UUID that equals any key. It could as well send somebody else's id: producers that
// share a scope must trust each other.)
const (
	namespaceID       = "id"
	namespacePosition = "position"
)

// Of returns the key of a producer's id. A UUID (RFC 9562, with hyphens, in any case) and
// a ULID (26 capital letters and digits of Crockford's alphabet) keep their own 16 bytes:
// time-ordered ids then append to the index. Any other id is hashed with SHA-256, cut to
// 16 bytes. Among 10^12 hashed ids the chance of one collision is 1.5e-15. The hash is
// cryptographic because a collision made on purpose would suppress a message.
//
// testdata/keys.tsv freezes the encoding: a change would make every claim unknown, which
// is mass duplication.
func Of(id string) Key {
	if k, ok := parseUUID(id); ok {
		return k
	}
	if k, ok := parseULID(id); ok {
		return k
	}
	return hashKey(namespaceID, id)
}

// OfPlace returns the key of a message that is known by its place alone.
func OfPlace(place string) Key { return hashKey(namespacePosition, place) }

// hashKey hashes namespace and id. The namespace's length goes first, so that no other
// split of the same bytes has the same input.
func hashKey(namespace, id string) Key {
	var stack [256]byte
	buf := binary.BigEndian.AppendUint32(stack[:0], uint32(len(namespace)))
	buf = append(buf, namespace...)
	buf = append(buf, id...)
	sum := sha256.Sum256(buf)
	return Key(sum[:16])
}

// String writes a key as Postgres writes a uuid.
func (k Key) String() string {
	text := hex.EncodeToString(k[:])
	return text[:8] + "-" + text[8:12] + "-" + text[12:16] + "-" + text[16:20] + "-" + text[20:]
}

func parseUUID(s string) (k Key, ok bool) {
	if len(s) != 36 || s[8] != '-' || s[13] != '-' || s[18] != '-' || s[23] != '-' {
		return k, false
	}
	var digits [32]byte
	copy(digits[:8], s[:8])
	copy(digits[8:12], s[9:13])
	copy(digits[12:16], s[14:18])
	copy(digits[16:20], s[19:23])
	copy(digits[20:], s[24:])
	_, err := hex.Decode(k[:], digits[:])
	return k, err == nil
}

// parseULID takes the canonical form only. In lower case the same letters may belong to
// another alphabet, where ids that differ in case are different ids.
func parseULID(s string) (k Key, ok bool) {
	if len(s) != 26 || s[0] > '7' {
		return k, false
	}
	// 26 letters of 5 bits hold 130; the first letter's two upper bits are 0.
	var hi, lo uint64
	for i := range 26 {
		v := crockford[s[i]]
		if v == 0xFF {
			return k, false
		}
		hi = hi<<5 | lo>>59
		lo = lo<<5 | uint64(v)
	}
	binary.BigEndian.PutUint64(k[:8], hi)
	binary.BigEndian.PutUint64(k[8:], lo)
	return k, true
}

var crockford = func() (t [256]byte) {
	for i := range t {
		t[i] = 0xFF
	}
	for i := range byte(32) {
		t["0123456789ABCDEFGHJKMNPQRSTVWXYZ"[i]] = i
	}
	return t
}()

// MarshalText writes what String does.
func (k Key) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// Compare orders keys as Postgres orders uuids: by their bytes.
func (k *Key) Compare(o *Key) int {
	kh, oh := binary.BigEndian.Uint64(k[:8]), binary.BigEndian.Uint64(o[:8])
	if kh == oh {
		kh, oh = binary.BigEndian.Uint64(k[8:]), binary.BigEndian.Uint64(o[8:])
	}
	switch {
	case kh < oh:
		return -1
	case kh > oh:
		return 1
	}
	return 0
}

// Hash is what filters know a key by. Filters are stored, so it must never change.
func (k *Key) Hash() uint64 { return xxhash.Sum64(k[:]) }
