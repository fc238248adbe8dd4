package config

import (
	"fmt"
	"net"
	"reflect"
	"regexp"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/message"
)

// validator collects the problems of a configuration that could be read.
type validator struct {
	*Config
	problems Problems
}

func (v *validator) add(path, format string, args ...any) {
	v.problems = append(v.problems, v.problem(path, format, args...))
}

// validate finds everything that is wrong.
func (c *Config) validate() Problems {
	v := &validator{Config: c}
	v.tags("", reflect.ValueOf(c).Elem())
	v.name("scope", c.Scope)
	v.sources()
	v.database()
	v.id()
	v.dedup()
	if len(c.Sink) == 0 || len(c.Sink) == 1 && c.Sink[0].Kind == "" {
		v.add("sink", "is required: one kind of sink, such as table or statement")
	}
	v.batch()
	v.retention()
	v.positive("dead_letters.retention", c.DeadLetters.Retention)
	if host, port, err := net.SplitHostPort(c.HTTP.Listen); err != nil || !isPort(port) {
		v.add("http.listen", "%q is no address to listen at; write host:port, as in 127.0.0.1:9464", c.HTTP.Listen)
	} else if strings.ContainsAny(host, " /") {
		v.add("http.listen", "%q is no host", host)
	}
	return v.problems
}

const notYet = "not in this version yet"

// tags checks values against their types and their fields' min, max and required
// tags.
func (v *validator) tags(path string, s reflect.Value) {
	for i := range s.NumField() {
		f := s.Type().Field(i)
		name, ok := f.Tag.Lookup("yaml")
		if !ok {
			continue
		}
		at, value := join(path, name), s.Field(i)
		empty := value.IsZero() || value.Kind() == reflect.Slice && value.Len() == 0
		if f.Tag.Get("required") != "" && empty && f.Type != reflect.TypeFor[Sinks]() {
			v.add(at, "is required")
		}
		if p, ok := value.Interface().(policy.Policy); ok {
			if err := policy.Check(p); err != nil {
				v.add(at, "%v", err)
			}
		}
		v.bounds(at, value, f.Tag)
		if value.Kind() == reflect.Pointer && !value.IsNil() {
			value = value.Elem()
		}
		switch {
		case value.Kind() == reflect.Struct:
			v.tags(at, value)
		case value.Kind() == reflect.Slice && value.Type().Elem().Kind() == reflect.Struct:
			for j := range value.Len() {
				v.tags(index(at, j), value.Index(j))
			}
		}
	}
}

func (v *validator) bounds(path string, value reflect.Value, tag reflect.StructTag) {
	var n float64
	switch {
	case value.CanInt():
		n = float64(value.Int())
	case value.CanFloat():
		n = value.Float()
	default:
		return
	}
	if s, ok := tag.Lookup("min"); ok {
		if least, _ := strconv.ParseFloat(s, 64); n < least {
			v.add(path, "must be at least %s, not %v", s, value)
		}
	}
	if s, ok := tag.Lookup("max"); ok {
		if most, _ := strconv.ParseFloat(s, 64); n > most {
			v.add(path, "must be at most %s, not %v", s, value)
		}
	}
}

var (
	namePattern   = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,39}$`)
	schemaPattern = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,62}$`)
)

func (v *validator) name(path, name string) {
	if name != "" && !namePattern.MatchString(name) {
		v.add(path, "%q can't be a name; use lower-case letters, digits, _ and -, at most 40, the first a letter or a digit", name)
	}
}

func (v *validator) database() {
	d := &v.Database
	if !schemaPattern.MatchString(d.Schema) || strings.HasPrefix(d.Schema, "pg_") {
		v.add("database.schema", "%q can't be the schema; use lower-case letters, digits and _, not beginning with a digit or pg_", d.Schema)
	}
	if d.URL != "" {
		if _, err := pgx.ParseConfig(d.URL.Reveal()); err != nil {
			// pgx's own text repeats its input, which can't be redacted reliably if it
			// isn't understood.
			path := "database.url"
			if d.URLFile != "" {
				path = "database.url_file"
			}
			v.add(path, "is neither a postgres://user@host/database URL nor key=value text that Postgres clients accept; %s", urlHint(d.URL.Reveal()))
		}
	}
}

func urlHint(url string) string {
	switch {
	case !strings.Contains(url, "://") && !strings.Contains(url, "="):
		return "it has no postgres:// in front"
	case strings.Contains(url, "://") && !strings.HasPrefix(url, "postgres://") && !strings.HasPrefix(url, "postgresql://"):
		return "it must begin with postgres://"
	default:
		return "check the port, the sslmode and its files, and write special characters of a password as %XX"
	}
}

func (v *validator) id() {
	if v.ID.MaxBytes < 16 || v.ID.MaxBytes > mib {
		v.add("id.max_bytes", "must be between 16 and 1MiB, not %s", v.ID.MaxBytes)
	}
	if len(v.ID.From) == 0 {
		v.add("id.from", "is required: where the id is found, such as header:message-id")
	}
	if v.places["id.from"].line == 0 && v.Dedup.Strategy == policy.StrategySequence {
		return // it is dedup.sequence's places
	}
	for i, from := range v.ID.From {
		if _, err := message.NewIdentity([]string{from}, int(v.ID.MaxBytes)); err != nil {
			v.add(v.item("id.from", i), "%v", err)
		}
	}
}

