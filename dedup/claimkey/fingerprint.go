package claimkey

import (
	"encoding/binary"
	"errors"
	"math"

	"github.com/cespare/xxhash/v2"

	"github.com/dedupd/dedupd/message"
)

// Fingerprint says what must be equal for two messages of one id to be copies.
//
// The upper 12 bits of a fingerprint, its recipe, tell which configuration it was made by;
// the other 52 are the content's. Fingerprints of different recipes aren't compared: after
// a change of dedup.fingerprint, and while some workers still have the old one, every copy
// would be a conflict.
type Fingerprint struct {
	value  bool
	paths  []message.Field
	recipe uint64 // the upper 12 bits
}

const recipeBits = 0xFFF << 52

func recipeOf(places []string) uint64 {
	h := xxhash.New()
	for _, place := range places {
		writePart(h, place)
	}
	return h.Sum64() & recipeBits
}

// writePart hashes a text with its length, so that no other parts have the same input.
func writePart(h *xxhash.Digest, text string) {
	var length [8]byte
	binary.BigEndian.PutUint64(length[:], uint64(len(text)))
	_, _ = h.Write(length[:]) // a hash takes everything
	_, _ = h.WriteString(text)
}

// Differ reports whether two fingerprints show that contents differ. Those made by different
// recipes show nothing.
func Differ(a, b int64) bool { return a != b && (uint64(a)^uint64(b))&recipeBits == 0 }

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
		return Fingerprint{}, errors.New("dedup.fingerprint: \"" + s + "\" isn't allowed here; use value, none, or one or several json:PATH")
	}
	return f, nil
}

// None reports whether payloads aren't compared.
func (f Fingerprint) None() bool { return !f.value && len(f.paths) == 0 }

// Of returns a message's fingerprint, by xxHash64. It need not resist an attacker: whoever
// may send under an id may as well send the first payload.
func (f Fingerprint) Of(m *message.Message) int64 {
	return int64(f.content(m)&^recipeBits | f.recipe)
}

func (f Fingerprint) content(m *message.Message) uint64 {
	if f.value || message.ValidJSON(m.Value) != nil { // what isn't JSON has no places
		return valueFingerprint(m.Value)
	}
	var h xxhash.Digest
	h.Reset()
	for _, path := range f.paths {
		writePart(&h, path.JSON(m.Value).Raw)
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
