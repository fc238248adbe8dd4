package pipeline

// Time-outs of a claim transaction. A transaction that holds a key makes a concurrent
// duplicate wait, so none may be long. And one whose worker is gone must end by itself, or
// the next owner of its lanes waits.
const (
	LockTimeout      = "5s"
	StatementTimeout = "20s"
	IdleTimeout      = "10s"
)

// SetLimits sets a transaction's time-outs, and raises synchronous_commit = off: what was
// acknowledged must survive a crash.
const SetLimits = `SELECT set_config('lock_timeout', $1, true), set_config('statement_timeout', $2, true),
	set_config('idle_in_transaction_session_timeout', $3, true), set_config('synchronous_commit', CASE c WHEN 'off' THEN 'on' ELSE c END, true) FROM current_setting('synchronous_commit') c`

// CleanText makes a reason storable as text: it may quote a message's bytes.
func CleanText(s string) []byte {
	const longest = 2000
	if len(s) > longest {
		s = s[:longest] + "…"
	}
	clean := make([]byte, 0, len(s))
	for _, r := range s { // a range over a string replaces bad UTF-8
		if r == 0 {
			r = '␀'
		}
		clean = append(clean, string(r)...)
	}
	return clean
}
