// Package logonce keeps a problem that lasts from filling the log: each of its texts is
// logged once, not with each try.
package logonce

// mostTexts bounds the memory of texts, should they vary.
const mostTexts = 64

// Problem remembers what was logged since the problem began. The zero value has none. It
// isn't safe for concurrent use.
type Problem struct{ texts map[string]struct{} }

// IsNew reports whether to log an error: its text hasn't come since the problem began. A
// nil error isn't new, and ends the problem.
func (p *Problem) IsNew(err error) bool {
	if err == nil {
		p.End()
		return false
	}
	text := err.Error()
	if _, known := p.texts[text]; known {
		return false
	}
	if p.texts == nil || len(p.texts) == mostTexts {
		p.texts = make(map[string]struct{})
	}
	p.texts[text] = struct{}{}
	return true
}

// End forgets the problem. It reports whether there was one, which the log has and may
// now be told is over.
func (p *Problem) End() (was bool) {
	was = p.texts != nil
	p.texts = nil
	return was
}
