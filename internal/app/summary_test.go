package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// The answer about readiness must not show what a message contained.
func TestReadinessQuotesNoMessage(t *testing.T) {
	t.Parallel()
	const secret = "twelve@example.com"
	pg := &pgconn.PgError{
		Severity: "ERROR", Code: "22P02", Message: `invalid input syntax for type numeric: "` + secret + `"`,
		Detail: "Failing row contains (1, " + secret + ").", Hint: secret, Where: "unnamed portal parameter $1 = '" + secret + "'", InternalQuery: secret,
		SchemaName: "public", TableName: "orders", ColumnName: "amount", ConstraintName: "orders_amount_check",
	}
	l := message.Lane{Source: "shop", Name: "orders/3"}
	held := func(err error) error { return &consumer.HeldError{Lane: l, Err: err} }
	for name, c := range map[string]struct {
		err  error
		want []string
	}{
		"the database's error":       {held(&lane.HoldError{Err: fmt.Errorf("write: %w", pg)}), []string{"lane shop:orders/3", "22P02", "table orders", "column amount", "constraint orders_amount_check", "log"}},
		"one that a sink has judged": {held(&lane.HoldError{Err: sinks.PermanentAt(0, pg)}), []string{"lane shop:orders/3", "22P02"}},
		"a sink's own error":         {held(&lane.HoldError{Lane: l, Err: errors.New("no room for " + secret)}), []string{"lane shop:orders/3", "can't be written", "log"}},
		"a policy":                   {held(&lane.HoldError{Lane: l, Err: fmt.Errorf("id %q again", secret), Summary: "position 7: its id was claimed before"}), []string{"lane shop:orders/3", "position 7: its id was claimed before"}},
		"not a hold at all":          {held(errors.New(secret)), []string{"lane shop:orders/3"}},
		"several at once":            {errors.Join(held(&lane.HoldError{Err: pg}), errors.New("the database does not answer")), []string{"lane shop:orders/3", "22P02", "the database does not answer"}},
		"joined and wrapped":         {fmt.Errorf("ready: %w", errors.Join(held(pg))), []string{"lane shop:orders/3", "22P02"}},
		"more lanes are held":        {&consumer.HeldError{Lane: l, Err: &lane.HoldError{Err: pg}, More: 2}, []string{"lane shop:orders/3", "22P02", "; 2 more lanes are held"}},
		"more lanes fail":            {&consumer.FailingError{Lane: l, For: 20 * time.Second, Err: pg, More: 1}, []string{"lane shop:orders/3", "22P02", "; 1 more lane is failing"}},
		"one that fails all along":   {&consumer.FailingError{Lane: l, For: 20 * time.Second, Err: fmt.Errorf("write: %w", pg)}, []string{"lane shop:orders/3", "have failed for 20s", "22P02", "log"}},
		"a source's":                 {errors.New("source shop is not connected"), []string{"source shop is not connected"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := &probes{alive: func() error { return nil }, ready: func(context.Context) error { return c.err }}
			p.started.Store(true)
			s, err := listen("127.0.0.1:0", false, prometheus.NewRegistry(), p)
			if err != nil {
				t.Fatal(err)
			}
			defer s.close()
			r, err := http.Get(fmt.Sprint("http://", s.listener.Addr(), "/readyz"))
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(r.Body)
			_ = r.Body.Close()
			if r.StatusCode != http.StatusServiceUnavailable || strings.Contains(string(body), secret) || strings.Contains(string(body), "twelve") {
				t.Errorf("%d: %s", r.StatusCode, body)
			}
			for _, text := range c.want {
				if !strings.Contains(string(body), text) {
					t.Errorf("%q doesn't say %q", body, text)
				}
			}
		})
	}
}

// endless reads a request to its end, answers with 1 GiB, and sends how that ended.
func endless(wrote chan<- error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			wrote <- err
			return
		}
		block := make([]byte, 1<<20)
		for range 1 << 10 {
			if _, err := w.Write(block); err != nil {
				wrote <- err
				return
			}
		}
		wrote <- nil
	})
}

// The server cuts off a client that asks slowly, sends an endless body, doesn't read
// its answer or sends too many headers.
func TestHTTPBoundsItsClients(t *testing.T) {
	t.Parallel()
	h := newHTTP(nil)
	for name, d := range map[string]time.Duration{"header": h.ReadHeaderTimeout, "read": h.ReadTimeout, "write": h.WriteTimeout, "idle": h.IdleTimeout} {
		if d <= 0 || d > time.Minute {
			t.Errorf("the %s time-out is %s", name, d)
		}
	}
	wrote := make(chan error, 1)
	h.Handler = endless(wrote)
	h.ReadHeaderTimeout, h.ReadTimeout, h.WriteTimeout = 100*time.Millisecond, 200*time.Millisecond, 300*time.Millisecond
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = h.Serve(listener) }()
	defer h.Close()
	for name, c := range map[string]struct {
		ask    string
		served bool // it comes as far as the handler
		answer string
	}{
		"headers that don't end":    {"GET / HTTP/1.1\r\nHost: x\r\n", false, ""},
		"too many headers":          {"GET / HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 64<<10) + "\r\n\r\n", false, "431"},
		"a body that doesn't end":   {"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nx", true, ""},
		"an answer that isn't read": {"GET / HTTP/1.1\r\nHost: x\r\n\r\n", true, "200"},
	} {
		conn, err := net.Dial("tcp", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, c.ask); err != nil {
			t.Fatal(err)
		}
		if c.served {
			if err := <-wrote; err == nil {
				t.Errorf("%s: the handler came to its end", name)
			}
		}
		_ = conn.SetReadDeadline(time.Now().Add(20 * time.Second))
		answer, err := io.ReadAll(conn) // ends when the server hangs up
		var timeout net.Error
		if errors.As(err, &timeout) && timeout.Timeout() {
			t.Errorf("%s: the server holds the connection", name)
		}
		if line, _, _ := strings.Cut(string(answer), "\r\n"); c.answer != "" && !strings.Contains(line, c.answer) {
			t.Errorf("%s: the answer is %q, want %s", name, line, c.answer)
		}
		_ = conn.Close()
	}
}

func TestProfilesMayTakeLongerThanOtherAnswers(t *testing.T) {
	t.Parallel()
	h := newHTTP(routes(true, prometheus.NewRegistry(), &probes{}))
	h.WriteTimeout = 500 * time.Millisecond
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = h.Serve(listener) }()
	defer h.Close()
	for _, path := range []string{"/debug/pprof/profile?seconds=2", "/debug/pprof/trace?seconds=2"} {
		r, err := http.Get(fmt.Sprint("http://", listener.Addr(), path))
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		body, err := io.ReadAll(r.Body)
		_ = r.Body.Close()
		if err != nil || r.StatusCode != http.StatusOK || len(body) == 0 {
			t.Errorf("%s: %d, %d bytes, %v", path, r.StatusCode, len(body), err)
		}
	}
}
