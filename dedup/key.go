package dedup

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"math"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/dedupd/dedupd/message"
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
func KeyOf(id string) Key {
	if k, ok := parseUUID(id); ok {
		return k
	}
	if k, ok := parseULID(id); ok {
		return k
	}
	return hashKey(namespaceID, id)
}

// positionKey gives the key of a message that is known by its place alone.
func positionKey(place string) Key { return hashKey(namespacePosition, place) }

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

// Fingerprint says what must be equal for two messages of one id to be copies of
// one another.
//
// A fingerprint begins with 12 bits that tell by which configuration it was made, so
// that claims of before a change of dedup.fingerprint, or of a worker that has yet to
// be restarted, aren't compared: each copy of theirs would be a conflict. The other
// 52 bits are the content's.
type Fingerprint struct {
	value  bool
	paths  []message.Field
	recipe uint64 // the upper 12 bits
}

// recipeBits are those of a fingerprint that tell how it was made.
const recipeBits = 0xFFF << 52

// recipeOf gives the upper bits for places.
func recipeOf(places []string) uint64 {
	h := xxhash.New()
	var length [8]byte
	for _, place := range places {
		binary.BigEndian.PutUint64(length[:], uint64(len(place)))
		_, _ = h.Write(length[:])
		_, _ = h.WriteString(place)
	}
	return h.Sum64() & recipeBits
}

// differ tells that two fingerprints were made in the same way, of contents that
// differ.
func differ(a, b int64) bool { return a != b && (uint64(a)^uint64(b))&recipeBits == 0 }

// NewFingerprint reads the places of dedup.fingerprint: "value", "none", or JSON
// paths. The zero Fingerprint is "none".
func NewFingerprint(places []string) (Fingerprint, error) {
	f := Fingerprint{recipe: recipeOf(places)}
	for _, s := range places {
		switch s {
		case "none":
			if len(places) == 1 {
				return Fingerprint{}, nil
			}
		case "value":
			if len(places) == 1 {
				f.value = true
				return f, nil
			}
		default:
			field, err := message.ParseField(s)
			if err == nil && field.Kind == message.FieldJSON {
				f.paths = append(f.paths, field)
				continue
			}
		}
		return Fingerprint{}, &fingerprintError{s}
	}
	return f, nil
}

type fingerprintError struct{ place string }

func (e *fingerprintError) Error() string {
	return "dedup.fingerprint: \"" + e.place + "\" can't stand here; use value, none, or one or several json:PATH"
}

// none tells that payloads are not compared.
func (f Fingerprint) none() bool { return !f.value && len(f.paths) == 0 }

// of is xxHash64 of what must be equal. It need not resist an attacker: whoever
// may send under an id may as well send the first payload.
func (f Fingerprint) of(m *message.Message) int64 {
	return int64(f.content(m)&^recipeBits | f.recipe)
}

func (f Fingerprint) content(m *message.Message) uint64 {
	if f.value || message.ValidJSON(m.Value) != nil { // that has no places
		return valueFingerprint(m.Value)
	}
	var h xxhash.Digest
	h.Reset()
	var length [8]byte
	for _, path := range f.paths {
		raw := path.JSON(m.Value).Raw
		binary.BigEndian.PutUint64(length[:], uint64(len(raw)))
		_, _ = h.Write(length[:]) // a hash takes everything
		_, _ = h.WriteString(raw)
	}
	return h.Sum64()
}

// valueFingerprint keeps a tombstone apart from an empty value.
func valueFingerprint(v []byte) uint64 {
	if v == nil {
		return math.MaxUint64
	}
	return xxhash.Sum64(v)
}
