package retention

import "time"

// ahead reports, and logs, that the database's clock is too far ahead of ours. We can't know
// which is wrong, but keeping claims for too long does no harm.
func (l *Loop) ahead(s *Status) bool {
	by := time.Until(s.Now)
	if l.ClockSlack == 0 || by <= l.ClockSlack {
		l.toldAhead = time.Time{}
		return false
	}
	if time.Since(l.toldAhead) >= aheadEvery {
		l.toldAhead = time.Now()
		l.Logger.Warn("the database's clock is ahead of this process': no claims expire. Correct the wrong clock, or expire them anyway with `dedupd retention run`",
			"ahead", by.Round(time.Second), "database", s.Now, "window", l.Window)
	}
	return true
}

// apart reports, and logs, that a generation that is due isn't sealed yet, because the
// database's clock and ours differ too much. A clock that is behind would date the seal
// before the last claims, which would then expire too early by as much; one that is ahead
// would date it so that somebody has to correct it later. Ours may be the wrong one, so this
// delays a rotation by no longer than a generation stays open anyway.
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
		l.Logger.Warn("the database's clock and this process' differ: a generation that is due is not sealed until they agree, or for as long as a generation stays open. Correct the wrong clock, or seal it anyway with `dedupd retention run`",
			"ahead", by.Round(time.Second), "database", s.Now, "at_most", l.Generation)
	}
	return time.Since(l.apartSince) < l.Generation
}

// aheadEvery is how often ahead logs again.
const aheadEvery = time.Hour
