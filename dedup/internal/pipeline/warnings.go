package pipeline

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// HearWarnings has a pool's connections keep what COMMIT warns of, which pgx throws
// away: Postgres answers a COMMIT whose wait for a synchronous standby somebody
// cancelled (pg_cancel_backend) as one that succeeded, and only warns. It must be
// called before the pool is made. A handler of notices that is there is called as
// before.
func HearWarnings(c *pgx.ConnConfig) {
	next := c.OnNotice
	c.OnNotice = func(conn *pgconn.PgConn, n *pgconn.Notice) {
		if isOfCommit(n) {
			conn.CustomData()[warningKey] = (*pgconn.PgError)(n)
		}
		if next != nil {
			next(conn, n)
		}
	}
}

// isOfCommit tells whether COMMIT itself may have warned. What a function warns of
// that COMMIT calls, such as a deferred trigger's, tells where it was.
func isOfCommit(n *pgconn.Notice) bool {
	return n.SeverityUnlocalized == "WARNING" && n.Code == "01000" && n.Where == ""
}

const warningKey = "dedupd warning"

// takeWarning is what the connection was last warned of, once; nil: nothing.
func TakeWarning(conn *pgx.Conn) *pgconn.PgError {
	data := conn.PgConn().CustomData()
	w, _ := data[warningKey].(*pgconn.PgError)
	delete(data, warningKey)
	return w
}

// hearWarnings is SQL that has the transaction's warnings sent, which a role or a database may have
// switched off.
const SendWarnings = `CASE pg_catalog.current_setting('client_min_messages') WHEN 'error' THEN pg_catalog.set_config('client_min_messages', 'warning', true) END`
