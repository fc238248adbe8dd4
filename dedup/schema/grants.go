package schema

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// grant is what a worker's role needs on some of dedupd's objects.
type grant struct {
	rights  []string
	columns []string // none: on the whole table
	on      string   // "TABLE" or "FUNCTION"
	objects []string // names in the schema; of a function with its arguments
}

// grants are a worker's rights, except USAGE on the schema, SELECT on all its tables, and
// INSERT into the generations that take claims. Functions with their owner's rights make,
// seal and drop generations. Every function is listed: a database's default privileges
// decide what everybody may call.
var grants = []grant{
	{rights: []string{"INSERT"}, on: "TABLE", objects: []string{"claims_root"}},
	{rights: []string{"INSERT", "UPDATE"}, on: "TABLE", objects: []string{"lanes"}},
	{rights: []string{"UPDATE"}, columns: []string{"id_from", "id_from_before", "id_from_since", "strategy", "strategy_before", "strategy_since"}, on: "TABLE", objects: []string{"scopes"}},
	{rights: []string{"INSERT", "DELETE"}, on: "TABLE", objects: []string{"dead_letters", "filters"}},
	{rights: []string{"UPDATE"}, columns: []string{"attempts", "last_at", "reason", "sqlstate"}, on: "TABLE", objects: []string{"dead_letters"}},
	{rights: []string{"INSERT", "UPDATE", "DELETE"}, on: "TABLE", objects: []string{"duplicate_ages", "attempts", "gaps", "sequences"}},
	{rights: []string{"EXECUTE"}, on: "FUNCTION", objects: []string{
		"clock()", "instance(oid)", "acquire_lane(text, text, text, text, integer, bigint, text, interval, bigint)", "acquire_queue(text, text, text, text, text, bigint)", "stream_clock(text)", "enter(integer, uuid, text, text, text)", "leave()",
		"advance(integer, bigint, bigint, bigint, text, bigint, bigint, timestamptz, bigint, bigint, bigint, bigint, bigint, bigint, bigint, bigint, bigint, bigint, bigint, bigint[])", "replayed(bigint, integer, text)",
		"prepare_generation(text)", "rotate(text, uuid, text)", "expire(text, interval, interval, text)", "drop_generation(text, integer, text)",
		"sweep(text, text)", "at(integer[], bigint[], bigint[])", "mark(integer, uuid[], bytea[], integer[], bigint[], bigint[], bigint[])", "hold_claim(uuid, uuid)", "keep_results(uuid, uuid[], integer[], bytea[], xid, xid8)", "note_dead_letter(text, text, text, bigint, text)",
	}},
}

// quoted quotes a name with the schema. A function's arguments stay as they are.
func (s *Schema) quoted(name string) string {
	name, arguments, isFunction := strings.Cut(name, "(")
	if isFunction {
		return s.Object(name) + "(" + arguments
	}
	return s.Object(name)
}

// GrantSQL is SQL that grants a role everything a worker needs in the schema.
func (s *Schema) GrantSQL(role string) string {
	schema, worker := pgx.Identifier{s.Name}.Sanitize(), pgx.Identifier{role}.Sanitize()
	lines := []string{
		"-- What a worker needs; the owner migrates. The sink's table needs grants of its own: INSERT, and SELECT for keys that may conflict.",
		"GRANT USAGE ON SCHEMA " + schema + " TO " + worker + ";",
		"GRANT SELECT ON ALL TABLES IN SCHEMA " + schema + " TO " + worker + ";",
	}
	for _, g := range grants {
		what := strings.Join(g.rights, ", ")
		if len(g.columns) > 0 {
			what += " (" + strings.Join(g.columns, ", ") + ")"
		}
		on := ""
		if g.on != "TABLE" {
			on = g.on + " "
		}
		var objects []string
		for _, o := range g.objects {
			objects = append(objects, s.quoted(o))
		}
		lines = append(lines, "GRANT "+what+" ON "+on+strings.Join(objects, ", ")+" TO "+worker+";")
	}
	lines = append(lines,
		"-- The existing generations. Later ones get the rights on "+s.Object("claims_root")+".",
		"DO $$ DECLARE t text; BEGIN",
		"    FOR t IN SELECT table_name FROM "+s.Object("generations")+" WHERE state IN ('next', 'open') LOOP",
		"        EXECUTE format("+quoteLiteral("GRANT INSERT ON "+schema+".%I TO "+strings.ReplaceAll(worker, "%", "%%"))+", t);",
		"    END LOOP;",
		"END $$;",
	)
	return strings.Join(lines, "\n") + "\n"
}

