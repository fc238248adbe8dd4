package nats

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// A floor is kept once nothing that a crash of the server forgets can lie below it.
func TestAFloorIsKeptOnceItIsOld(t *testing.T) {
	t.Parallel()
	begun := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	s := floors{after: floorAge}
	kept := uint64(0)
	looks := 0
	for at, floor := time.Duration(0), uint64(0); at <= time.Hour; at, floor = at+2*time.Second, floor+10 {
		info := &jetstream.ConsumerInfo{TimeStamp: begun.Add(at), AckFloor: jetstream.SequenceInfo{Stream: floor}}
		last := begun.Add(at - time.Second)
		info.AckFloor.Last = &last
		info.Config.Metadata = map[string]string{}
		s.observe(info, begun.Add(at))
		s.note(info, info.Config.Metadata)
		now := floorOf(info)
		if now.Floor > kept {
			kept, looks = now.Floor, looks+1
			if !now.At.Equal(info.TimeStamp) {
				t.Fatalf("kept as of %s, at %s", now.At, info.TimeStamp)
			}
		}
		// Ten are acknowledged each two seconds.
		if old := time.Duration(floor-kept) / 10 * 2 * time.Second; old < floorAge && kept > 0 || old > floorAge+floorAge/4 && at > 2*floorAge {
			t.Fatalf("after %s, a floor is kept that is %s old", at, old)
		}
	}
	if len(s.seen) > 10 || looks < 100 {
		t.Errorf("%d floors are remembered, %d times another was kept", len(s.seen), looks)
	}
}

// A durable whose last acknowledgement was long ago is known at once.
func TestAFloorOfAQuietDurableIsOld(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for ago, want := range map[time.Duration]bool{floorAge - time.Second: false, floorAge: true} {
		s := floors{after: floorAge}
		last := now.Add(-ago)
		info := &jetstream.ConsumerInfo{TimeStamp: now, AckFloor: jetstream.SequenceInfo{Stream: 7, Last: &last}}
		s.observe(info, now)
		if s.due(info) != want {
			t.Errorf("after %s: %t", ago, !want)
		}
		info.AckFloor.Stream = 6 // it has lost its state since
		if s.due(info) {
			t.Error("a floor is kept at which the durable isn't")
		}
	}
}
