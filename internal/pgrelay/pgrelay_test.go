package pgrelay_test

import (
	"context"
	"errors"
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/internal/pgrelay"
	"github.com/dedupd/dedupd/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// rig is a relay in front of a database with tables that look like dedupd's.
type rig struct {
	*testing.T
	relay  *pgrelay.Relay
	direct *pgx.Conn
	url    string
}

func newRig(t *testing.T) *rig {
	db := pgtest.New(t)
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{T: t}
	if r.relay, err = pgrelay.Listen(u.Host); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.relay.Close)
	r.direct = r.connect(db.URL)
	u.Host = r.relay.Addr()
	r.url = u.String()
	r.exec(r.direct, `
		CREATE TABLE claims_x_1 (key int PRIMARY KEY);
		CREATE TABLE effects (key int);
		CREATE TABLE lanes (next int);
		INSERT INTO lanes VALUES (0);
		CREATE FUNCTION enter() RETURNS void LANGUAGE sql AS '';
		CREATE FUNCTION advance(n int) RETURNS void LANGUAGE sql AS 'UPDATE lanes SET next = n'`)
	return r
}

func (r *rig) connect(url string) *pgx.Conn {
	r.Helper()
	conn, err := pgx.Connect(r.Context(), url)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func (r *rig) exec(conn *pgx.Conn, sql string) {
	r.Helper()
	if _, err := conn.Exec(r.Context(), sql); err != nil {
		r.Fatal(err)
	}
}

func (r *rig) ask(sql string) (n int) {
	r.Helper()
	if err := r.direct.QueryRow(r.Context(), sql).Scan(&n); err != nil {
		r.Fatal(err)
	}
	return n
}

// transact is a claim transaction in the shape of dedupd's: three round trips, the
// last of which ends in COMMIT.
func (r *rig) transact(conn *pgx.Conn, key int, copied bool) error {
	ctx, cancel := context.WithTimeout(r.Context(), 10*time.Second)
	defer cancel()
	pipeline := func(statements ...string) error {
		p := conn.PgConn().StartPipeline(ctx)
		for _, sql := range statements {
			p.SendQueryParams(sql, nil, nil, nil, nil)
		}
		if err := p.Sync(); err != nil {
			return errors.Join(err, p.Close())
		}
		for range statements {
			result, err := p.GetResults()
			if err == nil {
				_, err = result.(*pgconn.ResultReader).Close()
			}
			if err != nil {
				return errors.Join(err, p.Close())
			}
		}
		return p.Close()
	}
	number := func(sql string) string { return sql + "(" + string(rune('0'+key)) + ")" }
	if copied {
		if err := pipeline("begin", "SELECT enter()"); err != nil {
			return err
		}
		if _, err := conn.CopyFrom(ctx, pgx.Identifier{"claims_x_1"}, []string{"key"}, pgx.CopyFromRows([][]any{{key}})); err != nil {
			return err
		}
	} else if err := pipeline("begin", "SELECT enter()", number("INSERT INTO claims_x_1 VALUES ")); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, "INSERT INTO effects VALUES ($1)", key); err != nil {
		return err
	}
	return pipeline(number("SELECT advance"), "commit")
}

