// Package claim is an example of dedupd as a library: a service that books payments. Its
// clients send a request again if they get no answer, perhaps to another process, and each
// payment is booked once. Whoever asks again gets the receipt of the first time.
package claim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/dedup"
)

// Service books payments in the table public.payments.
type Service struct {
	pool  *pgxpool.Pool
	store *dedup.Store
	// Wait is for how long a request waits while another one with its key is at work.
	Wait time.Duration
}

// Open makes the service. Migrate needs the rights of the schema's owner. A service without
// them leaves it to `dedupd migrate up`.
func Open(ctx context.Context, pool *pgxpool.Pool) (*Service, error) {
	store, err := dedup.NewStore(dedup.StoreConfig{Pool: pool, Scope: "payments"})
	if err != nil {
		return nil, err
	}
	_, err = store.Schema().Migrate(ctx)
	return &Service{pool: pool, store: store, Wait: 2 * time.Second}, err
}

// Receipt is what a client gets for its payment.
type Receipt struct {
	Number int64 `json:"number"`
	Cents  int64 `json:"cents"`
}

// Pay books the payment of a key once, however often it is called. It returns the receipt
// of the first time. The error is dedup.ErrInFlight if another transaction is at work on the
// key: nobody knows yet what becomes of it.
func (s *Service) Pay(ctx context.Context, key string, cents int64) (receipt []byte, err error) {
	err = retry(func() error {
		return pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			claims, err := s.store.Claim(ctx, tx, []string{key}, dedup.ClaimOptions{Wait: s.Wait})
			if err != nil {
				return err
			}
			if !claims[0].IsNew { // the transaction that claimed the key has committed
				receipt = claims[0].Result
				return nil
			}
			if receipt, err = book(ctx, tx, key, cents); err != nil {
				return err
			}
			return claims[0].SetResult(ctx, tx, receipt)
		})
	})
	return receipt, err
}

func book(ctx context.Context, tx pgx.Tx, key string, cents int64) ([]byte, error) {
	r := Receipt{Cents: cents}
	if err := tx.QueryRow(ctx, `INSERT INTO public.payments (key, cents) VALUES ($1, $2) RETURNING number`, key, cents).Scan(&r.Number); err != nil {
		return nil, err
	}
	return json.Marshal(r)
}

// retry tries again after a deadlock, and if the key was forgotten in that moment.
func retry(do func() error) error {
	var err error
	for range 5 {
		var pg *pgconn.PgError
		if err = do(); !errors.As(err, &pg) || pg.Code != "40P01" && pg.Code != "40001" {
			return err
		}
	}
	return fmt.Errorf("given up: %w", err)
}

// ServeHTTP takes a payment such as {"cents": 100} under the key of the header
// Idempotency-Key. Any answer but 4xx may be asked for again with the same key.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var payment struct {
		Cents int64 `json:"cents"`
	}
	key := r.Header.Get("Idempotency-Key")
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<10)).Decode(&payment); err != nil || key == "" || payment.Cents <= 0 {
		http.Error(w, "a payment needs a header Idempotency-Key and positive cents", http.StatusBadRequest)
		return
	}
	receipt, err := s.Pay(r.Context(), key, payment.Cents)
	var kept Receipt
	switch {
	case errors.Is(err, dedup.ErrInFlight):
		w.Header().Set("Retry-After", "1")
		http.Error(w, "the first request with this key is at work; ask again", http.StatusConflict)
	case err != nil:
		http.Error(w, "not known whether the payment was booked; ask again", http.StatusServiceUnavailable)
	case json.Unmarshal(receipt, &kept) != nil:
		http.Error(w, "the payment was booked, and there is no receipt", http.StatusGone)
	case kept.Cents != payment.Cents:
		http.Error(w, "the key was used for another payment", http.StatusUnprocessableEntity)
	default:
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(receipt) // a client that doesn't get it asks again
	}
}