// item is the path of a list's item, or of the list if the file has a single value
// there.
func (v *validator) item(path string, i int) string {
	if at := index(path, i); v.places[at].line > 0 {
		return at
	}
	return path
}

func (v *validator) dedup() {
	d := &v.Dedup
	if d.Strategy != policy.StrategyClaim {
		for i, s := range v.Sources {
			if s.NATS != nil && s.NATS.Mode == policy.ModeQueue {
				v.add(index("sources", i)+".nats.mode", "a queue has no order to go by, so dedup.strategy can't be %s; use claim, which knows what was delivered again by its id", d.Strategy)
			}
		}
		unread := []string{"dedup.on_conflict", "dedup.fingerprint"}
		if d.Strategy == policy.StrategyPosition {
			unread = append(unread, "dedup.on_duplicate")
		}
		for _, key := range unread {
			if v.places[key].line > 0 {
				v.add(key, "strategy %s doesn't read this; delete the line, or use claim", d.Strategy)
			}
		}
	}
	v.sequence()
	if d.OnDuplicate == policy.DuplicateReply {
		v.add("dedup.on_duplicate", "reply is %s; use drop or dead_letter", notYet)
	}
	if len(d.Fingerprint) == 0 {
		v.add("dedup.fingerprint", "is empty; use value, none, or json:PATH")
	}
	for i, s := range d.Fingerprint {
		at := v.item("dedup.fingerprint", i)
		if s == "value" || s == "none" {
			if len(d.Fingerprint) > 1 {
				v.add(at, "%s can't be in a list with others", s)
			}
			continue
		}
		if f, err := message.ParseField(s); err != nil || f.Kind != message.FieldJSON {
			v.add(at, "%q can't be compared; use value, none, or one or several json:PATH", s)
		}
	}
}

func (v *validator) sequence() {
	s := &v.Dedup.Sequence
	if len(s.Producer) == 0 {
		v.add("dedup.sequence.producer", "names no place")
	}
	check := func(at, place string) {
		if _, err := message.NewIdentity([]string{place}, 1); err != nil {
			v.add(at, "%v", err)
		}
	}
	for i, p := range s.Producer {
		check(v.item("dedup.sequence.producer", i), p)
	}
	check("dedup.sequence.seq", s.Seq)
	if s.Epoch != "" {
		check("dedup.sequence.epoch", s.Epoch)
	}
}

func (v *validator) batch() {
	b := &v.Batch
	if b.MaxBytes < 64*kib || b.MaxBytes > 1<<30 {
		v.add("batch.max_bytes", "must be between 64KiB and 1GiB, not %s", b.MaxBytes)
	}
	if b.InflightBytes < b.MaxBytes {
		v.add("batch.inflight_bytes", "%s is less than batch.max_bytes (%s): one batch would not fit; raise it", b.InflightBytes, b.MaxBytes)
	}
	if b.MaxInflatedBytes != 0 && b.MaxInflatedBytes < mib || b.MaxInflatedBytes > maxInflated {
		v.add("batch.max_inflated_bytes", "must be between 1MiB and 1GiB, not %s", b.MaxInflatedBytes)
	}
}

// maxGenerations bounds the look-ups of one claim, and the catalog.
const maxGenerations = 1000

func (v *validator) retention() {
	r := &v.Retention
	v.positive("retention.window", r.Window)
	v.positive("retention.generation", r.Generation)
	v.positive("retention.max_hold", r.MaxHold)
	if r.Schedule < Duration(1e9) {
		v.add("retention.schedule", "must be at least 1s, not %s", r.Schedule)
	}
	if r.Window > 0 && r.Generation > r.Window {
		v.add("retention.generation", "%s is longer than retention.window (%s): claims would live several times the window; use a sixth of the window or less", r.Generation, r.Window)
	} else if r.Generation > 0 && r.Window/r.Generation > maxGenerations {
		v.add("retention.generation", "a window of %s in generations of %s makes %d tables; make the generation longer, at most %d are sensible",
			r.Window, r.Generation, r.Window/r.Generation, maxGenerations)
	}
	if r.MaxHold > 0 && r.MaxHold < r.Window {
		v.add("retention.max_hold", "%s is shorter than retention.window (%s): claims would be dropped before their time", r.MaxHold, r.Window)
	}
}

func (v *validator) positive(path string, d Duration) {
	if d <= 0 {
		v.add(path, "must be longer than 0")
	}
}

func isPort(s string) bool {
	n, err := strconv.Atoi(s)
	return err == nil && n >= 0 && n <= 65535
}

func checkHostPort(s string) error {
	host, port, err := net.SplitHostPort(s)
	if err != nil || host == "" || !isPort(port) || port == "0" || strings.ContainsAny(host, "/ @") {
		return fmt.Errorf("%q is no broker's address; write host:port, as in localhost:9092", s)
	}
	return nil
}