// Grant runs GrantSQL. Only the schema's owner may.
func (s *Schema) Grant(ctx context.Context, role string) error {
	err := pgx.BeginFunc(ctx, s.Pool, func(tx pgx.Tx) error {
		// One at a time: if two change the same rights at once, the server refuses one.
		if _, err := tx.Exec(ctx, `SELECT set_config('lock_timeout', '30s', true), set_config('statement_timeout', '60s', true)`); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `SELECT pg_catalog.pg_advisory_xact_lock($1, 1)`, migrationLock); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, s.GrantSQL(role))
		return err
	})
	if err != nil {
		return fmt.Errorf("grant what a worker needs to role %s: %w", role, err)
	}
	return nil
}

// MissingRights lists the rights of GrantSQL that the connected role lacks, such as
// INSERT ON "dedupd"."lanes". The schema must be there.
func (s *Schema) MissingRights(ctx context.Context) (missing []string, err error) {
	ask := func(what, sql string, args ...any) {
		if err != nil {
			return
		}
		var granted bool
		if err = s.Pool.QueryRow(ctx, "SELECT "+sql, args...).Scan(&granted); err != nil {
			err = fmt.Errorf("ask for the right to %s: %w", what, err)
		} else if !granted {
			missing = append(missing, what)
		}
	}
	if ask("USAGE ON SCHEMA "+pgx.Identifier{s.Name}.Sanitize(), "has_schema_privilege($1, 'USAGE')", s.Name); err != nil || len(missing) > 0 {
		return missing, err // without it the server answers no other question
	}
	tables, err := s.texts(ctx, `SELECT c.oid::regclass::text FROM pg_catalog.pg_class c WHERE c.relnamespace = $1::text::regnamespace AND c.relkind IN ('r', 'v', 'p')
		AND NOT has_table_privilege(c.oid, 'SELECT') ORDER BY 1`, pgx.Identifier{s.Name}.Sanitize())
	if err != nil {
		return nil, err
	}
	for _, t := range tables {
		missing = append(missing, "SELECT ON "+t)
	}
	for _, g := range grants {
		for _, o := range g.objects {
			for _, right := range g.rights {
				switch {
				case g.on == "FUNCTION":
					ask(right+" ON FUNCTION "+s.quoted(o), "has_function_privilege($1::text, $2::text)", s.quoted(o), right)
				case len(g.columns) > 0:
					for _, c := range g.columns {
						ask(right+" ("+c+") ON "+s.quoted(o), "has_column_privilege($1::text, $2::text, $3::text)", s.quoted(o), c, right)
					}
				default:
					ask(right+" ON "+s.quoted(o), "has_table_privilege($1::text, $2::text)", s.quoted(o), right)
				}
			}
		}
	}
	if err != nil || len(tables) > 0 { // the table of generations may be unreadable
		return missing, err
	}
	generations, err := s.texts(ctx, `SELECT table_name FROM `+s.Object("generations")+` WHERE scope = $1 AND state IN ('next', 'open') ORDER BY 1`, s.Scope)
	for _, t := range generations {
		ask("INSERT ON "+s.Object(t), "has_table_privilege($1::text, 'INSERT')", s.Object(t))
	}
	return missing, err
}

// texts returns the values of a query's only column.
func (s *Schema) texts(ctx context.Context, sql string, args ...any) ([]string, error) {
	rows, _ := s.Pool.Query(ctx, sql, args...)
	return pgx.CollectRows(rows, pgx.RowTo[string])
}
