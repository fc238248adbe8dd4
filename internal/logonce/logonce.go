// Package logonce keeps a problem that lasts from filling the log: it is logged when
// it begins and when its text changes, not with each try.
package logonce

// Problem remembers the problem that was logged last. The zero value has none. It
// isn't safe for concurrent use.
type Problem struct{ text string }

// IsNew tells whether to log an error: its text isn't the one of the last call. A nil
// error isn't new, and ends the problem.
func (p *Problem) IsNew(err error) bool {
	if err == nil {
		p.text = ""
		return false
	}
	text := err.Error()
	if text != p.text {
		p.text = text
		return true
	}
	return false
}

// End forgets the problem. It tells whether there was one, which the log has and may
// now be told is over.
func (p *Problem) End() (was bool) {
	was = p.text != ""
	p.text = ""
	return was
}
