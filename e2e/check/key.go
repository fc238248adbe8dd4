package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
)

// key is the 16 bytes that a claim stores for an id. This is the encoding of
// docs/decisions/0003-key-encoding.md, written a second time: a worker that gets
// it wrong must not be judged by its own mistake.
type key [16]byte

func keyOf(id []byte) key {
	if k, ok := uuidKey(id); ok {
		return k
	}
	if k, ok := ulidKey(id); ok {
		return k
	}
	return hashedKey("id", id)
}

// placeKey is the key of a message that has no id.
func placeKey(streamID, source, lane string, position int64) key {
	var b []byte
	for _, part := range []string{streamID, source, lane, fmt.Sprint(position)} {
		b = fmt.Appendf(b, "%d:%s,", len(part), part)
	}
	return hashedKey("position", b)
}

func hashedKey(namespace string, id []byte) key {
	h := sha256.New()
	_ = binary.Write(h, binary.BigEndian, uint32(len(namespace))) // a hash takes everything
	h.Write([]byte(namespace))
	h.Write(id)
	return key(h.Sum(nil)[:16])
}

func uuidKey(id []byte) (k key, ok bool) {
	groups := bytes.Split(id, []byte("-"))
	if len(id) != 36 || len(groups) != 5 {
		return k, false
	}
	for i, n := range []int{8, 4, 4, 4, 12} {
		if len(groups[i]) != n {
			return k, false
		}
	}
	_, err := hex.Decode(k[:], bytes.Join(groups, nil))
	return k, err == nil
}

// ulidKey reads 26 digits of 5 bits each, of which the first two bits are none.
func ulidKey(id []byte) (k key, ok bool) {
	if len(id) != 26 || id[0] > '7' {
		return k, false
	}
	for i, c := range id {
		digit := strings.IndexByte("0123456789ABCDEFGHJKMNPQRSTVWXYZ", c)
		if digit < 0 {
			return k, false
		}
		for b := range 5 {
			if bit := 5*i + b - 2; bit >= 0 && digit&(16>>b) != 0 {
				k[bit/8] |= 128 >> (bit % 8)
			}
		}
	}
	return k, true
}

// checksum stands for bytes, within this process only.
type checksum uint64

var seed = maphash.MakeSeed()

// textSum is the checksum of a sum that is written out, such as "9f86d0…".
func textSum(text []byte) checksum {
	if len(text) == 0 {
		return 0
	}
	return checksum(maphash.Bytes(seed, text))
}

// valueSum is the one of a value's SHA-256 in hexadecimal digits.
func valueSum(value []byte) checksum {
	sum := sha256.Sum256(value)
	var digits [2 * sha256.Size]byte
	hex.Encode(digits[:], sum[:])
	return textSum(digits[:])
}

type header struct{ key, value []byte }

// rawSum is the checksum of a whole message. NATS keeps no order among headers of
// different names, so none counts.
func rawSum(topic, key, value []byte, headers []header) checksum {
	slices.SortStableFunc(headers, func(a, b header) int { return bytes.Compare(a.key, b.key) })
	var h maphash.Hash
	h.SetSeed(seed)
	write := func(b []byte) {
		length := int64(len(b))
		if b == nil {
			length = -1 // nothing isn't the same as nothing in it
		}
		var prefix [8]byte
		binary.BigEndian.PutUint64(prefix[:], uint64(length))
		_, _ = h.Write(prefix[:]) // a hash takes everything
		_, _ = h.Write(b)
	}
	write(topic)
	write(key)
	write(value)
	for _, header := range headers {
		write(header.key)
		write(header.value)
	}
	return checksum(h.Sum64())
}
