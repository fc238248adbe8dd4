package kafka

import (
	"bytes"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// A client over its quota is slow, and nothing else: it stays ready, its messages land,
// and the log says so once.
func TestQuotas(t *testing.T) {
	t.Parallel()
	b := realBroker(t)
	// More than the byte rate allows in the ten seconds over which the broker averages it.
	const lanes, n = 3, 16
	for name, value := range map[string]float64{"consumer_byte_rate": 200_000, "request_percentage": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, b, lanes, nil)
			id := newName("client")
			r.check(b.SetQuota(r.ctx, id, name, value))
			c := r.client(kgo.ProducerBatchCompression(kgo.NoCompression()))
			fill := func() {
				for p := range int32(lanes) {
					for range n {
						r.put(c, p, string(bytes.Repeat([]byte{'x'}, 50_000)))
					}
				}
			}
			w := r.start(func(c *Config) { c.ClientID, c.FetchBytes = id, 100_000 })
			w.untilReady()
			before := r.log.count("level=WARN")
			fill()
			watched, quit := make(chan int, 1), make(chan struct{})
			go func() {
				unready := 0
				for {
					select {
					case <-quit:
						watched <- unready
						return
					case <-time.After(5 * time.Millisecond):
					}
					if err := w.worker.Ready(); err != nil {
						t.Log(err)
						unready++
					}
				}
			}()
			for p := range lanes {
				r.untilNext(p, n)
			}
			close(quit)
			if unready := <-watched; unready > 0 {
				t.Errorf("not ready %d times", unready)
			}
			told := r.log.count("over its quota")
			if name == "consumer_byte_rate" && told == 0 {
				t.Fatal("the broker has throttled nobody")
			}
			if told > 1 {
				t.Errorf("the log tells %d times", told)
			}
			if warnings := r.log.count("level=WARN") + r.log.count("level=ERROR") - before; warnings > told {
				t.Errorf("%d warnings", warnings)
			}
		})
	}
}
