package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// probes answer the kubelet, each one question. Startup: are configuration and
// schema fine? Liveness: does this process make progress? It never depends on a
// broker or the database, whose outage must not restart the fleet. Readiness: is
// everything connected?
type probes struct {
	started  atomic.Bool
	draining atomic.Bool
	alive    func() error
	ready    func(ctx context.Context) error
}

func (p *probes) startup(context.Context) error {
	if !p.started.Load() {
		return errors.New("starting")
	}
	return nil
}

func (p *probes) liveness(context.Context) error {
	if !p.started.Load() {
		return nil
	}
	return p.alive()
}

func (p *probes) readiness(ctx context.Context) error {
	if err := p.startup(ctx); err != nil {
		return err
	}
	if p.draining.Load() {
		return errors.New("draining")
	}
	return p.ready(ctx)
}

// server is the operators' HTTP server. It is read-only.
type server struct {
	http     *http.Server
	listener net.Listener
	done     chan struct{}
}

func listen(address string, withPprof bool, reg *prometheus.Registry, p *probes) (*server, error) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("http.listen: %w", err)
	}
	s := &server{http: newHTTP(routes(withPprof, reg, p)), listener: listener, done: make(chan struct{})}
	go func() {
		defer close(s.done)
		_ = s.http.Serve(listener) // ends with close
	}()
	return s, nil
}

func routes(withPprof bool, reg *prometheus.Registry, p *probes) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{EnableOpenMetrics: true, Timeout: 10 * time.Second}))
	for path, check := range map[string]func(context.Context) error{
		"GET /startupz": p.startup, "GET /livez": p.liveness, "GET /readyz": p.readiness,
	} {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			if err := check(r.Context()); err != nil {
				w.WriteHeader(http.StatusServiceUnavailable)
				_, _ = fmt.Fprintln(w, summary(err))
				return
			}
			_, _ = fmt.Fprintln(w, "ok")
		})
	}
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(ReadBuild())
	})
	if withPprof {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	return mux
}

// newHTTP bounds what a client may take: time to ask, time to read the answer, and
// memory. Requests have no body worth waiting for. Profiles and traces take as long
// as the client asks, and extend the write time-out themselves.
func newHTTP(handler http.Handler) *http.Server {
	return &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
	}
}

func (s *server) close() {
	_ = s.http.Close()
	<-s.done
}
