package config_test

import (
	"fmt"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/retention"
)

// The configuration and the advice each limit a window's generations. What one advises,
// the other must not refuse.
func TestConfigAndAdviceAllowTheSameGenerations(t *testing.T) {
	t.Parallel()
	const most = 1_000_000
	refused := sort.Search(most, func(n int) bool {
		text := fmt.Sprintf("scope: a\nsources: [{kafka: {brokers: ['localhost:9092'], topics: [t]}}]\nid: {from: key}\n"+
			"sink: {table: {name: t, columns: {id: id}}}\nretention: {window: %ds, generation: 1s, max_hold: 1000d}\n", n+1)
		_, _, err := config.Parse("test.yaml", []byte(text), config.Options{})
		return err != nil
	})
	warned := sort.Search(most, func(n int) bool {
		a := retention.Advise(retention.AdviceInput{Window: time.Duration(n+1) * time.Second, Generation: time.Second, MaxHold: 1000 * 24 * time.Hour})
		return strings.Contains(strings.Join(a.Warnings, " "), "may have no more than")
	})
	if refused != warned || refused == 0 || refused == most {
		t.Errorf("the configuration takes %d generations, the advice %d", refused, warned)
	}
}
