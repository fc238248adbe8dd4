package nats

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// startKeeping starts a worker whose durable keeps a floor that is so old.
func (r *rig) startKeeping(after time.Duration) *work {
	r.Helper()
	source := r.source()
	source.floorAge = after
	return r.startSource(source)
}

func (r *rig) floor() uint64 { return floorOf(r.durable()).Floor }

// A durable whose state is lost, and whose configuration isn't, goes on where it was.
func TestADurableLosesItsState(t *testing.T) {
	t.Parallel()
	for name, running := range map[string]bool{"under a worker": true, "while nobody reads": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.StreamConfig{})
			r.publish(0, 2000)
			w := r.startKeeping(time.Second)
			r.wait(2000)
			r.until("the durable to keep its floor", func() bool { return r.floor() == 2000 })
			if !running {
				w.stop()
			}
			r.lose(stateOfDurable)
			if !running {
				w = r.startKeeping(time.Second)
			}
			r.until("the durable to be set forward", func() bool { return w.log.count("has lost its state, and would deliver again") == 1 })
			r.publish(2000, 100)
			r.wait(2100)
			if handled, again, _ := r.store.Counts(); handled != 2100 || again != 0 {
				t.Errorf("%d messages were handled, %d of them again", handled, again)
			}
		})
	}
}

// Where the stream is lost with the state of its durable, what has the same sequences by
// now are other messages: nothing is skipped, and somebody is to look.
func TestADurableLosesItsStateWithTheStream(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 100)
	w := r.startKeeping(time.Second)
	r.wait(100)
	r.until("the durable to keep its floor", func() bool { return r.floor() == 100 })
	w.stop()
	r.lose(stateOfDurable, messagesOfStream)
	r.publish(100, 300)
	w = r.startKeeping(time.Second)
	const why = "younger messages there, which are others"
	w.untilHeld(why)
	w.stop()
	if n := len(r.store.Effects()); n != 100 {
		t.Errorf("%d effects, while it isn't known what they are of", n)
	}

	// As the reason says.
	r.deleteDurable()
	r.store.Lose(edgeQueue)
	r.startKeeping(time.Second)
	r.wait(300) // what the stream has
}

// What a server forgets in a crash comes again, and the durable stays what it is.
func TestAFloorThatIsYoungIsNotKept(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 100)
	r.startKeeping(time.Hour)
	r.wait(100)
	created := r.durable().Created
	r.lose(stateOfDurable)
	r.publish(100, 10)
	r.wait(110)
	r.until("all of it to come again", func() bool { handled, _, _ := r.store.Counts(); return handled == 210 })
	if kept := r.floor(); kept != 0 || !r.durable().Created.Equal(created) {
		t.Errorf("the durable was made anew, or keeps %d", kept)
	}
}

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
