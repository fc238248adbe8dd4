package app

import (
	"strings"
	"testing"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/config"
)

// The configuration and the store each check a scope's name. What one accepts, the
// other must not refuse.
func TestConfigAndStoreTakeTheSameScopes(t *testing.T) {
	t.Parallel()
	for _, scope := range []string{"a", "0", "orders-eu_1", "-a", "_a", "A", "a.b", "ä", strings.Repeat("a", 40), strings.Repeat("a", 41)} {
		_, err := dedup.NewStore(dedup.StoreConfig{Scope: scope})
		text := "scope: " + scope + "\nsources: [{kafka: {brokers: ['localhost:9092'], topics: [t]}}]\nid: {from: key}\nsink: {table: {name: t, columns: {id: id}}}\n"
		_, _, bad := config.Parse("test.yaml", []byte(text), config.Options{})
		if (err == nil) != (bad == nil) {
			t.Errorf("scope %q: the store says %v, the configuration %v", scope, err, bad)
		}
	}
}
