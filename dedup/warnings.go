package dedup

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// HearWarnings makes a pool's connections keep what COMMIT warns of; pgx drops it. If
// somebody cancels a COMMIT that waits for a synchronous standby (pg_cancel_backend),
// Postgres reports success and only warns. HearWarnings must be called before the pool is
// made. An existing handler of notices is still called.
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

// isOfCommit reports whether COMMIT itself may have sent the warning. A function that COMMIT
// calls, such as a deferred trigger's, says where it was.
func isOfCommit(n *pgconn.Notice) bool {
	return n.SeverityUnlocalized == "WARNING" && n.Code == "01000" && n.Where == ""
}

const warningKey = "dedupd warning"

// takeWarning returns the connection's last warning, once; nil: there is none.
func takeWarning(conn *pgx.Conn) *pgconn.PgError {
	data := conn.PgConn().CustomData()
	w, _ := data[warningKey].(*pgconn.PgError)
	delete(data, warningKey)
	return w
}

// sendWarnings is SQL that makes the server send the transaction's warnings: a role or a
// database may have switched them off.
const sendWarnings = `CASE pg_catalog.current_setting('client_min_messages') WHEN 'error' THEN pg_catalog.set_config('client_min_messages', 'warning', true) END`
