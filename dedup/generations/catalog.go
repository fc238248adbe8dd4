// Package generations keeps the claims of one scope in generations: tables, of which
// one is open and takes every new claim, and the others are sealed.
//
//   - catalog.go: the generations as one transaction sees them.
//   - set.go: the current catalog, and when it is read anew.
//   - filter.go, filters.go: which keys a sealed generation may hold, in memory.
//   - rotation.go: the leader's steps. They seal, expire and drop generations.
//   - generation.go, clock.go: what people see of generations, and set by hand.
//
// Package retention decides when the leader's steps are taken.
package generations

import (
	"slices"

	"github.com/dedupd/dedupd/dedup/claimkey"
)

// Catalog has the scope's generations as they were under one random identity. A claim
// transaction is built for one catalog, and enter() refuses it once the database has
// another. So nothing in memory outlives the database it came from: neither a rotation
// nor the restore of an older copy. A Catalog is replaced, never changed.
type Catalog struct {
	ScopeID  int32
	Identity claimkey.Key
	epoch    int64
	Open     *Table
	Sealed   []*Table // newest first; those without a claim are left out
}

// Table is a generation that takes claims or may hold some.
type Table struct {
	Number int
	// Identity is new with each seal. Prepared statements and filters belong to it:
	// after a restore, the same table name may mean other claims.
	Identity claimkey.Key
	Name     string // quoted, with its schema
	Results  string // the table of its claims' results, likewise
	Open     bool   // it takes claims; else it is sealed
	// first and last are the zone map of a sealed generation: its smallest and its
	// largest key.
	first, last claimkey.Key
	// chunks are the loaded filters in key order, from the first on, without a gap.
	// Keys above the last chunk's are looked up in the table.
	chunks []*chunk
}

// Has reports whether a generation of that identity is in the catalog.
func (c *Catalog) Has(identity claimkey.Key) bool {
	return c.Open.Identity == identity || slices.ContainsFunc(c.Sealed, func(g *Table) bool { return g.Identity == identity })
}

// OldestFirst lists the generations that may hold claims. An id that was claimed twice,
// by whatever hand, was seen first in the oldest.
func (c *Catalog) OldestFirst() []*Table {
	all := slices.Clone(c.Sealed)
	slices.Reverse(all)
	return append(all, c.Open)
}
