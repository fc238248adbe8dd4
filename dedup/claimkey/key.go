package claimkey

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"strings"

	"github.com/cespare/xxhash/v2"
)

// Key is what a claim is stored under: 16 bytes that stand for an id.
type Key [16]byte

// The namespaces of keys: no text is hashed to the key of a place. (A producer
// that wants to can still send a UUID that equals any key. It could as well send
// another's id: those who share a scope must trust each other.)
const (
	namespaceID       = "id"
	namespacePosition = "position"
)

// KeyOf gives the key of a producer's id. An id that is written as a UUID (RFC
// 9562, with hyphens, in any case) or as a ULID (26 capital letters and digits
// of Crockford's alphabet) keeps its own 16 bytes, so that time-ordered ids keep
// the index appending; any other id is hashed with SHA-256, cut to 16 bytes.
// Among 10^12 hashed ids the chance of one collision is 1.5e-15. The hash is
// cryptographic since whoever can make a collision can suppress a message.
//
// The encoding is frozen by testdata/keys.tsv: a change would make every claim
// unknown, which is mass duplication.
func Of(id string) Key {
	if k, ok := parseUUID(id); ok {
		return k
	}
	if k, ok := parseULID(id); ok {
		return k
	}
	return hashKey(namespaceID, id)
}

// positionKey gives the key of a message that is known by its place alone.
func OfPlace(place string) Key { return hashKey(namespacePosition, place) }

// hashKey hashes namespace and id, the first with its length in front, so that
// no other split of the same bytes gives the same input.
func hashKey(namespace, id string) Key {
	var stack [256]byte
	buf := binary.BigEndian.AppendUint32(stack[:0], uint32(len(namespace)))
	buf = append(buf, namespace...)
	buf = append(buf, id...)
	sum := sha256.Sum256(buf)
	return Key(sum[:16])
}

func (k Key) String() string {
	const digits = "0123456789abcdef"
	var b strings.Builder
	b.Grow(36)
	for i, c := range k {
		if i == 4 || i == 6 || i == 8 || i == 10 {
			b.WriteByte('-')
		}
		b.WriteByte(digits[c>>4])
		b.WriteByte(digits[c&15])
	}
	return b.String()
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

// parseULID takes the canonical form only. In lower case the same letters may be
// another alphabet's, where ids that differ in case are different ids.
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

// MarshalText writes a key as Postgres writes a uuid.
func (k Key) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// compare orders keys as Postgres orders uuids: by their bytes.
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

// hash is what filters know a key by. Filters are stored: it must never change.
func (k *Key) Hash() uint64 { return xxhash.Sum64(k[:]) }
