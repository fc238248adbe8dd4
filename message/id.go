package message

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/tidwall/gjson"
)

// ErrNoID says that a message carries no id where one should be. The wrapping error
// names the place.
var ErrNoID = errors.New("no id")

// Identity says where the id of a message is found. It is immutable and may be
// used by many goroutines.
type Identity struct {
	fields   []Field
	maxBytes int
}

// NewIdentity takes the places whose joined values are the id, and the most bytes an id
// may have.
func NewIdentity(from []string, maxBytes int) (*Identity, error) {
	if len(from) == 0 {
		return nil, errors.New("id.from names no place")
	}
	x := &Identity{maxBytes: maxBytes}
	for _, s := range from {
		f, err := ParseField(s)
		if err != nil {
			return nil, err
		}
		switch f.Kind {
		case FieldKey, FieldHeader, FieldJSON, FieldCloudEvent, FieldNATSMsgID, FieldPosition:
			x.fields = append(x.fields, f)
		default:
			return nil, fmt.Errorf("%q can't be an id; use header:NAME, key, json:PATH, cloudevent, nats-msg-id or position", s)
		}
	}
	return x, nil
}

// ID finds the id of a message. It is total and deterministic: the same bytes
// give the same id or the same error. The error is ErrNoID (wrapped) unless there is
// something in the place that can't be an id: it is too long, or no scalar.
//
// Several places are joined as netstrings ("3:abc,2:de,", D. J. Bernstein,
// 1997), so that "ab"+"c" differs from "a"+"bc" for any bytes. An empty value
// is no id. streamID is that of the message's batch; only "position" reads it.
func (x *Identity) ID(m *Message, streamID string) (string, error) {
	if len(x.fields) == 1 {
		return x.part(x.fields[0], m, streamID)
	}
	var b strings.Builder
	for _, f := range x.fields {
		part, err := x.part(f, m, streamID)
		if err != nil {
			return "", err
		}
		writeNetstring(&b, part)
	}
	if b.Len() > x.maxBytes {
		return "", x.tooLong("the joined places", b.Len())
	}
	return b.String(), nil
}

// PositionID is the id of a message that is known only by its place. The stream id keeps
// a topic that was created anew apart from the old one.
func PositionID(streamID string, p Position) string {
	var b strings.Builder
	writeNetstring(&b, streamID)
	writeNetstring(&b, p.Lane.Source)
	writeNetstring(&b, p.Lane.Name)
	writeNetstring(&b, strconv.FormatInt(p.Offset, 10))
	return b.String()
}

func writeNetstring(b *strings.Builder, s string) {
	b.WriteString(strconv.Itoa(len(s)))
	b.WriteByte(':')
	b.WriteString(s)
	b.WriteByte(',')
}

func (x *Identity) part(f Field, m *Message, streamID string) (string, error) {
	var raw []byte
	switch f.Kind {
	case FieldKey:
		raw = m.Key
	case FieldHeader:
		raw, _ = m.Header(f.Name)
	case FieldNATSMsgID:
		raw, _ = m.Header("Nats-Msg-Id")
	case FieldJSON:
		if err := ValidJSON(m.Value); err != nil {
			return "", fmt.Errorf("%w: %s leads nowhere in the value: %w", ErrNoID, f, err)
		}
		if id, err := x.jsonID(f, m.Value); id != "" || err != nil {
			return id, err
		}
	case FieldCloudEvent:
		return x.cloudEvent(m)
	case FieldPosition:
		return PositionID(streamID, m.Position), nil
	}
	switch {
	case len(raw) == 0:
		return "", fmt.Errorf("%w: %s is empty or missing", ErrNoID, f)
	case len(raw) > x.maxBytes:
		return "", x.tooLong(f.String(), len(raw))
	}
	return string(raw), nil
}

func (x *Identity) jsonID(f Field, doc []byte) (string, error) {
	r := f.JSON(doc)
	switch r.Type {
	case gjson.Null:
		return "", nil // missing, or null
	case gjson.JSON:
		return "", unusable(f.String(), "an object or an array is no id")
	}
	if len(r.Raw) > x.maxBytes {
		return "", x.tooLong(f.String(), len(r.Raw))
	}
	id, err := JSONText(r)
	if err != nil {
		return "", unusable(f.String(), err.Error())
	}
	return id, nil
}

func unusable(place, reason string) error {
	return errors.New("unusable id in " + place + ": " + reason)
}

func (x *Identity) tooLong(place string, n int) error {
	return unusable(place, fmt.Sprintf("%d bytes are more than id.max_bytes allows (%d)", n, x.maxBytes))
}

var (
	ceID     = Field{Kind: FieldJSON, Name: "id", path: "id"}
	ceSource = Field{Kind: FieldJSON, Name: "source", path: "source"}
)

// cloudEvent is the identity of CloudEvents 1.0: source + id are unique for each
// distinct event. Binary mode carries them as headers (ce_ with Kafka, ce- with
// NATS), structured mode in the JSON value.
func (x *Identity) cloudEvent(m *Message) (string, error) {
	var source, id string
	if v, ok := m.Header("ce_id"); ok {
		s, _ := m.Header("ce_source")
		source, id = string(s), string(v)
	} else if v, ok := m.Header("ce-id"); ok {
		s, _ := m.Header("ce-source")
		source, id = string(s), string(v)
	} else if looksLikeObject(m.Value) && ValidJSON(m.Value) == nil {
		var err error
		if id, err = x.jsonID(ceID, m.Value); err != nil {
			return "", err
		}
		if source, err = x.jsonID(ceSource, m.Value); err != nil {
			return "", err
		}
	}
	if source == "" || id == "" {
		return "", fmt.Errorf("%w: neither the headers nor the value carry a CloudEvents source and id", ErrNoID)
	}
	var b strings.Builder
	writeNetstring(&b, source)
	writeNetstring(&b, id)
	if b.Len() > x.maxBytes {
		return "", x.tooLong("cloudevent", b.Len())
	}
	return b.String(), nil
}

func looksLikeObject(v []byte) bool {
	v = bytes.TrimLeft(v, " \t\r\n")
	return len(v) > 0 && v[0] == '{'
}
