package table

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/dedupd/dedupd/internal/nearest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// update changes the row of a message's key if the row is as the message expects, and adds
// none. Several messages of one row in a batch take their turns: statement k takes the k-th
// message of each row, since one statement can't update a row twice, and each must find the
// row as the one before has left it.
type update struct {
	*Sink
	onMismatch       policy.Mismatch
	absent           policy.Absent
	acceptReordering bool
}

func newUpdate(s *Sink, c Config) (mode, error) {
	errs := []error{c.needsKey()}
	if len(c.Expect) == 0 {
		errs = append(errs, errors.New("expect: mode update needs what a row must be like to take a message, such as {status: const:pending}"))
	}
	for _, name := range slices.Sorted(maps.Keys(c.Expect)) {
		switch col, err := placed("expect", name, c.Expect[name]); {
		case err != nil:
			errs = append(errs, err)
		case slices.Contains(c.Key, name):
			errs = append(errs, fmt.Errorf("expect.%s: it is part of the key, by which the row is found", name))
		case col.Field.Kind == message.FieldNow:
			errs = append(errs, fmt.Errorf("expect.%s: no row holds the time of a later transaction; expect another place", name))
		default:
			s.expected = append(s.expected, col)
		}
	}
	if len(c.Columns) > 0 && len(c.Columns) == len(c.Key) {
		errs = append(errs, errors.New("columns: they have nothing but the key, so no row would be changed"))
	}
	on, err := choice("on_mismatch", c.OnMismatch, policy.MismatchDeadLetter)
	absent, bad := choice("absent", c.Absent, policy.AbsentKeep)
	return &update{s, on, absent, c.AcceptReordering}, errors.Join(append(errs, err, bad)...)
}

func (m *update) overwrites() bool { return true }

func (m *update) keeps(c columns.Column) bool {
	return m.absent == policy.AbsentKeep && !slices.Contains(m.key, c.Name) && mayKeep(c)
}

func (m *update) access(column string) access {
	isKey := slices.Contains(m.key, column)
	return access{updates: !isKey, selects: isKey}
}

// undoes is false if a message changes what it expects: then an older one no longer finds the
// row as it expects once a newer one was there.
func (m *update) undoes() bool {
	return !slices.ContainsFunc(m.expected, func(e columns.Column) bool {
		return slices.ContainsFunc(m.cols, func(c columns.Column) bool { return c.Name == e.Name && c.Field != e.Field })
	})
}

func (m *update) needsOrder() error {
	if m.acceptReordering || !m.undoes() {
		return nil
	}
	return errors.New("expect: no message changes what it expects, and a NATS queue has no order: an older message would overwrite a newer one; " +
		"expect a column that each message changes, such as a version or a status, or set accept_reordering: true if that may be")
}

func (m *update) check(t *target) error {
	var errs []error
	var noSelect []string
	for _, e := range m.expected {
		switch a := t.attribute(e.Name); {
		case a == nil:
			hint := "the columns are " + strings.Join(t.names(), ", ")
			if name := nearest.Name(e.Name, t.names()); name != "" {
				hint = fmt.Sprintf("did you mean %q?", name)
			}
			errs = append(errs, fmt.Errorf("expect: it has no column %q; %s", e.Name, hint))
		case !a.maySelect:
			noSelect = append(noSelect, quote(e.Name))
		}
	}
	if len(noSelect) > 0 {
		errs = append(errs, fmt.Errorf("expect: this role lacks a privilege; run: GRANT SELECT (%s) ON %s TO <role>", strings.Join(noSelect, ", "), m.sql()))
	}
	return errors.Join(errs...)
}
