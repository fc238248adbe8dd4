package retention

import "time"

// ahead tells, and logs, that the database's clock is too far ahead of ours. Which of
// them is wrong can't be told, but claims that are kept for too long do no harm.
func (l *Loop) ahead(s *Status) bool {
	by := time.Until(s.Now)
	if l.ClockSlack == 0 || by <= l.ClockSlack {
		l.toldAhead = time.Time{}
		return false
	}
	if time.Since(l.toldAhead) >= aheadEvery {
		l.toldAhead = time.Now()
		l.Logger.Warn("the database's clock is ahead of this process': no claims expire. Set the clock that is wrong, or have them expire all the same with `dedupd retention run`",
			"ahead", by.Round(time.Second), "database", s.Now, "window", l.Window)
	}
	return true
}

// apart tells, and logs, that a generation that is due isn't to be sealed yet, since the
// database's clock and ours differ too much. By a clock that is behind it would be sealed
// at a time before its last claims were made, and they would expire too early by as much;
// by one that is ahead, somebody would have to set it right later. Ours may be the wrong
// one: so it holds up a rotation for no longer than a generation is open anyway.
func (l *Loop) apart(s *Status, due bool) bool {
	by := time.Until(s.Now)
	if l.ClockSlack == 0 || by.Abs() <= l.ClockSlack {
		l.apartSince = time.Time{}
		return false
	}
	switch {
	case !due && l.apartSince.IsZero():
		return false
	case l.apartSince.IsZero():
		l.apartSince = time.Now()
		l.Logger.Warn("the database's clock and this process' differ: a generation that is due is not sealed by it, until they agree, or for as long as a generation stays open. Set the clock that is wrong, or have it sealed all the same with `dedupd retention run`",
			"ahead", by.Round(time.Second), "database", s.Now, "at_most", l.Generation)
	}
	return time.Since(l.apartSince) < l.Generation
}

// aheadEvery is how often that is repeated.
const aheadEvery = time.Hour
