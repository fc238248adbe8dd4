package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

func TestProbesTellOneThingEach(t *testing.T) {
	t.Parallel()
	var dead, away error
	p := &probes{alive: func() error { return dead }, ready: func(context.Context) error { return away }}
	reg := prometheus.NewRegistry()
	registerBuildInfo(reg)
	s, err := listen("127.0.0.1:0", false, reg, p)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	want := func(when string, codes map[string]int) {
		t.Helper()
		for path, code := range codes {
			r, err := http.Get(fmt.Sprint("http://", s.listener.Addr(), path))
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(r.Body)
			_ = r.Body.Close()
			if r.StatusCode != code {
				t.Errorf("%s: %s answers %d (%s), want %d", when, path, r.StatusCode, strings.TrimSpace(string(body)), code)
			}
		}
	}
	want("starting", map[string]int{"/startupz": 503, "/livez": 200, "/readyz": 503, "/metrics": 200, "/version": 200, "/debug/pprof/": 404, "/": 404})
	p.started.Store(true)
	want("running", map[string]int{"/startupz": 200, "/livez": 200, "/readyz": 200})
	away = errors.New("the database does not answer")
	want("the database is away", map[string]int{"/startupz": 200, "/livez": 200, "/readyz": 503})
	away, dead = nil, errors.New("the sink hangs")
	want("a sink hangs", map[string]int{"/livez": 503})
	dead = nil
	p.draining.Store(true)
	want("draining", map[string]int{"/startupz": 200, "/livez": 200, "/readyz": 503})
	r, err := http.Post(fmt.Sprint("http://", s.listener.Addr(), "/metrics"), "text/plain", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	_ = r.Body.Close()
	if r.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("a POST answers %d: the server is for reading", r.StatusCode)
	}
}
