package claim

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const createPayments = `CREATE TABLE public.payments (number bigint GENERATED ALWAYS AS IDENTITY, key text NOT NULL, cents bigint NOT NULL CHECK (cents <> 13))`

func open(t *testing.T) *Service {
	pool := pgtest.New(t).Pool(t)
	if _, err := pool.Exec(t.Context(), createPayments); err != nil {
		t.Fatal(err)
	}
	s, err := Open(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestPay(t *testing.T) {
	s := open(t)
	// A payment that fails leaves no claim behind.
	var pg *pgconn.PgError
	if receipt, err := s.Pay(t.Context(), "p-1", 13); receipt != nil || !errors.As(err, &pg) || pg.Code != "23514" {
		t.Fatalf("a payment that the table refuses gives %s, %v", receipt, err)
	}
	receipts := make([]string, 8)
	var all sync.WaitGroup
	for i := range receipts {
		all.Go(func() {
			receipt, err := s.Pay(t.Context(), "p-1", 100)
			if err != nil {
				t.Error(err)
			}
			receipts[i] = string(receipt)
		})
	}
	all.Wait()
	for _, r := range receipts {
		if r != receipts[0] || !strings.HasSuffix(r, `"cents":100}`) {
			t.Errorf("one receipt is %s, another %s", receipts[0], r)
		}
	}
	var rows int
	if err := s.pool.QueryRow(t.Context(), `SELECT count(*) FROM public.payments`).Scan(&rows); err != nil || rows != 1 {
		t.Errorf("%d rows, %v", rows, err)
	}
}

func TestAnswers(t *testing.T) {
	s := open(t)
	s.Wait = 50 * time.Millisecond
	ask := func(key, body string, status int) string {
		t.Helper()
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/payments", strings.NewReader(body))
		r.Header.Set("Idempotency-Key", key)
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		if w.Code != status || (status == http.StatusConflict) != (w.Header().Get("Retry-After") != "") {
			t.Errorf("%s %s: %d %s, want %d", key, body, w.Code, w.Body, status)
		}
		return w.Body.String()
	}
	ask("", `{"cents": 1}`, http.StatusBadRequest)
	ask("a", `{"cents": 0}`, http.StatusBadRequest)
	ask("a", `[]`, http.StatusBadRequest)
	ask("a", `{"cents": 13}`, http.StatusServiceUnavailable)
	first := ask("a", `{"cents": 100}`, http.StatusOK)
	if again := ask("a", `{"cents": 100}`, http.StatusOK); again != first {
		t.Errorf("first %s, then %s", first, again)
	}
	ask("a", `{"cents": 200}`, http.StatusUnprocessableEntity)

	// Somebody else is at work on a key.
	tx, err := s.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.store.Claim(t.Context(), tx, []string{"b"}, dedup.ClaimOptions{}); err != nil {
		t.Fatal(err)
	}
	ask("b", `{"cents": 100}`, http.StatusConflict)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	ask("b", `{"cents": 100}`, http.StatusOK)
}
