package pgtest

import (
	"testing"
	"time"
)

func TestMain(m *testing.M) { Main(m) }

func TestNew(t *testing.T) {
	t0 := time.Now()
	db := New(t)
	t.Log(time.Since(t0), db.URL)
	t0 = time.Now()
	db2 := New(t)
	t.Log(time.Since(t0), db2.URL)
	p := db2.Pool(t)
	t0 = time.Now()
	var s string
	if err := p.QueryRow(t.Context(), "select version()").Scan(&s); err != nil {
		t.Fatal(err)
	}
	t.Log(time.Since(t0), s)
}
