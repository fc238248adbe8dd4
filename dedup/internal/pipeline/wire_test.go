package pipeline

import (
	"bytes"
	"testing"

	"github.com/jackc/pgx/v5/pgtype"
)

func TestArraysOnTheWire(t *testing.T) {
	t.Parallel()
	if got := Array(pgtype.ByteaOID, [][]byte{{1}, nil, {}}); !bytes.Equal(got, []byte{
		0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 17, 0, 0, 0, 3, 0, 0, 0, 1,
		0, 0, 0, 1, 1, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0,
	}) {
		t.Errorf("bytea[]: % x", got)
	}
	if got := Array(pgtype.ByteaOID, nil); !bytes.Equal(got, []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 17}) {
		t.Errorf("empty array: % x", got)
	}
}
