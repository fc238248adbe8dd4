package app

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
)

func TestRemoteDatabasesMustShowWhoTheyAre(t *testing.T) {
	t.Setenv("PGSSLMODE", "")
	for _, c := range []struct {
		address        string
		verified, warn bool
	}{
		{"postgres://localhost/app", false, false},
		{"postgres://127.0.0.1,[::1]/app", false, false},
		{"host=/run/postgresql dbname=app", false, false},
		{"postgres://db.example/app", true, false},
		{"postgres://db.example/app?application_name=x", true, false},
		{"postgres://localhost,db.example/app", true, false},
		{"host=db.example dbname=app", true, false},
		{"postgres://db.example/app?sslmode=verify-full", true, false},
		{"postgres://db.example/app?sslmode=require", false, true},
		{"postgres://db.example/app?sslmode=disable", false, true},
	} {
		var log bytes.Buffer
		pc, err := parseAddress(c.address, slog.New(slog.NewTextHandler(&log, nil)))
		if err != nil {
			t.Fatalf("%s: %v", c.address, err)
		}
		t1 := pc.ConnConfig.TLSConfig
		if verified := t1 != nil && !t1.InsecureSkipVerify && t1.ServerName != ""; verified != c.verified {
			t.Errorf("%s: verified %v, want %v", c.address, verified, c.verified)
		}
		if warned := strings.Contains(log.String(), "verify-full"); warned != c.warn {
			t.Errorf("%s: warned %v, want %v", c.address, warned, c.warn)
		}
	}
}
