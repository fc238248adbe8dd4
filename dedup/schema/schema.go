package schema

import (
	"context"
	"fmt"
	"io/fs"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// RotationLock is the class of the advisory lock, taken shared by each claim
// transaction with the scope's number as second key, and exclusively by whoever
// changes the scope's generations. ("dedu"; advisory locks share one space in a
// database.)
const RotationLock = 0x64656475

// Schema is dedupd's own tables and functions in one database, and one scope in
// them. It may be used by many goroutines.
type Schema struct {
	Pool *pgxpool.Pool
	// Name is the schema's, Scope the consumer's; both are checked by dedup.NewStore.
	Name, Scope string
	// Files has the schema's versions, as migrations/<number>_<name>.sql. Nil: those of
	// this program.
	Files fs.FS
}

// Object quotes one of dedupd's own names with its schema.
func (s *Schema) Object(name string) string { return pgx.Identifier{s.Name, name}.Sanitize() }

// Check gives an *EncodingError for a database that can't hold messages' text, and an
// *Error where the schema isn't the one that this program works with.
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

// claimsTable is the name of a generation's table, without its schema.
func ClaimsTable(scope string, generation int) string {
	return fmt.Sprintf("claims_%s_%d", scope, generation)
}

// SchemaError says that the database's schema isn't the one this program works
// with, or lacks the scope. The cure is part of the text.
type Error struct {
	// Have and Want are schema versions; Have is 0 where there is no schema.
	Have, Want int
	Reason     string
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
