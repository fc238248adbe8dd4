package sinktest

import (
	"context"
	"errors"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// stuckTx is a transaction whose server never answers. A call returns when its context ends,
// as pgx does, or when the test releases it.
type stuckTx struct {
	once    sync.Once
	called  chan struct{} // closed by the first call
	release chan struct{}
}

func (t *stuckTx) wait(ctx context.Context) error {
	t.once.Do(func() { close(t.called) })
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.release:
		return errors.New("sinktest: the stuck transaction was released")
	}
}

func (t *stuckTx) Exec(ctx context.Context, _ string, _ ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, t.wait(ctx)
}

func (t *stuckTx) Query(ctx context.Context, _ string, _ ...any) (pgx.Rows, error) {
	err := t.wait(ctx)
	return stuckRows{err}, err
}

func (t *stuckTx) QueryRow(ctx context.Context, _ string, _ ...any) pgx.Row {
	return stuckRows{t.wait(ctx)}
}

func (t *stuckTx) SendBatch(ctx context.Context, _ *pgx.Batch) pgx.BatchResults {
	return stuckBatch{t.wait(ctx)}
}

func (t *stuckTx) CopyFrom(ctx context.Context, _ pgx.Identifier, _ []string, _ pgx.CopyFromSource) (int64, error) {
	return 0, t.wait(ctx)
}

// stuckRows and stuckBatch are results with nothing but an error.
type stuckRows struct{ err error }

func (r stuckRows) Close()                                       {}
func (r stuckRows) Err() error                                   { return r.err }
func (r stuckRows) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (r stuckRows) FieldDescriptions() []pgconn.FieldDescription { return nil }
func (r stuckRows) Next() bool                                   { return false }
func (r stuckRows) Scan(...any) error                            { return r.err }
func (r stuckRows) Values() ([]any, error)                       { return nil, r.err }
func (r stuckRows) RawValues() [][]byte                          { return nil }
func (r stuckRows) TypeMap() *pgtype.Map                         { return nil }
func (r stuckRows) Conn() *pgx.Conn                              { return nil }

type stuckBatch struct{ err error }

func (b stuckBatch) Exec() (pgconn.CommandTag, error) { return pgconn.CommandTag{}, b.err }
func (b stuckBatch) Query() (pgx.Rows, error)         { return stuckRows(b), b.err }
func (b stuckBatch) QueryRow() pgx.Row                { return stuckRows(b) }
func (b stuckBatch) Tx() pgx.Tx                       { return nil }
func (b stuckBatch) Close() error                     { return b.err }