// At each point the transaction is as far as the point's name says, and not
// further.
func TestPoints(t *testing.T) {
	for _, copied := range []bool{false, true} {
		r := newRig(t)
		conn := r.connect(r.url)
		if err := r.transact(conn, 1, copied); err != nil { // with which statements are prepared
			t.Fatal(err)
		}
		states := []struct {
			point pgrelay.Point
			state string // what the server has last done, or waits for, in the connection
		}{
			{pgrelay.TxBefore, "begin"},
			{pgrelay.ClaimBefore, "enter"},
			{pgrelay.ClaimAfter, "claims"},
			{pgrelay.SinkBefore, "claims"},
			{pgrelay.SinkAfter, "effects"},
			{pgrelay.CommitBefore, "advance"},
			{pgrelay.CommitAfter, "commit"},
		}
		for i, s := range states {
			var query string
			r.relay.Set(s.point, 1, func(h *pgrelay.Held) pgrelay.Verdict {
				for query = ""; query == ""; { // until the server has come to it
					time.Sleep(20 * time.Millisecond)
					err := r.direct.QueryRow(r.Context(), `SELECT query FROM pg_stat_activity WHERE client_port = $1 AND query ILIKE $2`,
						h.Server, "%"+s.state+"%").Scan(&query)
					if err != nil && !errors.Is(err, pgx.ErrNoRows) {
						t.Error(err)
						break
					}
				}
				return pgrelay.GoOn
			})
			if err := r.transact(conn, i+2, copied); err != nil {
				t.Errorf("held at %s: %v", s.point, err)
			}
			if r.relay.Clear() {
				t.Errorf("%s was not passed", s.point)
			}
		}
		if n := r.ask("SELECT count(*) FROM effects"); n != len(states)+1 {
			t.Errorf("%d effects, want %d", n, len(states)+1)
		}
		for _, s := range states {
			if n := r.relay.Passed(s.point); n != len(states)+1 {
				t.Errorf("%s was passed %d times, want %d", s.point, n, len(states)+1)
			}
		}
	}
}

// A connection that is cut before its COMMIT has done nothing, one that is cut
// behind it everything; the client can't tell one from the other.
func TestCut(t *testing.T) {
	for point, want := range map[pgrelay.Point]int{pgrelay.SinkAfter: 0, pgrelay.CommitBefore: 0, pgrelay.CommitAfter: 1} {
		r := newRig(t)
		conn := r.connect(r.url)
		r.relay.Set(point, 1, func(*pgrelay.Held) pgrelay.Verdict { return pgrelay.Cut })
		if err := r.transact(conn, 1, false); err == nil || !conn.IsClosed() {
			t.Errorf("cut at %s: the client was told %v", point, err)
		}
		if n := r.ask("SELECT count(*) FROM effects"); n != want {
			t.Errorf("cut at %s: %d effects, want %d", point, n, want)
		}
	}
}

// An error in the server's place leaves a connection that a rollback puts into
// order.
func TestRefuse(t *testing.T) {
	for _, point := range []pgrelay.Point{pgrelay.TxBefore, pgrelay.ClaimBefore, pgrelay.SinkBefore, pgrelay.SinkAfter, pgrelay.CommitBefore} {
		r := newRig(t)
		conn := r.connect(r.url)
		r.relay.Set(point, 1, func(h *pgrelay.Held) pgrelay.Verdict {
			h.Refuse("53100")
			return pgrelay.GoOn
		})
		var pg *pgconn.PgError
		if err := r.transact(conn, 1, false); !errors.As(err, &pg) || pg.Code != "53100" {
			t.Errorf("at %s: the client was told %v", point, err)
		}
		r.exec(conn, "rollback")
		if err := r.transact(conn, 1, false); err != nil {
			t.Errorf("after a refusal at %s: %v", point, err)
		}
		if n := r.ask("SELECT count(*) FROM effects"); n != 1 {
			t.Errorf("after a refusal at %s: %d effects, want 1", point, n)
		}
	}
}

// Down ends what there is and lets nobody in; Redirect leads elsewhere.
func TestDownAndRedirect(t *testing.T) {
	r := newRig(t)
	conn := r.connect(r.url)
	r.relay.Down()
	if err := conn.Ping(t.Context()); err == nil {
		t.Error("a connection outlives Down")
	}
	if other, err := pgx.Connect(t.Context(), r.url); err == nil {
		_ = other.Close(t.Context())
		t.Error("a connection was made while the relay was down")
	}
	r.relay.Up()
	r.exec(r.connect(r.url), "SELECT 1")
	r.relay.Redirect("127.0.0.1:1")
	if other, err := pgx.Connect(t.Context(), r.url); err == nil {
		_ = other.Close(t.Context())
		t.Error("the relay still leads to the old server")
	}
}
