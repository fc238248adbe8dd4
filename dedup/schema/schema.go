// Package schema has dedupd's own tables and functions in Postgres: their versions and how
// they are applied, what a worker's role may do with them, and what the server must be.
//
// The tables and functions themselves are in migrations/.
package schema

import (
	"context"
	"fmt"
	"io/fs"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// RotationLock is the class of an advisory lock, whose second key is the scope's number.
// Each claim transaction takes it shared, and whoever changes the scope's generations takes
// it exclusively. ("dedu"; a database has one space of advisory locks.)
const RotationLock = 0x64656475

// Schema stands for dedupd's tables in one database, and one scope in them. It may be used
// by many goroutines.
type Schema struct {
	Pool *pgxpool.Pool
	// Name is the schema's, Scope the consumer's. dedup.NewStore checks both.
	Name, Scope string
	// Files has the schema's versions, as migrations/<number>_<name>.sql; nil: this
	// program's own.
	Files fs.FS
}

// Object quotes one of dedupd's own names with its schema.
func (s *Schema) Object(name string) string { return pgx.Identifier{s.Name, name}.Sanitize() }

// Check returns an *EncodingError if the database can't hold the text of messages, and an
// *Error if the schema has another version than this program needs.
func (s *Schema) Check(ctx context.Context) error {
	if err := s.checkEncoding(ctx); err != nil {
		return err
	}
	have, err := s.Version(ctx)
	if err != nil {
		return err
	}
	if have != s.latest() {
		return &Error{Have: have, Want: s.latest()}
	}
	return nil
}

// Error says that the schema has another version than this program needs, or lacks the
// scope. Its text says what to do.
type Error struct {
	// Have and Want are the schema's versions. Have is 0 if there is no schema.
	Have, Want int
	// Reason, if not empty, is the text instead.
	Reason string
}

func (e *Error) Error() string {
	if e.Reason != "" {
		return e.Reason
	}
	if e.Have > e.Want {
		return fmt.Sprintf("the database's schema has version %d, but this dedupd knows only versions up to %d: run the newer dedupd that upgraded it", e.Have, e.Want)
	}
	return fmt.Sprintf("the database's schema has version %d, but this dedupd needs version %d: run `dedupd migrate up` with the owner's rights (or set database.migrate: true)", e.Have, e.Want)
}
