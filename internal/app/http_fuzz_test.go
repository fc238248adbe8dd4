package app

import (
	"bufio"
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// Whatever the request, the server answers it or plainly refuses. It allows only GET
// and HEAD, since it changes nothing; it has no profiles unless configured; and no
// answer shows a panic.
func FuzzHTTP(f *testing.F) {
	for _, s := range []string{
		"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: application/openmetrics-text\r\nAccept-Encoding: gzip, zstd\r\n\r\n",
		"GET /metrics?name[]=x&name[]=%ff HTTP/1.1\r\nHost: a\r\n\r\n", "HEAD /readyz HTTP/1.1\r\nHost: a\r\n\r\n", "GET /livez/ HTTP/1.1\r\nHost: a\r\n\r\n",
		"GET /../debug/pprof/cmdline HTTP/1.1\r\nHost: a\r\n\r\n", "GET //version HTTP/1.1\r\nHost: a\r\n\r\n", "POST /version HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx",
		"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", "CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", "GET http://b/version HTTP/1.1\r\nHost: a\r\n\r\n",
		"DELETE /startupz HTTP/1.1\r\nHost: a\r\n\r\n", "GET /debug/pprof/ HTTP/1.0\r\n\r\n", "GET /%2e%2e/metrics HTTP/1.1\r\nHost: \r\n\r\n",
	} {
		f.Add(s)
	}
	reg := prometheus.NewRegistry()
	registerBuildInfo(reg)
	p := &probes{alive: func() error { return nil }, ready: func(context.Context) error { return nil }}
	p.started.Store(true)
	s, err := listen("127.0.0.1:0", false, reg, p)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(s.close)
	have := map[string]bool{"/metrics": true, "/startupz": true, "/livez": true, "/readyz": true, "/version": true}
	f.Fuzz(func(t *testing.T, raw string) {
		r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(raw)))
		if err != nil {
			return // the library answers that by itself
		}
		answer := httptest.NewRecorder()
		s.http.Handler.ServeHTTP(answer, r)
		reads := r.Method == http.MethodGet || r.Method == http.MethodHead
		switch answer.Code {
		case http.StatusOK:
			if !reads || !have[r.URL.Path] {
				t.Errorf("%s %q is answered: %s", r.Method, r.URL.Path, answer.Body)
			}
		case http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusBadRequest:
		case http.StatusMovedPermanently, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
			// To the same path, cleaned; never to another host.
			if to := answer.Header().Get("Location"); strings.Contains(to, "://") || strings.HasPrefix(to, "//") {
				t.Errorf("%s %q is sent to %s", r.Method, r.URL, to)
			}
		default:
			t.Errorf("%s %q is answered with %d: %s", r.Method, r.URL, answer.Code, answer.Body)
		}
		if reads && have[r.URL.Path] && r.Method != http.MethodConnect && answer.Code != http.StatusOK && answer.Code != http.StatusMethodNotAllowed {
			t.Errorf("%s %q is refused with %d", r.Method, r.URL, answer.Code)
		}
	})
}
