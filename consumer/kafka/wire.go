package kafka

import (
	"encoding/binary"

	"github.com/segmentio/kafka-go/protocol"
)

// outgoing is the body of a request. In a tagged version, a length is written plus one
// and in as few bytes as it needs, and each structure ends with the number of its
// tagged fields, of which we send none.
type outgoing struct {
	b      []byte
	tagged bool
}

func (o *outgoing) int8(v int8)   { o.b = append(o.b, byte(v)) }
func (o *outgoing) int32(v int32) { o.b = binary.BigEndian.AppendUint32(o.b, uint32(v)) }
func (o *outgoing) int64(v int64) { o.b = binary.BigEndian.AppendUint64(o.b, uint64(v)) }

// count writes how many items of an array follow.
func (o *outgoing) count(n int) {
	if o.tagged {
		o.b = binary.AppendUvarint(o.b, uint64(n)+1)
	} else {
		o.int32(int32(n))
	}
}

func (o *outgoing) text(s string) {
	if o.tagged {
		o.b = binary.AppendUvarint(o.b, uint64(len(s))+1)
	} else {
		o.b = binary.BigEndian.AppendUint16(o.b, uint16(len(s)))
	}
	o.b = append(o.b, s...)
}

// end ends a structure.
func (o *outgoing) end() {
	if o.tagged {
		o.b = append(o.b, 0)
	}
}

// framed is the whole request, with its size and header.
func (o outgoing) framed(key protocol.ApiKey, version int16, id int32, clientID string) []byte {
	b := make([]byte, 4, 4+8+2+len(clientID)+1+len(o.b)) // the size, once it is known
	b = binary.BigEndian.AppendUint16(b, uint16(key))
	b = binary.BigEndian.AppendUint16(b, uint16(version))
	b = binary.BigEndian.AppendUint32(b, uint32(id))
	b = binary.BigEndian.AppendUint16(b, uint16(len(clientID)))
	b = append(b, clientID...)
	if o.tagged {
		b = append(b, 0)
	}
	b = append(b, o.b...)
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	return b
}

// incoming takes fields off the body of an answer, written as outgoing writes them.
type incoming struct {
	cursor
	tagged bool
}

// count is how many items of an array follow. Each takes at least a byte.
func (in *incoming) count() int {
	if in.tagged {
		return in.compact()
	}
	n := int(in.int32()) // -1: none
	if n > len(in.b) {
		in.b, in.bad = nil, true
		return 0
	}
	return max(n, 0)
}

func (in *incoming) text() string {
	if in.tagged {
		return string(in.take(in.compact()))
	}
	return string(in.take(int(in.int16())))
}

// bytes are those of a field that may be null.
func (in *incoming) bytes() []byte {
	var n int
	if in.tagged {
		n = in.compact()
	} else {
		n = max(int(in.int32()), 0)
	}
	if n == 0 {
		return nil
	}
	return in.take(n)
}

// end passes over the end of a structure.
func (in *incoming) end() {
	if in.tagged {
		in.tags()
	}
}

// fields reads the tagged fields that end a structure.
func (in *incoming) fields(read func(tag uint64, field incoming)) {
	if !in.tagged {
		return
	}
	for range in.uvarint() {
		tag := in.uvarint()
		field := in.take(int(min(in.uvarint(), 1<<31-1)))
		if in.bad {
			return
		}
		read(tag, incoming{cursor: cursor{b: field}, tagged: true})
	}
}
