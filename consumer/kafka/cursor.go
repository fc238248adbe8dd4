package kafka

import "encoding/binary"

// cursor takes fields off the front of what a broker sent, which may be anything. Once
// something is missing, it is bad and returns zeros.
type cursor struct {
	b   []byte
	bad bool
}

// take is the next n bytes, in place. Their capacity ends with them: nobody can append
// into what follows.
func (c *cursor) take(n int) []byte {
	if n < 0 || n > len(c.b) {
		c.b, c.bad = nil, true
		return nil
	}
	part := c.b[:n:n]
	c.b = c.b[n:]
	return part
}

func (c *cursor) int16() int16 {
	if p := c.take(2); p != nil {
		return int16(binary.BigEndian.Uint16(p))
	}
	return 0
}

func (c *cursor) int32() int32 {
	if p := c.take(4); p != nil {
		return int32(binary.BigEndian.Uint32(p))
	}
	return 0
}

func (c *cursor) int64() int64 {
	if p := c.take(8); p != nil {
		return int64(binary.BigEndian.Uint64(p))
	}
	return 0
}

// varint is a number of one to ten bytes, with its sign in the lowest bit. Nearly all
// take one byte.
func (c *cursor) varint() int64 {
	if len(c.b) > 0 && c.b[0] < 0x80 {
		v := c.b[0]
		c.b = c.b[1:]
		return int64(v>>1) ^ -int64(v&1)
	}
	return c.longVarint()
}

func (c *cursor) longVarint() int64 {
	v, n := binary.Varint(c.b)
	if n <= 0 {
		c.b, c.bad = nil, true
		return 0
	}
	c.b = c.b[n:]
	return v
}

// uvarint is a number of one to ten bytes without a sign.
func (c *cursor) uvarint() uint64 {
	v, n := binary.Uvarint(c.b)
	if n <= 0 {
		c.b, c.bad = nil, true
		return 0
	}
	c.b = c.b[n:]
	return v
}

// compact is how many items follow in newer versions of requests; 0 if the array or
// the string is null. Each item takes at least a byte.
func (c *cursor) compact() int {
	n := c.uvarint()
	if n > uint64(len(c.b))+1 {
		c.b, c.bad = nil, true
		return 0
	}
	return max(int(n)-1, 0)
}

// length is how many items follow in a list, each of which takes at least least bytes;
// 0 if the list is null.
func (c *cursor) length(least int) int {
	n := int(c.int32())
	if n > len(c.b)/least {
		c.b, c.bad = nil, true
		return 0
	}
	return max(n, 0)
}

// tags passes over fields that a later version may have added.
func (c *cursor) tags() {
	for range c.uvarint() {
		if c.bad {
			return
		}
		c.uvarint()
		c.take(int(min(c.uvarint(), 1<<31-1)))
	}
}

// bytes are preceded by their number; -1 means nil, which isn't empty.
func (c *cursor) bytes() []byte {
	n := c.varint()
	if n == -1 {
		return nil
	}
	return c.take(int(n))
}
